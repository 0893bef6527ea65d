import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.running import run


@pytest.mark.parametrize("as_json", [False, True])
def test_tune_hands_on_what_was_given_and_says_how_to_use_it(as_json, monkeypatch):
    given = {}

    def seen(model, **options):
        given.update(options, model=model)
        return SimpleNamespace(text="jkvq-int2,bits=4@0", bits=2.4375, kl=0.0123, folder=Path("f"))

    monkeypatch.setattr("jkvq.loading.tune.tune", seen)
    arguments = ["-m", "m", "--bits", "2.5", "--name", "mine", "--out", "f"]
    found = run("tune", *arguments, *(["--json"] if as_json else []))
    assert given["bits"] == 2.5
    assert (given["model"], given["name"], given["out"]) == ("m", "mine", Path("f"))
    assert given["max_kl"] is given["memory"] is given["context"] is None
    assert given["dtype"] == "float32"
    if as_json:
        expected = {"name": "mine", "cache": "jkvq-int2,bits=4@0", "bits": 2.4375, "kl": 0.0123}
        assert json.loads(found) == {"model": "m", "out": "f", **expected}
    else:
        assert "mine is jkvq-int2,bits=4@0\n2.438 bits, KL 0.0123 on text" in found
        assert "--model m --cache mine --calibration f" in found
