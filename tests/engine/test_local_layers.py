"""Layers with a window over pages of their own: texts are the same, and old pages are let go."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.attention.pack import pack_due
from jkvq.attention.step_plan import plan_step
from jkvq.cache.basis import Basis, make_basis
from jkvq.cache.layout import KVCache, empty_cache, layer_groups, pages_of_local, stored_bytes
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.engine import capacity
from jkvq.engine.engine import Engine
from jkvq.engine.forward import forward
from jkvq.engine.options import Options
from jkvq.llm import LLM
from jkvq.models.config import LocalLayers
from jkvq.models.decoder import logits
from tests.tiny import CONFIG, tiny_llm

WINDOW, CHUNK, PAGE = 20, 32, 8
PROMPT = np.random.default_rng(0).integers(0, 256, 83).tolist()
ALL, SOME = (0, 1), (0,)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(capacity, "_CHUNKS", {"cpu": (CHUNK,)})


def _llm(cache: str, layers: tuple[int, ...]) -> LLM:
    local = LocalLayers(layers, WINDOW, CONFIG.rope_theta, CONFIG.rope_divisors)
    return tiny_llm(cache, config=dataclasses.replace(CONFIG, local=local))


@jax.jit
def _pack(cache: KVCache, basis: Basis, count):
    return pack_due(cache, basis, count, "reference")


def _text(llm: LLM, prompt: list[int], budget: int) -> tuple[list[int], list[float]]:
    """The likeliest tokens, and their log-probabilities, by a cache that lets go of nothing.

    The prompt comes in the engine's chunks.
    """
    pages = 1 + np.random.default_rng(1).permutation(32).astype(np.int32)
    cache = empty_cache(llm.spec, CacheShape.of(llm.config), 33, jnp.asarray(pages[None]))
    text, logprobs, hidden = [], [], jnp.zeros(0)
    model = llm.config, llm.params, llm.basis
    for start in range(0, len(prompt), CHUNK):
        part = prompt[start : start + CHUNK]
        tokens = np.zeros((1, CHUNK), np.int32)
        tokens[0, : len(part)] = part
        count = jnp.asarray([len(part)])
        hidden, cache = forward(*model, cache, jnp.asarray(tokens), count, phase="prefill")
        hidden = hidden[:, len(part) - 1]
    while True:
        scores = jax.nn.log_softmax(logits(llm.config, llm.params, hidden)[0])
        text.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
        if len(text) == budget:
            return text, logprobs
        one, token = jnp.ones(1, jnp.int32), jnp.asarray([text[-1:]], jnp.int32)
        cache = _pack(cache, llm.basis, one)
        hidden, cache = forward(*model, cache, token, one, phase="decode")
        hidden = hidden[:, 0]


@pytest.mark.parametrize(
    ("cache", "layers"),
    [
        pytest.param("f32,page=8", ALL, marks=pytest.mark.slow),
        ("f32,page=8", SOME),
        ("int4,page=8,sink=8,recent=8", SOME),
    ],
)
def test_texts_are_those_of_a_cache_that_keeps_everything(cache, layers):
    """Chunks of a prompt are longer than the window: they take the pages that they read last.

    With stored prompts a request begins with another one's pages: they are those of its window.
    """
    llm = _llm(cache, layers)
    alone, keeping = (
        Engine(llm, slots=2, pages=60, prefill_rows=1, prefix_cache=keeps)
        for keeps in (False, True)
    )
    options = Options(max_new_tokens=40, seed=0, ignore_eos=True)
    for prompt, engines in ((PROMPT, (alone, keeping)), ([*PROMPT[:70], 1, 2, 3], (keeping,))):
        text, logprobs = _text(llm, prompt, 40)
        for engine in engines:
            result = engine.submit_tokens(prompt, options).result()
            assert result.tokens == text
            # Sums of other shapes round otherwise, which can turn a code at a tie.
            bound = 1e-5 if cache.startswith("f32") else 1e-3
            np.testing.assert_allclose(result.logprobs, logprobs, atol=bound)
    assert keeping.stats.cached_tokens == 2 * CHUNK


def test_a_sequence_has_the_pages_of_its_window_at_most():
    llm = _llm("f32,page=8", SOME)
    engine = Engine(llm, slots=1, pages=60, prefix_cache=False)
    handle = engine.submit_tokens(PROMPT, Options(max_new_tokens=60, seed=0, ignore_eos=True))
    used = []
    while not handle.done:
        engine.step()
        if not handle.done:
            used.append(engine.stats.local_pages[0])
    # 19 tokens before the newest, the page that they begin in, and the burst's
    assert max(used) <= -(-(WINDOW - 1 + engine._long) // PAGE) + 1
    assert min(used) >= WINDOW // PAGE
    assert engine.stats.pages[0] == engine.stats.local_pages[0] == 0
    elements = 2 * 2 * 16  # keys and values of a token in a layer, in float32
    group = engine._runner._groups[1]
    stored = group.key.codes.nbytes + group.value.codes.nbytes
    assert stored == 4 * elements * PAGE * engine._scheduler.limits.local_pages


def test_local_layers_of_gemma_hold_their_window():
    """Gemma-3-270M: 15 of 18 layers see 512 tokens; they store so much of them, and 2 pages."""
    windows = tuple(None if (layer + 1) % 6 == 0 else 512 for layer in range(18))
    shape, each = CacheShape(18, 1, 256, windows), 15 * 2 * 256 * 2
    spec = parse_spec("bf16,page=64")
    local = stored_bytes(spec, shape, 0, 0, pages_of_local(spec, shape.window))
    assert local == (512 + 2 * 64) * each
    assert stored_bytes(spec, shape, 1, 0) == 64 * 3 * 2 * 256 * 2


@pytest.mark.parametrize("cache", ["int4,page=16", "int4,page=16,sink=16,recent=32"])
@pytest.mark.parametrize("window", [20, 50])
def test_the_kernels_are_told_to_read_the_tokens_of_the_window(cache, window):
    shape = CacheShape(2, 2, 64, (window, None))
    spec, lengths = parse_spec(cache), np.array([0, 3, 16, 19, 40, 64, 97, 130])
    basis = make_basis(spec, shape, None)
    table = jnp.arange(8 * 10, dtype=jnp.int32).reshape(8, 10)
    sequences = dataclasses.replace(
        empty_cache(spec, shape, 80, table).sequences, length=jnp.asarray(lengths, jnp.int32)
    )
    sizes = {"spec": spec, "shape": shape, "group": 1, "width": 1}
    how = {"phase": "decode", "implementation": "interpret"}
    plan = plan_step(sequences, basis, jnp.ones(8, jnp.int32), **sizes, **how)
    groups = layer_groups(spec, shape.layers, shape.windows)
    assert {group.window for group in groups} == {window, None}
    for group, own in zip(groups, plan.groups, strict=True):
        assert own.reads is not None
        spans = [(own.reads.packed, np.broadcast_to(spec.sink + np.arange(999), (8, 999)))]
        if own.reads.exact is not None and own.exact is not None:
            spans.append((own.reads.exact, np.asarray(own.exact.position)))
        for b, length in enumerate(lengths):
            seen = []
            for span, position in spans:
                first = 0 if span.first is None else int(span.first[b])
                seen += position[b, first : int(span.length[b])].tolist()
            oldest = 0 if group.window is None else max(0, length + 1 - group.window)
            assert sorted(seen) == list(range(oldest, length + 1))


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["int4,page=16", "int4,page=16,sink=16,recent=32"])
def test_the_kernels_give_what_the_reference_gives(cache):
    local = LocalLayers(SOME, WINDOW, CONFIG.rope_theta, CONFIG.rope_divisors)
    llm = tiny_llm(cache, config=dataclasses.replace(CONFIG, head_dim=64, local=local))
    kernels = dataclasses.replace(llm, implementation="interpret")
    options = Options(max_new_tokens=12, seed=0, ignore_eos=True)
    found, expected = (
        Engine(each, slots=1, pages=30).submit_tokens(PROMPT, options).result()
        for each in (kernels, llm)
    )
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-2)
