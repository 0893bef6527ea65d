import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.attention.attend import LayerAttention
from jkvq.attention.step_plan import plan_step
from jkvq.cache.layout import KVCache, empty_cache
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.engine import steps
from jkvq.engine.runner import nothing_known
from jkvq.engine.sampling import SamplerArrays, Sampling
from jkvq.engine.steps import BURST, Decoding, all_layers, decode_burst
from jkvq.llm import LLM
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import embed, layer_program
from tests.tiny import CONFIG, EOS, tiny_llm

PAGES, COLUMNS = 40_009, 8
KNOWN = nothing_known(2)


def _state(rows: int, **changes) -> Decoding:
    fields = {
        "token": jnp.arange(rows, dtype=jnp.int32) + 65,
        "made": jnp.ones(rows, jnp.int32),
        "budget": jnp.full(rows, 100),
        "active": jnp.ones(rows, bool),
        "failed": jnp.zeros(rows, bool),
        "seen": jnp.zeros((rows, CONFIG.vocab), bool),
        "stop_tokens": jnp.array([[EOS, -1]] * rows),
        "sampler": SamplerArrays.stack([Sampling()] * rows),
    }
    return Decoding(**(fields | changes))


def _cache(cache: str, rows: int, pages: int = PAGES, config: ModelConfig = CONFIG) -> KVCache:
    table = 1 + jnp.arange(rows * COLUMNS, dtype=jnp.int32).reshape(rows, COLUMNS)
    return empty_cache(parse_spec(cache), CacheShape.of(config), pages, table)


# What may stand on an array of the cache: these pass it on or update it in place.
IN_PLACE = r"parameter|get-tuple-element|bitcast|scatter|dynamic-update-slice|fusion|opt-barrier"


def _operations(compiled, array: jax.Array) -> list[str]:
    """Instructions, those inside fusions too, whose result has the shape of ``array``."""
    shape = ",".join(map(str, array.shape))
    pattern = rf"\s*(?:ROOT )?%?\S+ = \w+\[{shape}\]\S* ([\w-]+)\("
    return re.findall(pattern, compiled.as_text())


def _temporary_bytes(compiled) -> int:
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def _lowered(step: str, llm: LLM, stored: KVCache):
    """All layers of a decode step, or the last one of a prefill or of a decode step."""
    if step == "all":
        run = llm.config, llm.params, llm.basis, stored
        return all_layers.lower(*run, _state(2), llm.implementation)
    sequences, width = stored.sequences, {"prefill": 32, "decode": 1}[step]
    how: Any = {"phase": step, "implementation": llm.implementation}
    layers, shape = llm.config.layers, CacheShape.of(llm.config)
    sizes = {"shape": shape, "group": llm.config.heads // shape.kv_heads, "width": width}
    plan = plan_step(*(sequences, llm.basis, jnp.array([1, 1])), spec=llm.spec, **sizes, **how)
    attend = LayerAttention.of(layers - 1, llm.spec, shape, llm.basis, plan, scale=0.1, **how)
    x, rotary = embed(
        llm.config, llm.params["embedding"], jnp.zeros((2, width), jnp.int32), plan.rotary
    )
    weights = llm.params["layers"][layers - 1]
    return layer_program.lower(llm.config, weights, x, rotary, attend, stored.groups)


def _check_copies(step: str, llm: LLM, stored: KVCache, in_place: str):
    compiled = _lowered(step, llm, stored).compile()
    for array in jax.tree.leaves(stored.groups):
        operations = _operations(compiled, array)
        assert operations
        assert [op for op in operations if not re.fullmatch(in_place, op)] == []
    # Nor does it hold anything of that size besides its arguments.
    assert _temporary_bytes(compiled) < stored.groups[0].key.codes.nbytes / 2


CACHES = ["f32", "bf16", "int3", "tq-k3v3", "quarot-int2,sink=4,recent=16,window_bits=8"]


@pytest.mark.parametrize("cache", [f"{name},page=8" for name in CACHES])
@pytest.mark.parametrize("step", ["prefill", "decode", "all"])
def test_compiled_step_makes_no_copy_of_the_cache(step, cache):
    _check_copies(step, tiny_llm(cache), _cache(cache, 2), IN_PLACE)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("step", "cache"),
    [
        ("prefill", "saw-int4"),
        ("prefill", "quarot-int2,sink=16,recent=32"),
        ("all", "saw-int4"),
        ("all", "quarot-int2,sink=16,recent=32"),
        ("all", "quarot-int2,sink=16,recent=32,window_bits=8"),
    ],
)
def test_compiled_step_makes_no_copy_of_the_cache_on_a_gpu(step, cache):
    """Kernels are custom calls that write to their operands."""
    wide = dataclasses.replace(CONFIG, head_dim=64, rope_divisors=(1.0,) * 32)
    llm = tiny_llm(f"{cache},page=16", config=wide)
    assert llm.implementation == "pallas"
    # Large beside the 32 MiB that cuBLAS takes to work in
    stored = _cache(f"{cache},page=16", 2, 5 * PAGES, wide)
    _check_copies(step, llm, stored, f"{IN_PLACE}|custom-call")


