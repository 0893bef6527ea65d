import json

from tests.cli.running import run, run_json
from tests.tiny import CONFIG

PER_TOKEN = 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim * 2  # in 16 bits


def test_inspect_reports_the_memory(model):
    given = ("inspect", "--model", model, "--cache", "bf16", "--context", "128", "--batch", "2")
    given += ("--dtype", "float32")
    found = run_json(*given, "--memory", "1MB")["caches"]["bf16"]
    assert found["per_packed_token"] == PER_TOKEN
    assert found["bits_per_element"] == 16
    assert found["per_sequence"] == 128 * PER_TOKEN
    table = run(*given, "--memory", "1MB")
    assert "weights, float32" in table
    assert f"{found['fits_tokens']:,}" in table
    default = run_json("inspect", "--model", model)["caches"]
    packed, exact = (1024 - 64 - 64) / 1024, (64 + 64 + 64) / 1024  # windows, and a page to fill
    bits = packed * (4 + 32 / 16) + exact * 16
    assert default["jkvq-int4"]["bits_per_element"] == bits


def test_inspect_compares_caches(model):
    given = ("inspect", "--model", model, "--cache", "bf16,int4,page=128,int8", "--memory", "1MB")
    caches = run_json(*given)["caches"]
    assert list(caches) == ["bf16", "int4,page=128", "int8"]
    assert len({size["weights"] for size in caches.values()}) == 1
    assert caches["bf16"]["fits"] < caches["int8"]["fits"] < caches["int4,page=128"]["fits"]
    shown = next(line for line in run(*given).splitlines() if "bits per element" in line)
    assert [cell.strip() for cell in shown.split("│")[2:-1]] == ["16.00", "6.00", "10.00"]


def test_inspect_needs_no_weights(tmp_path):
    """The shape of Qwen3-8B, whose parameters are counted by hand: in bfloat16, as on a GPU."""
    described = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    given = ("--model", str(tmp_path / "config.json"), "--cache", "bf16")
    found = run_json("inspect", *given, "--memory", "24GB")["caches"]["bf16"]
    attention = 4096 * 128 * (32 + 8 + 8 + 32) + 2 * 128
    layer = attention + 3 * 4096 * 12288 + 2 * 4096
    weights = 2 * (36 * layer + 2 * 151936 * 4096 + 4096)
    assert found["weights"] == weights
    per_token = 2 * 36 * 8 * 128 * 2
    pages = (24 * 10**9 - weights) // (64 * per_token)
    assert found["fits_tokens"] == 64 * (pages - 1)  # one page takes padding
