import dataclasses
from types import SimpleNamespace

import pytest

import jkvq
from jkvq.cache.calibrated import Calibration
from jkvq.cli.evaluate.shared import calibrated, choose_calibrations
from tests.tiny import tiny_model


@pytest.fixture
def plain(tmp_path, monkeypatch):
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path))  # nothing is kept there yet
    return dataclasses.replace(tiny_model(), name="never-calibrated")


def test_calibrated_makes_on_first_use_what_a_cache_needs(plain, monkeypatch):
    made = SimpleNamespace(calibration=Calibration(method="jkvq"))
    monkeypatch.setattr("jkvq.loading.kept_calibration.calibrate_on_first_use", lambda *_: made)
    assert calibrated(plain, "jkvq-int4", None) is made.calibration
    assert calibrated(plain, "int4", None) is None
    assert calibrated(plain, "kivi-int2", None) is None


def test_calibrated_refuses_what_takes_minutes_and_names_the_command(plain):
    with pytest.raises(jkvq.UserError, match="--method kmeans --centroids 16"):
        calibrated(plain, "kmeans16-int4", None)


def test_a_calibration_that_serves_none_of_the_caches_is_refused(plain, tmp_path):
    folder = tmp_path / "center"
    jkvq.calibrate(plain, method="center", tokens=64, out=folder)
    served = choose_calibrations([folder], ["bf16", "int4,center=true"])
    assert served == {"bf16": None, "int4,center=true": folder}
    with pytest.raises(jkvq.UserError, match="center is of no use to bf16, jkvq-int4: leave it"):
        choose_calibrations([folder], ["bf16", "jkvq-int4"])
    name = f"int4,center=true,calibration={folder}"
    assert choose_calibrations([], ["int4,center=true", name]) == {
        "int4,center=true": None,
        name: folder,
    }
    with pytest.raises(jkvq.UserError, match="center is of no use to int4: leave it"):
        choose_calibrations([], [name, "bf16", f"int4,calibration={folder}"])
