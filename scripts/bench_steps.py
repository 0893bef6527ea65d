"""Times whole steps of a model on this GPU: random bfloat16 weights in the shape of a known model.

    python -m scripts.bench_steps --caches bf16,jkvq-int4 --prefill 8x8192,1x32768

A decode step is a 32nd of a burst, least of several; a prefill is the better of two. Compilation is
timed apart; set JAX_ENABLE_COMPILATION_CACHE=false if programs may have been kept.
"""

import argparse
import dataclasses
import itertools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jkvq.cache.calibrated import methods_for
from jkvq.cache.layout import empty_cache, fill_table, pages_for, table_columns
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec, split_names
from jkvq.engine.capacity import call_limits
from jkvq.engine.runner import Runner, nothing_known
from jkvq.engine.sampling import SamplerArrays, Sampling
from jkvq.engine.steps import BURST, Decoding, decode_burst
from jkvq.llm import LLM, with_cache
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import abstract_params
from jkvq.models.model import Model
from jkvq.scheduling.scheduler import Scheduler
from jkvq.scheduling.sequence import Sequence
from jkvq.support.compile_clock import compile_seconds
from scripts.bench_kernels import made_up

QWEN3_8B = ModelConfig(
    family="qwen3",
    layers=36,
    width=4096,
    mlp_width=12288,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=151936,
    context=40960,
    norm_eps=1e-6,
    rope_theta=1e6,
    rope_divisors=(1.0,) * 64,
    qk_norm=True,
)
REPEATS = 5


def random_model(config: ModelConfig) -> Model:
    """Weights of the size that a trained model's have."""
    leaves, tree = jax.tree.flatten(abstract_params(config, jnp.bfloat16))
    keys = jax.random.split(jax.random.key(0), len(leaves))

    @jax.jit
    def draw(key, like):
        return jax.random.normal(key, like.shape, jnp.bfloat16) * (0.02 if like.ndim > 1 else 1.0)

    params = [draw(key, leaf) for key, leaf in zip(keys, map(_zeros, leaves), strict=True)]
    return Model("random", config, tree.unflatten(params), None)  # pyright: ignore


def _zeros(leaf):
    return jnp.zeros(leaf.shape, leaf.dtype)


def time_decode(llm: LLM, batch: int, tokens: int) -> tuple[float, float]:
    """Milliseconds of a step after so many tokens, and the seconds its program compiled for."""
    tokens_at_end = tokens + 2 * BURST * REPEATS
    pages = pages_for(tokens_at_end, llm.spec)
    own = 1 + np.arange(batch * pages).reshape(batch, pages)
    table = jnp.asarray(fill_table(llm.spec, own.tolist(), table_columns(tokens_at_end, llm.spec)))
    cache = empty_cache(llm.spec, CacheShape.of(llm.config), 1 + batch * pages, table)
    now = dataclasses.replace(cache.sequences, length=jnp.full(batch, tokens, jnp.int32))
    cache = dataclasses.replace(cache, sequences=now)
    state = Decoding(
        token=jnp.arange(batch, dtype=jnp.int32),
        made=jnp.zeros(batch, jnp.int32),
        budget=jnp.full(batch, 1 << 20, jnp.int32),
        active=jnp.ones(batch, bool),
        failed=jnp.zeros(batch, bool),
        seen=jnp.zeros((batch, llm.config.vocab), bool),
        stop_tokens=jnp.full((batch, 8), -1, jnp.int32),
        sampler=SamplerArrays.stack([Sampling()] * batch),
    )
    best, before, compiled = np.inf, compile_seconds(), 0.0
    for repeat in range(REPEATS):
        start = time.perf_counter()
        cache, state, drawn = decode_burst(
            *(llm.config, llm.params, llm.basis, cache, state),
            *(np.ones(batch, bool), nothing_known(batch), BURST, "greedy", llm.implementation),
        )
        jax.block_until_ready(drawn)
        if repeat:
            best = min(best, time.perf_counter() - start)
        else:
            compiled = compile_seconds() - before
    assert not state.failed.any() and state.active.all()
    return best / BURST * 1e3, compiled


def prefill(llm: LLM, prompts: list[list[int]]) -> jax.Array:
    """The hidden state of the last prompt's last token, when all are stored."""
    limits = call_limits(llm, [len(prompt) + 1 for prompt in prompts])
    scheduler, runner = Scheduler(llm.spec, limits, prefix_cache=False), Runner(llm, limits)
    for number, prompt in enumerate(prompts):
        scheduler.submit(Sequence(number, prompt, 1))
    hidden = None
    while any(each.state != "decode" for each in (*scheduler.waiting, *scheduler.running)):
        for group in scheduler.plan(1).groups:
            width = scheduler.width(group[0].end - group[0].start)
            hidden = runner.prefill(group, width)
    assert hidden is not None
    return hidden


def time_prefill(llm: LLM, batch: int, tokens: int) -> tuple[float, float]:
    """Prompt tokens a second, and the seconds that the programs compiled for."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, llm.config.vocab, (batch, tokens)).tolist()
    best, before, compiled = np.inf, compile_seconds(), 0.0
    for repeat in range(3):
        start = time.perf_counter()
        jax.block_until_ready(prefill(llm, prompts))
        if repeat:
            best = min(best, time.perf_counter() - start)
        else:
            compiled = compile_seconds() - before
    return batch * tokens / best, compiled


def main() -> None:
    """Prints milliseconds of a decode step for each cache, batch and length."""
    parser = argparse.ArgumentParser(description="Times steps of the Qwen3-8B shape.")
    parser.add_argument("--caches", default="bf16,jkvq-int4", help="with commas between")
    parser.add_argument("--steps", default="1x1024,32x8192", help="decode: batch x tokens")
    parser.add_argument("--prefill", default="", help="prompts: batch x tokens")
    parser.add_argument("--implementations", default="pallas", help="with commas between")
    parser.add_argument("--out", type=Path, help="write JSON too")
    args = parser.parse_args()
    model, found = random_model(QWEN3_8B), {}
    shape = CacheShape.of(model.config)
    ways = args.implementations.split(",")
    for name, way in itertools.product(split_names(args.caches), ways):
        spec, cache = parse_spec(name), name if len(ways) == 1 else f"{name} {way}"
        calibration = made_up(shape, spec.key.bits) if methods_for(spec) else None
        llm = with_cache(model, spec, calibration, implementation=way)
        for step in filter(None, args.prefill.split(",")):
            rate, compiled = time_prefill(llm, *map(int, step.split("x")))
            found[f"{cache} prefill {step}"] = {"tokens_per_s": rate, "compile_s": compiled}
            print(
                f"{cache:20} prefill {step:10} {rate:7.0f} tokens/s, compiled in {compiled:.0f} s"
            )
        for step in filter(None, args.steps.split(",")):
            batch, tokens = map(int, step.split("x"))
            ms, compiled = time_decode(llm, batch, tokens)
            found[f"{cache} {step}"] = {"ms": ms, "compile_s": compiled}
            print(f"{cache:20} {step:10} {ms:7.2f} ms, compiled in {compiled:.0f} s", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
