import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.cache.layout import empty_cache
from jkvq.cache.shape import CacheShape
from jkvq.engine.forward import forward
from jkvq.evaluation import likelihood
from jkvq.evaluation.likelihood import Ending, likelihoods
from jkvq.models.decoder import logits
from tests.tiny import CONFIG, tiny_llm

RNG = np.random.default_rng(0)


def _tokens(count: int) -> tuple[int, ...]:
    return tuple(RNG.integers(0, 256, count).tolist())


def _decoded(llm, tokens: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities after each token, which decode reads one by one."""
    table = jnp.arange(1, 13, dtype=jnp.int32)[None]
    cache, rows = empty_cache(llm.spec, CacheShape.of(CONFIG), 13, table), []
    for token in tokens:
        hidden, cache = forward(
            *(llm.config, llm.params, llm.basis, cache),
            *(jnp.asarray([[token]], jnp.int32), jnp.asarray([1], jnp.int32)),
            phase="decode",
        )
        rows.append(np.asarray(logits(llm.config, llm.params, hidden), np.float64)[0, 0])
    scores = np.stack(rows)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def test_endings_are_as_likely_as_decode_holds_them(monkeypatch):
    monkeypatch.setattr(likelihood, "CHUNK", 32)  # so that a text of some tokens has several
    llm = tiny_llm("int2,page=8")
    texts = [_tokens(count) for count in (40, 39, 7)]
    predicted = [_decoded(llm, text) for text in texts]
    favourite = int(predicted[0][-1].argmax())
    endings = [
        Ending(texts[2], [*texts[2][5:], 9]),
        Ending(texts[0], [3]),
        Ending(texts[1], [*texts[1][1:], 4]),  # all but its first token, over two chunks
        Ending(texts[0], [favourite]),
    ]
    answers = list(likelihoods(llm, endings))
    assert sorted(place for place, _ in answers) == [0, 1, 2, 3]
    found = [dict(answers)[place] for place in range(4)]
    for (inputs, targets), each in zip(endings, found, strict=True):
        after = predicted[texts.index(inputs)][-len(targets) :]
        assert each.log == pytest.approx(after[range(len(targets)), targets].sum(), abs=1e-3)
        assert each.greedy == (after.argmax(-1) == targets).all()
    assert [each.greedy for each in found] == [False, False, False, True]


def test_a_text_that_windows_hold_is_as_likely_as_without_codes(tiny):
    inputs = _tokens(7)
    ending = Ending(inputs, [*inputs[1:], 9])
    exact = _decoded(tiny, inputs)[range(7), ending.targets].sum()
    coded, windowed = (
        dict(likelihoods(tiny_llm(cache), [ending]))[0].log
        for cache in ("int2,page=8", "int2,page=8,sink=32,recent=8")
    )
    assert windowed == pytest.approx(exact, abs=0.01)
    assert coded != pytest.approx(exact, abs=0.1)


def test_endings_with_the_same_inputs_share_a_row(tiny, monkeypatch):
    shapes = []

    def seen(*arguments, **how):
        shapes.append(arguments[4].shape)
        return forward(*arguments, **how)

    monkeypatch.setattr(likelihood, "forward", seen)
    inputs = _tokens(20)
    found = dict(likelihoods(tiny, [Ending(inputs, [letter]) for letter in range(257)]))
    assert shapes == [(1, 32)]
    assert sum(np.exp(each.log) for each in found.values()) == pytest.approx(1, abs=1e-4)
    assert sum(each.greedy for each in found.values()) == 1


def test_batches_are_of_texts_of_like_length_and_no_larger_than_allowed(tiny, monkeypatch):
    shapes = []

    def counted(*arguments, **how):
        shapes.append(arguments[4].shape)
        return jnp.zeros((*arguments[4].shape, CONFIG.width)), arguments[3]

    monkeypatch.setattr(likelihood, "forward", counted)
    monkeypatch.setattr(likelihood, "_TOKENS", 1024)
    monkeypatch.setattr(likelihood, "_ROWS", {"cpu": 4, "gpu": 4})
    lengths = [700, 300, 301, 302, *range(33, 38), 5]
    list(likelihoods(tiny, [Ending(_tokens(length), [0]) for length in lengths]))
    long, middle, short = [(1, 256)] * 3, [(2, 256)] * 2 + [(1, 256)] * 2, [(4, 64), (1, 64)]
    assert shapes == [*long, *middle, *short, (1, 32)]


def test_a_broken_model_is_refused(tiny):
    params = {**tiny.params, "norm": {"weight": jnp.full(CONFIG.width, jnp.nan)}}
    with pytest.raises(jkvq.UserError, match="NaN"):
        list(likelihoods(dataclasses.replace(tiny, params=params), [Ending((1, 2), [3])]))
