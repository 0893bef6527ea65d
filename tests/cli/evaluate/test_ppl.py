import pytest

import jkvq
from tests.cli.running import run, run_json


def test_ppl_takes_baselines_and_windows(model, text):
    common = ("eval", "ppl", "--model", model, "--text", text, "--tokens", "400", "--cache")
    found = run_json(*common, "kivi-int2,int4", "--context", "200")
    results = found["results"]["400"]
    assert list(results) == ["bf16", "kivi-int2", "int4"]
    assert {score["scored"] for score in results.values()} == {399}
    # 128 keys at 2 + 32/32 bits, 72 values at 2 + 32/16, and two buffers of 128.
    expected = (128 * 3 + 72 * 4 + 256 * 16) / 400
    assert results["kivi-int2"]["bits_per_element"] == pytest.approx(expected)
    table = run(*common, "kivi-int2", "--context", "200", "--stride", "200")
    assert "windows of 200 every 200" in table
    assert f"{results['kivi-int2']['ppl']:,.3f}" in table


def test_ppl_compares_caches(model, text):
    found = run_json(
        *("eval", "ppl", "--model", model, "--text", text),
        *("--tokens", "40", "--cache", "int4,page=8,f32"),
    )
    assert found["model"] == model
    results = found["results"]["40"]
    assert list(results) == ["bf16", "int4,page=8", "f32"]  # the 16-bit cache is always there
    assert results["f32"]["ppl"] == pytest.approx(results["bf16"]["ppl"], rel=0.02)
    assert 0 == results["bf16"]["kl"] < results["f32"]["kl"] < results["int4,page=8"]["kl"]


def test_ppl_hands_on_the_implementation(model, text):
    common = ("eval", "ppl", "--model", model, "--text", text, "--tokens", "40")
    with pytest.raises(jkvq.UserError, match="implementation 'palas' is not known"):
        run(*common, "--implementation", "palas")


def test_ppl_scores_several_lengths_in_one_reading(model, text, tmp_path):
    common = ("eval", "ppl", "--model", model, "--text", text, "--cache", "int2,page=8,kivi-int2")
    picture = tmp_path / "kl.png"
    found = run_json(*common, "--tokens", "300,40", "--plot", picture)["results"]
    assert list(found) == ["40", "300"]
    alone = run_json(*common, "--tokens", "40")["results"]["40"]
    for cache, score in alone.items():
        assert found["40"][cache] == pytest.approx(score, rel=1e-5)
        assert found["300"][cache]["nll"] != pytest.approx(score["nll"], rel=1e-3)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(jkvq.UserError, match="a length of 1 tokens: from 2 to the text's 40"):
        run(*common, "--tokens", "1,40")
    with pytest.raises(jkvq.UserError, match="--plot draws KL from bf16: name another cache"):
        run(*common[:-1], "bf16", "--plot", picture)
