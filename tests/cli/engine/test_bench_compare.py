import json

import pytest

from jkvq.bench.steps import DecodeStep
from jkvq.support.errors import UserError
from tests.cli.running import run, run_json
from tests.tiny import CONFIG

OURS = DecodeStep("bf16", 2, 16, 4.0, 500.0, 2_000_000, 0.5, 1.0, 9, 1.0, None)


@pytest.fixture
def measured(monkeypatch):
    """Commands that measure nothing; tests/bench measures."""
    monkeypatch.setattr("jkvq.bench.shapes.shape_config", lambda name: CONFIG)
    monkeypatch.setattr("jkvq.bench.steps.bench_decode", lambda *_: iter([OURS]))
    monkeypatch.setattr(
        "jkvq.bench.transformers_steps.bench_transformers", lambda *_: {(2, 16): 10.0}
    )


def test_both_are_in_one_table(measured, tmp_path):
    given = ("bench", "compare", "--batch", "2", "--context", "16", "--cache", "bf16")
    printed = run(*given)
    for part in ("transformers, 16 bits", "10.00", "4.00", "2.50"):
        assert f"│ {part} " in printed
    found = run_json(*given, "--out", str(tmp_path))
    assert found["rows"][1]["over_transformers"] == 2.5
    assert json.loads((tmp_path / "compare.json").read_text()) == found


def test_unknown_shapes_are_refused():
    with pytest.raises(UserError, match="shape 'gpt' is not known"):
        run("bench", "compare", "--shape", "gpt")
