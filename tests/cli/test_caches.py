import pytest

import jkvq
from jkvq.cache.specs.kept_names import keep_name
from jkvq.cache.specs.presets import PRESETS
from tests.cli.running import run, run_json


def test_caches_lists_every_preset(tmp_path, monkeypatch):
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path))
    found = run_json("caches")["caches"]
    assert list(found) == list(PRESETS)
    assert found["saw-int4"]["bits_per_element"] == 4.25
    assert found["oscar-int2"]["bits_per_element"] <= 2.30  # the 16-bit windows among them
    assert found["tq-k3v3"]["bits_per_element"] <= 3.13
    assert "bdr128-k" not in run_json("caches", "--head-dim", "64")["caches"]
    assert run("methods") == run("caches")
    tuned = "jkvq-int2,key.bits=4@0+3-5,key.digits=none@0+3-5"
    keep_name("narrow", tuned)
    assert run_json("caches")["caches"].pop("narrow")["about"] == tuned
    assert "narrow" in run("caches")


@pytest.mark.parametrize("number", ["0", "-5"])
def test_caches_of_no_channels_or_tokens_are_refused(number):
    for option, name in (("--head-dim", "head_dim"), ("--context", "context")):
        with pytest.raises(jkvq.UserError, match=f"{name}={number}: at least 1 is needed"):
            run("caches", option, number)
