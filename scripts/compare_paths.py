"""Compares what a model writes through the kernels with what it writes through the reference path.

python -m scripts.compare_paths --caches int4,oscar-int2 [--text test.raw.gz] [--calibration DIR]

Greedy, in float32, from questions as `jkvq generate` puts them, or from prompts cut out of a text,
which are longer than the windows. Three lines for each cache:

- texts: how many texts are the same to the end;
- steps: how many tokens are the same if every step starts from the reference path's cache;
- last bits: the reference path against itself with every weight moved by one unit in its last
  place, up or down at random: what rounding alone does to the texts.

Where two tokens differ, the gap is what the reference path's logits have between them.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer

import jkvq
from jkvq.attention.pack import pack_due
from jkvq.cache.calibrated import methods_for
from jkvq.cache.layout import empty_cache, fill_table, pages_for, table_columns
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.defaults import DEFAULT_MODEL
from jkvq.engine.forward import forward
from jkvq.engine.prompt import encode_prompt
from jkvq.engine.steps import prefill_chunk
from jkvq.evaluation.corpus import first_tokens, read_text
from jkvq.llm import LLM, with_cache
from jkvq.models.decoder import logits
from jkvq.models.model import Model, load_model

QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "What is the capital of France?",
    "Explain photosynthesis to a child.",
    "Give me three tips for a better night's sleep.",
    "Tell me a short story about a lighthouse.",
    "What is the difference between a virus and a bacterium?",
    "Translate 'good morning' into Spanish.",
)
PROMPTS = len(QUESTIONS)
NEW = 32  # tokens written


def prompts_of(model: Model, text: Path | None, length: int) -> list[list[int]]:
    """The questions; or, of a text, prompts of about ``length`` tokens, no two as long."""
    if text is None:
        return [encode_prompt(model, question, chat=None) for question in QUESTIONS]
    lengths = [length + 11 * i for i in range(PROMPTS)]
    tokens = first_tokens(model.tokenizer, read_text(text), sum(lengths))
    return [part.tolist() for part in np.split(np.asarray(tokens), np.cumsum(lengths)[:-1])]


def write(llm: LLM, prompts: list[list[int]]) -> np.ndarray:
    """The tokens that follow each prompt, [prompts, NEW]."""
    options = {"max_new_tokens": NEW, "ignore_eos": True, "temperature": 0.0}
    return np.asarray([text.tokens for text in jkvq.generate(llm, prompts, **options)])


def replay(reference: LLM, other: LLM, prompts: list[list[int]], texts: np.ndarray):
    """The logits of both before every token of the texts, each [prompts, NEW, vocabulary].

    The cache is the reference's at every step but the first, which follows each one's own prefill.
    """
    first, cache = [], None
    for llm in (other, reference):
        cache, hidden = _prefilled(llm, prompts)
        first.append(logits(llm.config, llm.params, hidden))
    llm = reference
    found = _steps(llm.config, llm.params, llm.basis, cache, texts[:, :-1], other.implementation)
    return [
        np.concatenate([np.asarray(start)[:, None], np.asarray(rest)], axis=1)
        for start, rest in zip(reversed(first), found, strict=True)
    ]


def _prefilled(llm: LLM, prompts: list[list[int]]):
    """A cache with the prompts, stored in one chunk, and the hidden states of their last tokens."""
    spec, longest = llm.spec, max(map(len, prompts))
    pages = pages_for(longest + NEW, spec)
    own = 1 + np.arange(len(prompts) * pages).reshape(len(prompts), pages)
    table = fill_table(spec, own.tolist(), table_columns(longest + NEW, spec))
    cache = empty_cache(spec, CacheShape.of(llm.config), 1 + own.size, jnp.asarray(table))
    tokens = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    count = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    run = llm.config, llm.params, llm.basis, cache, jnp.asarray(tokens), count
    return prefill_chunk(*run, llm.implementation)[:2]


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def _steps(config, params, basis, cache, texts, implementation):
    run = functools.partial(forward, config, params, basis, phase="decode")

    def one(cache, tokens):
        count = jnp.ones_like(tokens)
        cache = pack_due(cache, basis, count, "reference")
        expected, new_cache = run(cache, tokens[:, None], count)
        found, _ = run(cache, tokens[:, None], count, implementation=implementation)
        return new_cache, tuple(logits(config, params, x[:, 0]) for x in (expected, found))

    _, found = jax.lax.scan(one, cache, texts.T)
    return tuple(x.swapaxes(0, 1) for x in found)


def moved(llm: LLM) -> LLM:
    """The model with every weight moved by one unit in its last place, up or down at random."""
    leaves, tree = jax.tree.flatten(llm.params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    new = [
        jnp.nextafter(x, jnp.where(jax.random.bernoulli(key, shape=x.shape), jnp.inf, -jnp.inf))
        for key, x in zip(keys, leaves, strict=True)
    ]
    return dataclasses.replace(llm, params=jax.tree.unflatten(tree, new))


def gaps_of(scores: np.ndarray, expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Between the logits of two tokens at every step, [prompts, NEW]."""
    a, b = (np.take_along_axis(scores, x[..., None], axis=-1)[..., 0] for x in (expected, found))
    return np.abs(a - b)


def shown(what: str, same: int, count: int, gaps: np.ndarray) -> str:
    """One line of the comparison."""
    differ = " gaps " + " ".join(f"{gap:.4f}" for gap in sorted(gaps)) if len(gaps) else ""
    return f"{what} {same} of {count} the same{differ}"


def main(
    text: Annotated[Path | None, typer.Option(help="A text file; questions without.")] = None,
    model: Annotated[str, typer.Option()] = DEFAULT_MODEL,
    caches: Annotated[str, typer.Option()] = "bf16,int4,saw-int4,quarot-int2",
    calibration: Annotated[Path | None, typer.Option(help="What `jkvq calibrate` wrote.")] = None,
    implementation: Annotated[str, typer.Option()] = "pallas",
    length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 420,
) -> None:
    """Prints three lines for each cache."""
    base = load_model(model, dtype="float32")
    prompts = prompts_of(base, text, length)
    for cache in caches.split(","):
        given = calibration if methods_for(parse_spec(cache)) else None
        kernels = with_cache(base, cache, given, implementation=implementation)
        reference = dataclasses.replace(kernels, implementation="reference")
        expected = write(reference, prompts)
        scores, others = replay(reference, kernels, prompts, expected)

        def texts(what: str, llm: LLM, scores=scores, expected=expected) -> str:
            found = write(llm, prompts)
            part = found != expected
            at = part.argmax(1)[:, None]  # the first token that differs
            gaps = np.take_along_axis(gaps_of(scores, expected, found), at, axis=1)[part.any(1)]
            return shown(what, PROMPTS - len(gaps), PROMPTS, gaps[:, 0])

        print(f"{cache}: {texts('texts', kernels)}", flush=True)
        choice = others.argmax(-1)
        gaps = gaps_of(scores, expected, choice)[choice != expected]
        print(f"{cache}: {shown('steps', choice.size - len(gaps), choice.size, gaps)}", flush=True)
        print(f"{cache}: {texts('last bits', moved(reference))}", flush=True)


if __name__ == "__main__":
    typer.run(main)
