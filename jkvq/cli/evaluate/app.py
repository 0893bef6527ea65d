"""`jkvq eval`: the commands that measure."""

import typer

from jkvq.cli.evaluate.fidelity import eval_fidelity
from jkvq.cli.evaluate.lm_eval import eval_lm_eval
from jkvq.cli.evaluate.niah import eval_niah
from jkvq.cli.evaluate.ppl import eval_ppl
from jkvq.cli.evaluate.tasks import eval_tasks

evaluate = typer.Typer(help="Measure a model through its cache.", no_args_is_help=True)
evaluate.command("ppl")(eval_ppl)
evaluate.command("fidelity")(eval_fidelity)
evaluate.command("niah")(eval_niah)
evaluate.command("tasks")(eval_tasks)
evaluate.command(
    "lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(eval_lm_eval)
