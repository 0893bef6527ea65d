import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.cache.layout import empty_cache
from jkvq.cache.shape import CacheShape
from jkvq.engine.forward import forward
from jkvq.evaluation.corpus import first_tokens, read_text
from jkvq.evaluation.perplexity import compare, compare_lengths, perplexity, windows
from jkvq.evaluation.subjects import Cached, subject
from jkvq.models.decoder import logits
from tests.tiny import CONFIG, model_of


def test_perplexity_equals_one_pass_over_all_tokens(tiny):
    tokens = [(11 * i * i + i) % 256 for i in range(600)]  # more than one chunk
    table = jnp.arange(1, 76, dtype=jnp.int32)[None]
    cache = empty_cache(tiny.spec, CacheShape.of(CONFIG), 76, table)
    hidden, _ = forward(
        CONFIG,
        tiny.params,
        tiny.basis,
        cache,
        jnp.asarray([tokens]),
        jnp.array([600]),
        phase="prefill",
    )
    scores = np.asarray(logits(CONFIG, tiny.params, hidden), np.float64)[0, :-1]
    chosen = scores[np.arange(599), tokens[1:]]
    losses = np.log(np.exp(scores).sum(-1)) - chosen
    result = perplexity(tiny, tokens)
    assert result.scored == 599
    assert result.nll == pytest.approx(losses.mean(), abs=1e-5)
    assert result.ppl == pytest.approx(np.exp(losses.mean()), rel=1e-5)


def _log_probabilities(llm, tokens):
    """Of the token after each, from one pass over all of them."""
    table = jnp.arange(1, 41, dtype=jnp.int32)[None]
    cache = empty_cache(llm.spec, CacheShape.of(CONFIG), 41, table)
    padded = jnp.asarray([[*tokens, *[0] * (320 - len(tokens))]])
    count = jnp.array([len(tokens)])
    hidden, _ = forward(llm.config, llm.params, llm.basis, cache, padded, count, phase="forced")
    scores = np.asarray(logits(llm.config, llm.params, hidden), np.float64)[0, : len(tokens)]
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def test_compare_measures_kl_from_the_reference(tiny):
    tokens = [(11 * i * i + i) % 256 for i in range(300)]
    llms = {"f32": tiny, "int2": jkvq.with_cache(model_of(tiny), "int2,page=8")}
    expected, predicted = (_log_probabilities(llm, tokens)[:-1] for llm in llms.values())
    kl = (np.exp(expected) * (expected - predicted)).sum(-1).mean()
    found = compare({name: Cached(llm) for name, llm in llms.items()}, tokens, reference="f32")
    assert list(found) == ["f32", "int2"]
    assert found["f32"].kl == 0
    assert found["int2"].kl == pytest.approx(kl, rel=1e-4)
    assert kl > 0.01
    assert found["int2"].nll == pytest.approx(-predicted[range(299), tokens[1:]].mean(), rel=1e-5)
    assert (found["f32"].bits_per_element, perplexity(tiny, tokens).kl) == (32.0 * 304 / 300, None)


@pytest.mark.parametrize(
    ("context", "stride", "leading"),
    [
        *((100, 100, 0), (100, 30, 0), (64, 1, 0), (300, 7, 0), (1, 1, 0)),
        *((100, 99, 1), (100, 30, 1), (2, 1, 1), (300, 7, 1), (10, 4, 2)),
    ],
)
def test_windows_begin_with_the_leading_tokens_and_score_every_other_once(context, stride, leading):
    tokens = list(range(150))
    scored = []
    for inputs, targets, first in windows(tokens, context, stride, leading=leading):
        assert leading < len(inputs) <= context
        assert inputs[:leading] == tokens[:leading]
        text = inputs[leading:]
        assert text == list(range(text[0], text[-1] + 1))
        for index, target in enumerate(targets):
            # Of what the window has before the target, the last is the text's token before it.
            assert inputs[index] == target - 1 or (index == leading - 1 and target == text[0])
        assert first >= max(0, leading - 1)
        scored += targets[first:]
    assert scored == list(range(max(leading, 1), 150))


def test_every_window_of_a_model_with_bos_is_read_behind_it(tiny):
    tokens = [0, *((11 * i * i + i) % 255 + 1 for i in range(119))]
    losses = []
    for start, stop, fresh in ((1, 60, 1), (31, 90, 61), (61, 120, 91)):
        predicted = _log_probabilities(tiny, [0, *tokens[start:stop]])
        for index in range(fresh, min(stop, 119) + 1):
            losses.append(-predicted[index - start, tokens[index]])
    found = compare({"": Cached(tiny)}, tokens, context=60, stride=30, leading=1)[""]
    assert found.scored == len(losses) == 119
    assert found.nll == pytest.approx(np.mean(losses), rel=1e-5)


