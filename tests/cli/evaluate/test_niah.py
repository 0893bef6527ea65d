import inspect

import pytest

import jkvq
from jkvq.cli.evaluate.niah import eval_niah
from jkvq.evaluation.needles import TASKS
from tests.cli.running import run, run_json


def test_niah_scores_and_draws(model, text, tmp_path):
    plot = tmp_path / "niah.png"
    common = ("eval", "niah", "--model", model, "--haystack", text)
    chosen = ("--length", "200,300", "--depth", "50", "--trials", "1", "--task", "single")
    cells = run_json(*common, *chosen, "--plot", str(plot))["cells"]["bf16"]
    found = [tuple(cell.values()) for cell in cells]
    assert found == [("single", 200, 0.5, 0), ("single", 300, 0.5, 0)]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_niah_runs_all_tasks_unless_told():
    assert inspect.signature(eval_niah).parameters["task"].default == ",".join(TASKS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cache", "bf16,kitty-int2"], "cache 'kitty-int2' exists in `jkvq eval ppl`"),
        (["--length", "1k"], "length=1k: whole numbers with commas between"),
        (["--plot", "x.pdf"], "a picture is written as PNG"),
    ],
)
def test_niah_refuses_bad_input_before_a_model_is_loaded(text, arguments, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        run("eval", "niah", *arguments, "--haystack", text, "--model", "no-such-model")
