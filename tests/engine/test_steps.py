import re

import jax
import jax.numpy as jnp
import pytest

from jkvq.cache.layout import empty_cache
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.engine.sampling import SamplerArrays, Sampling
from jkvq.engine.steps import BURST, Decoding, decode_burst, prefill_chunk
from tests.tiny import CONFIG, EOS, tiny_llm

PAGES, COLUMNS = 40_009, 8


def _state(rows: int, **changes) -> Decoding:
    fields = {
        "token": jnp.arange(rows, dtype=jnp.int32) + 65,
        "made": jnp.ones(rows, jnp.int32),
        "budget": jnp.full(rows, 100),
        "active": jnp.ones(rows, bool),
        "failed": jnp.zeros(rows, bool),
        "seen": jnp.zeros((rows, CONFIG.vocab), bool),
        "stop_tokens": jnp.array([EOS, -1]),
        "sampler": SamplerArrays.stack([Sampling()] * rows),
    }
    return Decoding(**(fields | changes))


def _cache(cache: str, rows: int, pages: int = PAGES):
    table = 1 + jnp.arange(rows * COLUMNS, dtype=jnp.int32).reshape(rows, COLUMNS)
    return empty_cache(parse_spec(cache), CacheShape.of(CONFIG), pages, table)


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


def _lowered(step: str, cache: str):
    stored = _cache(cache, 2)
    llm = tiny_llm(cache)
    if step == "decode":
        return decode_burst.lower(
            llm.config, llm.params, llm.basis, stored, _state(2), jnp.int32(4)
        )
    tokens, count = jnp.zeros((2, 32), jnp.int32), jnp.array([32, 7])
    last = jnp.zeros((2, CONFIG.width))
    return prefill_chunk.lower(llm.config, llm.params, llm.basis, stored, tokens, count, last)


CACHES = ["f32", "bf16", "int3", "tq-k3v3", "quarot-int2,sink=4,recent=16"]


@pytest.mark.parametrize("cache", [f"{name},page=8" for name in CACHES])
@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_compiled_step_makes_no_copy_of_the_cache(step, cache):
    compiled = _lowered(step, cache).compile()
    groups = _cache(cache, 2).groups
    for array in jax.tree.leaves(groups):
        operations = _operations(compiled, array)
        assert operations
        assert [op for op in operations if not re.fullmatch(IN_PLACE, op)] == []
    # Nor does it hold anything of that size besides its arguments.
    assert _temporary_bytes(compiled) < groups[0].key.codes.nbytes / 2


def test_compiled_step_check_would_see_a_copy():
    codes = _cache("f32,page=8", 2).groups[0].key.codes
    copying = jax.jit(lambda x: (x.at[0, 0].set(jnp.uint32(1)), x)).lower(codes).compile()
    assert "copy" in _operations(copying, codes)


def test_layers_of_one_spec_are_traced_once():
    text = _lowered("decode", "int4,page=8").as_text()
    assert text.count("func.func private @attend(") == 1
    assert text.count("call @attend(") == CONFIG.layers == 2


def test_decode_burst_ends_when_all_sequences_have():
    llm = tiny_llm()
    state = _state(2, budget=jnp.array([3, 5]))
    cache, state, drawn = decode_burst(
        CONFIG, llm.params, llm.basis, _cache("f32,page=8", 2, 64), state, jnp.int32(BURST)
    )
    assert state.made.tolist() == [3, 5]
    assert not state.active.any()
    assert cache.length.tolist() == [2, 4]  # the last token drawn is never stored
    assert (drawn.tokens[:, 4:] == 0).all()


def test_decode_burst_marks_scores_that_are_not_numbers():
    llm = tiny_llm()
    params = {**llm.params, "norm": {"weight": jnp.full(CONFIG.width, jnp.nan)}}
    _, state, _ = decode_burst(
        CONFIG,
        params,
        llm.basis,
        _cache("f32,page=8", 2, 64),
        _state(2, active=jnp.array([True, False])),
        jnp.int32(4),
    )
    assert state.failed.tolist() == [True, False]
    assert not state.active.any()