def test_compiled_step_check_would_see_a_copy():
    codes = _cache("f32,page=8", 2).groups[0].key.codes
    copying = jax.jit(lambda x: (x.at[0, 0].set(jnp.uint32(1)), x)).lower(codes).compile()
    assert "copy" in _operations(copying, codes)


def test_layers_of_one_spec_are_traced_once_in_a_step():
    text = _lowered("all", tiny_llm("int4,page=8"), _cache("int4,page=8", 2)).as_text()
    assert text.count("func.func private @_layer(") == 1
    assert text.count("call @_layer(") == CONFIG.layers == 2


@pytest.fixture(params=["by layers", "as on a GPU"])
def burst(request, monkeypatch):
    """Draws greedily for two sequences."""
    monkeypatch.setattr(steps, "_on_cpu", lambda: request.param == "by layers")

    def run(config, params, basis, cache, state, known, limit):
        keep = np.ones(2, bool)
        return decode_burst(config, params, basis, cache, state, keep, known, limit, "greedy")

    return run


def test_decode_burst_ends_when_all_sequences_have(burst):
    llm = tiny_llm()
    state = _state(2, budget=jnp.array([3, 5]))
    cache = _cache("f32,page=8", 2, 64)
    cache, state, drawn = burst(CONFIG, llm.params, llm.basis, cache, state, KNOWN, BURST)
    assert state.made.tolist() == [3, 5]
    assert not state.active.any()
    assert drawn.count.tolist() == [2, 4]
    assert not np.any(drawn.active) and not np.any(drawn.failed)
    assert cache.sequences.length.tolist() == [2, 4]  # the last token drawn is never stored


def test_decode_burst_draws_what_is_known(burst):
    llm, known = tiny_llm(), KNOWN.copy()
    known[1, :3] = 11, 12, 13
    run = CONFIG, llm.params, llm.basis
    free = burst(*run, _cache("f32,page=8", 2, 64), _state(2), KNOWN, 4)[2]
    drawn = burst(*run, _cache("f32,page=8", 2, 64), _state(2), known, 4)[2]
    assert np.asarray(drawn.tokens)[1, :3].tolist() == [11, 12, 13]
    assert np.asarray(drawn.tokens)[0, :4].tolist() == np.asarray(free.tokens)[0, :4].tolist()


def test_decode_burst_leaves_out_whom_it_shall_not_keep():
    llm = tiny_llm()
    cache, keep = _cache("f32,page=8", 2, 64), np.array([True, False])
    run = CONFIG, llm.params, llm.basis, cache, _state(2)
    cache, state, drawn = decode_burst(*run, keep, KNOWN, 4, "greedy")
    assert drawn.count.tolist() == [4, 0]
    assert cache.sequences.length.tolist() == [4, 0]
    assert state.active.tolist() == [True, False]
    cache, state, drawn = decode_burst(
        *run[:3], cache, state, np.zeros(2, bool), KNOWN, 4, "greedy"
    )
    assert drawn.count.tolist() == [0, 0]


def test_decode_burst_marks_scores_that_are_not_numbers(burst):
    llm = tiny_llm()
    params = {**llm.params, "norm": {"weight": jnp.full(CONFIG.width, jnp.nan)}}
    state = _state(2, active=jnp.array([True, False]))
    _, state, drawn = burst(CONFIG, params, llm.basis, _cache("f32,page=8", 2, 64), state, KNOWN, 4)
    assert state.failed.tolist() == [True, False] == drawn.failed.tolist()
    assert not state.active.any()