def test_windows_see_only_their_own_tokens(tiny):
    tokens = [(11 * i * i + i) % 256 for i in range(150)]
    losses = []
    for start, stop, fresh in ((0, 100, 1), (40, 140, 101), (80, 150, 141)):
        predicted = _log_probabilities(tiny, tokens[start:stop])
        for index in range(fresh, min(stop, 149) + 1):
            losses.append(-predicted[index - 1 - start, tokens[index]])
    found = compare({"": Cached(tiny)}, tokens, context=100, stride=40)[""]
    assert found.scored == len(losses) == 149
    assert found.nll == pytest.approx(np.mean(losses), rel=1e-5)
    assert found.nll != pytest.approx(perplexity(tiny, tokens).nll, rel=1e-5)


def test_lengths_are_scored_as_texts_of_their_own(tiny):
    tokens = [0, *((11 * i * i + i) % 255 + 1 for i in range(299))]
    subjects = {"f32": Cached(tiny), "int2": subject(model_of(tiny), "int2,page=8")}
    windows_of_100: dict[str, Any] = {"leading": 1, "context": 100, "stride": 40}
    for how in ({}, windows_of_100):
        found = compare_lengths(subjects, tokens, [90, 130, 300], reference="f32", **how)
        assert list(found) == [90, 130, 300]
        for length, scores in found.items():
            own = compare(subjects, tokens[:length], reference="f32", **how)["int2"]
            score = scores["int2"]
            assert (score.scored, score.bits_per_element) == (own.scored, own.bits_per_element)
            assert score.nll == pytest.approx(own.nll, rel=1e-5)
            assert score.kl == pytest.approx(own.kl, rel=1e-4)


def test_where_a_text_stands_matters_to_coded_keys_alone(tiny):
    tokens = [(11 * i * i + i) % 256 for i in range(200)]
    names = ("f32", "int2", "kivi-int2")
    subjects = {name: subject(model_of(tiny), name) for name in names}
    near, far = (
        compare(subjects, tokens, reference="f32", position=position)
        for position in (0, CONFIG.context - 200)
    )
    assert far["f32"].nll == pytest.approx(near["f32"].nll, abs=1e-5)
    for name in names[1:]:
        assert min(near[name].kl or 0, far[name].kl or 0) > 0.01
        assert abs(far[name].nll - near[name].nll) > 1e-4
    with pytest.raises(jkvq.UserError, match="position=825: from 0 to 824, as 200 tokens"):
        compare(subjects, tokens, position=825)


@pytest.mark.parametrize(
    ("context", "stride", "sentence"),
    [
        (0, None, "context=0: this model takes 1 to 1024"),
        (1025, None, "context=1025: this model"),
        (64, 65, "stride=65: from 1 to the context of 64"),
        (64, 0, "stride=0"),
    ],
)
def test_windows_that_cannot_be_are_refused(tiny, context, stride, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        compare({"": Cached(tiny)}, [65] * 100, context=context, stride=stride)


@pytest.mark.parametrize("count", [1, 1025])
def test_perplexity_of_too_few_or_too_many_tokens_is_refused(tiny, count):
    with pytest.raises(jkvq.UserError, match=f"{count} tokens: from 2 to .* 1024"):
        perplexity(tiny, [65] * count)


def test_perplexity_of_a_broken_model_is_refused(tiny):
    params = {**tiny.params, "norm": {"weight": jnp.full(CONFIG.width, jnp.nan)}}
    with pytest.raises(jkvq.UserError, match="NaN"):
        perplexity(dataclasses.replace(tiny, params=params), [65, 66])


def test_smollm2_perplexity_on_wikitext(smollm2, wikitext):
    llm = jkvq.with_cache(model_of(smollm2), "bf16")
    result = perplexity(llm, first_tokens(llm.tokenizer, read_text(wikitext), 1024))
    assert result.ppl == pytest.approx(13.82, abs=0.07)  # an independent forward pass in float32


# An independent implementation, float32, every token reading the cache as decode would.
WIKITEXT_2048 = {
    "quarot-int2,page=8": (24.1, 0.04),  # with pages of 64, up to 56 tokens more stay exact
    "tq-k3v3": (21.8, 0.06),
}


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "within"), WIKITEXT_2048.items())
def test_smollm2_perplexity_through_packed_caches(smollm2, wikitext, cache, within):
    llm = jkvq.with_cache(model_of(smollm2), cache)
    result = perplexity(llm, first_tokens(llm.tokenizer, read_text(wikitext), 2048))
    expected, relative = within
    assert result.ppl == pytest.approx(expected, rel=relative)


def test_a_text_within_the_windows_is_read_in_16_bits(tiny):
    tokens = list(range(40))
    windowed = jkvq.with_cache(model_of(tiny), "int2,sink=64,recent=64,page=8")
    found, exact = (perplexity(llm, tokens).nll for llm in (windowed, tiny))
    assert found == pytest.approx(exact, rel=1e-2)  # bfloat16
