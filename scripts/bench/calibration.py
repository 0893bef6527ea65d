"""Times calibration's pass over a text against a plain forward of the same layers.

python -m scripts.bench.calibration [--model smollm2-135m] [--tokens 2048] [--json]

Both run one window after another. The forward has `jax.nn.dot_product_attention` where the pass
computes its moments; neither computes logits. Seconds of the process on a CPU, where other programs
count otherwise, and of the clock elsewhere: medians of rounds that take turns.
"""

import json
import resource
import statistics
import time
from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.table import Table

from jkvq.calibration.observe import observe, sequences
from jkvq.calibration.prose import default_text
from jkvq.defaults import DEFAULT_MODEL
from jkvq.evaluation.corpus import first_tokens
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import run
from jkvq.models.model import load_model

ROUNDS = 3


def attend(q, k, v, state, sinks=None):
    """Causal attention that keeps nothing."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True), state


def plain_forward(config: ModelConfig, params, tokens):
    """Final hidden states."""
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    plain = jax.tree_util.Partial(attend)
    return run(config, params, tokens, position, lambda _: plain, None)[0]


def main(
    model: str = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=1)] = 2048,
    window: Annotated[int, typer.Option(min=1)] = 2048,
    as_json: Annotated[bool, typer.Option("--json")] = False,
):
    """Prints a table, or JSON."""
    llm = load_model(model, dtype="float32")
    ids = first_tokens(llm.tokenizer, default_text(), tokens)

    def forward():
        for chunk, _ in sequences(ids, window):
            jax.block_until_ready(plain_forward(llm.config, llm.params, chunk))

    def calibration():
        observe(llm.config, llm.params, ids, window=window, context=llm.config.context)

    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    taken: dict = {forward: [], calibration: []}
    for _ in range(1 + ROUNDS):  # the first compiles
        for work, times in taken.items():
            start = clock()
            work()
            times.append(clock() - start)
    seconds = {work.__name__: statistics.median(times[1:]) for work, times in taken.items()}
    ratio = seconds["calibration"] / seconds["forward"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    device = jax.devices()[0].device_kind
    if as_json:
        found = {"seconds": seconds, "ratio": ratio, "peak_gib": peak}
        print(json.dumps({"model": model, "tokens": tokens, "device": device, **found}))
        return
    table = Table("", "seconds", title=f"{model}, {tokens:,} tokens, {device}")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.2f}")
    table.add_row("ratio", f"{ratio:.2f}")
    table.add_row("peak memory of the process", f"{peak:.1f} GiB")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
