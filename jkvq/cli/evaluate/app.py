"""`jkvq eval`: the commands that measure."""

import typer

from jkvq.cli.evaluate.fidelity import eval_fidelity
from jkvq.cli.evaluate.niah import eval_niah
from jkvq.cli.evaluate.ppl import eval_ppl

evaluate = typer.Typer(help="Measure a model through its cache.", no_args_is_help=True)
evaluate.command("ppl")(eval_ppl)
evaluate.command("fidelity")(eval_fidelity)
evaluate.command("niah")(eval_niah)
