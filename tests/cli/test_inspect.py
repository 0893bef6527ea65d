from tests.cli.running import run, run_json
from tests.tiny import CONFIG


def test_inspect_reports_the_memory(model):
    given = ("inspect", "--model", model, "--cache", "bf16", "--context", "128", "--batch", "2")
    found = run_json(*given, "--memory", "1MB")
    per_token = 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim * 2
    assert found["per_packed_token"] == per_token
    assert found["bits_per_element"] == 16
    assert found["per_sequence"] == 128 * per_token
    table = run(*given, "--dtype", "float32")
    assert "16.00 bits per element" in table
    assert "weights, float32" in table
    default = run_json("inspect", "--model", model)
    packed, exact = (1024 - 64 - 64) / 1024, (64 + 64 + 64) / 1024  # windows, and a page to fill
    bits = packed * (4 + 32 / 16) + exact * 16
    assert (default["cache_name"], default["bits_per_element"]) == ("jkvq-int4", bits)
