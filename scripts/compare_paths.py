"""Compares what a model writes through the kernels with what it writes through the reference path.

python -m scripts.compare_paths --text test.raw.gz --caches int4,oscar-int2 [--calibration DIR]

Greedy, from prompts cut out of a text, in float32. Where two texts part, the gap is what the
reference path's logits have between the two tokens. The last columns are the reference path
against itself with every weight moved by a millionth: what rounding alone does to the cache.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer

import jkvq
from jkvq.batch import Batch
from jkvq.evaluate import first_tokens, read_text
from jkvq.llm import DEFAULT_MODEL, LLM, load_plain, with_cache
from jkvq.models.decoder import forward, logits

PROMPTS = 8
NEW = 32  # tokens written
MOVE = 1e-6

_forward = jax.jit(forward, static_argnames=("config", "own"))


def prompts_of(llm: LLM, text: Path, length: int) -> list[list[int]]:
    """Prompts of about ``length`` tokens, no two as long."""
    lengths = [length + 11 * i for i in range(PROMPTS)]
    tokens = first_tokens(llm, read_text(text), sum(lengths))
    return [part.tolist() for part in np.split(np.asarray(tokens), np.cumsum(lengths)[:-1])]


def write(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens that follow each prompt."""
    options = {"max_new_tokens": NEW, "ignore_eos": True, "temperature": 0.0}
    texts = jkvq.generate(llm, prompts, **options)
    assert isinstance(texts, list)
    return [text.tokens for text in texts]


def gap(llm: LLM, prompt: list[int], tokens: list[int], pair: tuple[int, int]) -> float:
    """Between the logits of two tokens after a prompt and what followed it."""
    batch = Batch(llm, [prompt], [NEW])
    hidden = batch.prefill(llm, [prompt])[:1]
    if tokens:
        padded = np.zeros((1, NEW), np.int32)
        padded[0, : len(tokens)] = tokens
        count = jnp.asarray([len(tokens)])
        found, _ = _forward(
            llm.config, llm.params, llm.basis, batch.cache, padded, count, own="stored"
        )
        hidden = found[:, len(tokens) - 1]
    scores = np.asarray(logits(llm.config, llm.params, hidden))[0]
    return float(abs(scores[pair[0]] - scores[pair[1]]))


def moved(llm: LLM) -> LLM:
    """The model with every weight moved a little, at random."""
    leaves, tree = jax.tree.flatten(llm.params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    moves = (1 + MOVE * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True))
    new = [x * move for x, move in zip(leaves, moves, strict=True)]
    return dataclasses.replace(llm, params=jax.tree.unflatten(tree, new))


def compared(llm: LLM, prompts: list, expected: list, found: list) -> str:
    """How many texts are the same, and the gaps where others part."""
    gaps = []
    for prompt, a, b in zip(prompts, expected, found, strict=True):
        at = next((i for i in range(NEW) if a[i] != b[i]), None)
        if at is not None:
            gaps.append(gap(llm, prompt, a[:at], (a[at], b[at])))
    shown = " ".join(f"{x:.4f}" for x in sorted(gaps))
    return f"{PROMPTS - len(gaps)} of {PROMPTS} the same" + (f", gaps {shown}" if gaps else "")


def main(
    text: Annotated[Path, typer.Option(help="A text file.")],
    model: Annotated[str, typer.Option()] = DEFAULT_MODEL,
    caches: Annotated[str, typer.Option()] = "bf16,int4,saw-int4,quarot-int2",
    calibration: Annotated[Path | None, typer.Option(help="What `jkvq calibrate` wrote.")] = None,
    implementation: Annotated[str, typer.Option()] = "pallas",
    length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 420,
) -> None:
    """Prints two lines for each cache."""
    base = load_plain(model, dtype="float32")
    prompts = prompts_of(base, text, length)
    for cache in caches.split(","):
        kernels = with_cache(base, cache, calibration, implementation=implementation)
        llm = dataclasses.replace(kernels, implementation="reference")
        expected = write(llm, prompts)
        for name, other in ((implementation, kernels), ("moved weights", moved(llm))):
            found = compared(llm, prompts, expected, write(other, prompts))
            print(f"{cache}, {name}: {found}", flush=True)


if __name__ == "__main__":
    typer.run(main)
