import pytest

import jkvq
from tests.cli.running import run, run_json


def test_convert_writes_a_folder_that_loads(model, tmp_path):
    out = tmp_path / "new" / "copy"
    found = run_json("convert", "--model", model, "--out", str(out))
    assert found["bytes"] == sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    copy, original = (jkvq.load(folder, cache="bf16") for folder in (out, model))
    options = {"max_new_tokens": 3, "temperature": 0.0}
    found, expected = (jkvq.generate(llm, "Hi", **options) for llm in (copy, original))
    assert found.tokens == expected.tokens
    with pytest.raises(jkvq.UserError, match="exists and is not empty"):
        run("convert", "--model", model, "--out", str(out))


def test_the_current_folder_is_refused_before_the_model_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jkvq.loading.convert.open_checkpoint", None)
    with pytest.raises(jkvq.UserError, match=r"^\. is the current folder, .*; name a new folder$"):
        run("convert", "--out", ".")
