from tests.cli.running import run, run_json


def test_fidelity_prints_a_table_or_json_and_draws(model, text, tmp_path):
    common = (
        *("eval", "fidelity", "--model", model, "--text", text),
        *("--tokens", "60", "--cache", "int4,int2"),
    )
    plot = tmp_path / "fidelity.png"
    layers = run_json(*common, "--plot", str(plot))["layers"]
    assert {name: len(each) for name, each in layers.items()} == {"int4": 2, "int2": 2}
    shown = f"{layers['int4'][1]['score']:.3g}"
    for int4, int2 in zip(layers["int4"], layers["int2"], strict=True):
        assert int2.pop("top10") < int4.pop("top10")
        assert all(int2[measure] > 4 * int4[measure] for measure in int4 if measure != "hidden")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert shown in run(*common, "--layers")
