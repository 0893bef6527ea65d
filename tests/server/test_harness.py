"""lm-evaluation-harness finds over HTTP what it finds with transformers and the same weights."""

from typing import Any

import pytest

from tests.evaluation import test_lm_eval as harness  # which is skipped where there is none
from tests.server.conftest import running

pytest.importorskip("tenacity", reason="lm_eval[api] is not installed")
folder, llm, theirs, tasks = harness.folder, harness.llm, harness.theirs, harness.tasks


def test_local_completions_finds_the_same_as_the_harness_s_own_model(folder, llm, theirs, tasks):
    manager = harness.TaskManager(include_path=str(tasks), include_defaults=False)
    asked = {"tasks": ["choice", "sums", "free"], "task_manager": manager, "bootstrap_iters": 0}
    expected: Any = harness.simple_evaluate(theirs, **asked)
    with running(llm) as served:
        model_args = {
            "base_url": f"{served.address}/v1/completions",
            "model": "tiny",
            "tokenizer": str(folder),
            "tokenizer_backend": "huggingface",
            "max_length": harness.MOST,
            "batch_size": 3,
        }
        found: Any = harness.simple_evaluate("local-completions", model_args=model_args, **asked)
    for task, metrics in expected["results"].items():
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        assert numbers == pytest.approx({name: found["results"][task][name] for name in numbers})
    assert found["results"]["sums"]["acc,none"] == 0.5  # is_greedy is told rightly
    for own, reference in zip(
        found["samples"]["choice"], expected["samples"]["choice"], strict=True
    ):
        for (a, _), (b, _) in zip(own["filtered_resps"], reference["filtered_resps"], strict=True):
            assert a == pytest.approx(b, abs=1e-4)
