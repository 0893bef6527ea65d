"""`jkvq eval lm-eval`: the command line of lm-evaluation-harness, with our models."""

import typer

from jkvq.support.errors import UserError


def eval_lm_eval(context: typer.Context):
    """Run lm-evaluation-harness with its own options; its --model may be jkvq.

    jkvq eval lm-eval --model jkvq --model_args model=smollm2-135m,cache=jkvq-int4 --tasks arc_easy
    """
    try:
        from jkvq.loading.lm_eval import run_harness
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("lm_eval"):
            raise
        raise UserError(
            "lm-evaluation-harness is not installed: `pip install 'jkvq[lm-eval]'`"
        ) from None
    run_harness(context.args)
