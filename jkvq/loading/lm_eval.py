"""The model `jkvq` of lm-evaluation-harness: `--model jkvq --model_args model=...,cache=...`."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model

from jkvq.defaults import DEFAULT_MODEL
from jkvq.evaluation.lm_eval import HarnessLM
from jkvq.loading.load import load
from jkvq.support.errors import UserError

_KNOWN = ("model", "cache", "calibration", "dtype", "implementation", "max_length")


class LoadedLM(HarnessLM):
    """A model that is loaded as the harness's ``--model_args`` say.

    Args:
        model, cache, calibration, dtype, implementation: see `jkvq.load`.
        max_length: see `HarnessLM`.
        batch_size, max_batch_size, device: the harness gives them to every model, asked or not;
            here batches are as large as serves the device, which JAX chooses.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        cache: str | None = None,
        calibration: str | None = None,
        dtype: str | None = None,
        implementation: str | None = None,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **unknown: Any,
    ):
        for name in unknown:
            raise UserError(
                f"the model jkvq has no argument '{name}': known: {', '.join(_KNOWN)}; a cache "
                "with commas stands in quotes"
            )
        llm = load(
            model, cache=cache, calibration=calibration, dtype=dtype, implementation=implementation
        )
        super().__init__(llm, max_length=max_length)


register_model("jkvq")(LoadedLM)


def run_harness(arguments: Sequence[str]) -> None:
    """The harness's own command line, which knows the model `jkvq` here."""
    os.environ["DISABLE_MULTIPROC"] = "1"  # a fork of a process in which JAX has threads may hang
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
