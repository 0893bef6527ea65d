import dataclasses
import gzip

import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.cache import empty_cache
from jkvq.evaluate import first_tokens, perplexity, read_text
from jkvq.models.decoder import forward, logits
from tests.tiny import CONFIG


def test_perplexity_equals_one_pass_over_all_tokens(tiny):
    tokens = [(11 * i * i + i) % 256 for i in range(600)]  # more than one chunk
    table = jnp.arange(1, 76, dtype=jnp.int32)[None]
    cache = empty_cache(tiny.spec, CONFIG.cache_shape, 76, table)
    hidden, _ = forward(
        CONFIG, tiny.params, tiny.basis, cache, jnp.asarray([tokens]), jnp.array([600]), own="exact"
    )
    scores = np.asarray(logits(CONFIG, tiny.params, hidden), np.float64)[0, :-1]
    chosen = scores[np.arange(599), tokens[1:]]
    losses = np.log(np.exp(scores).sum(-1)) - chosen
    result = perplexity(tiny, tokens)
    assert result.scored == 599
    assert result.nll == pytest.approx(losses.mean(), abs=1e-5)
    assert result.ppl == pytest.approx(np.exp(losses.mean()), rel=1e-5)


@pytest.mark.parametrize("count", [1, 1025])
def test_perplexity_of_too_few_or_too_many_tokens_is_refused(tiny, count):
    with pytest.raises(jkvq.UserError, match=f"{count} tokens: from 2 to .* 1024"):
        perplexity(tiny, [65] * count)


def test_perplexity_of_a_broken_model_is_refused(tiny):
    params = {**tiny.params, "norm": {"weight": jnp.full(CONFIG.width, jnp.nan)}}
    with pytest.raises(jkvq.UserError, match="NaN"):
        perplexity(dataclasses.replace(tiny, params=params), [65, 66])


def test_read_text_unpacks_gz_and_refuses_what_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("é")
    (tmp_path / "a.gz").write_bytes(gzip.compress("é".encode()))
    assert read_text(tmp_path / "a.txt") == read_text(tmp_path / "a.gz") == "é"
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"text" * 100)[:-9])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("cut.gz", "binary"):
        with pytest.raises(jkvq.UserError, match=f"{name} cannot be read as UTF-8 text"):
            read_text(tmp_path / name)
    with pytest.raises(jkvq.UserError, match="there is no file"):
        read_text(tmp_path / "missing")


def test_first_tokens_of_a_short_text_is_refused(tiny):
    with pytest.raises(jkvq.UserError, match="10 tokens were asked for and the text has 5"):
        first_tokens(tiny, "Hello", 10)


def test_smollm2_perplexity_on_wikitext(smollm2, wikitext):
    llm = jkvq.with_cache(smollm2, "bf16")
    result = perplexity(llm, first_tokens(llm, read_text(wikitext), 1024))
    assert result.ppl == pytest.approx(13.82, abs=0.07)  # an independent forward pass in float32


# An independent implementation, float32, every token reading the cache as decode would.
WIKITEXT_2048 = {
    "quarot-int2,page=8": (24.1, 0.04),  # with pages of 64, up to 56 tokens more stay exact
    "tq-k3v3": (21.8, 0.06),
}


@pytest.mark.parametrize(("cache", "within"), WIKITEXT_2048.items())
def test_smollm2_perplexity_through_packed_caches(smollm2, wikitext, cache, within):
    llm = jkvq.with_cache(smollm2, cache)
    result = perplexity(llm, first_tokens(llm, read_text(wikitext), 2048))
    expected, relative = within
    assert result.ppl == pytest.approx(expected, rel=relative)
