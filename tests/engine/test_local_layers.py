"""Layers with a window over pages of their own: texts are the same, and old pages are let go."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.attention.pack import pack_due
from jkvq.cache.basis import Basis
from jkvq.cache.layout import KVCache, empty_cache, pages_of_local, stored_bytes
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.engine import capacity
from jkvq.engine.engine import Engine
from jkvq.engine.forward import forward
from jkvq.engine.options import Options
from jkvq.llm import LLM, with_cache
from jkvq.models.config import LocalLayers
from jkvq.models.decoder import logits
from jkvq.support.errors import UserError
from tests.tiny import CONFIG, tiny_llm, tiny_model

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
    [("f32,page=8", ALL), ("f32,page=8", SOME), ("int4,page=8,sink=8,recent=8", SOME)],
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


def test_the_kernels_serve_a_model_up_to_the_window_of_all_its_layers():
    own = WINDOW, CONFIG.rope_theta, CONFIG.rope_divisors
    model = {
        layers: tiny_model(
            config=dataclasses.replace(CONFIG, head_dim=64, local=LocalLayers(layers, *own))
        )
        for layers in (ALL, SOME)
    }
    served = with_cache(model[ALL], "int4,page=16", implementation="interpret").config
    assert (served.context, served.windows) == (WINDOW, ())
    whole = with_cache(model[ALL], "int4,page=16", implementation="reference").config
    assert (whole.context, whole.windows) == (CONFIG.context, (WINDOW, WINDOW))
    with pytest.raises(UserError, match="this model has layers with a window; use reference"):
        with_cache(model[SOME], "int4,page=16", implementation="interpret")
