import dataclasses

import pytest

import jkvq
from jkvq.cache.calibrated import Calibration
from jkvq.cli.evaluate.shared import calibrated
from tests.tiny import tiny_model


@pytest.fixture
def plain(tmp_path, monkeypatch):
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path))  # nothing is kept there yet
    return dataclasses.replace(tiny_model(), name="never-calibrated")


def test_calibrated_makes_on_first_use_what_a_cache_needs(plain, monkeypatch):
    made = Calibration(method="jkvq")
    monkeypatch.setattr("jkvq.loading.load.calibrate_on_first_use", lambda llm, spec: made)
    assert calibrated(plain, "jkvq-int4", None) is made
    assert calibrated(plain, "int4", None) is None
    assert calibrated(plain, "kivi-int2", None) is None


def test_calibrated_refuses_what_takes_minutes_and_names_the_command(plain):
    with pytest.raises(jkvq.UserError, match="--method kmeans --centroids 16"):
        calibrated(plain, "kmeans16-int4", None)
