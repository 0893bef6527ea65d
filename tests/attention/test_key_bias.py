"""Models with a large key bias, as Qwen2.5: it defeats rotation alone, and centring cures it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.cache.calibrated import Calibration, SideCalibration, Transform
from jkvq.calibration.observe import observe
from jkvq.evaluation.corpus import first_tokens, read_text
from jkvq.evaluation.perplexity import compare, perplexity
from jkvq.evaluation.subjects import Cached
from jkvq.loading.calibrate import Corpus
from jkvq.models.decoder import run
from jkvq.models.formats.catalog import cached_file
from tests.calibration.numpy_model import about, middles, moved, rope
from tests.tiny import BIASED, biased_model

TOKENS = [(11 * i * i + i) % 256 for i in range(256)]


def _run(llm: jkvq.Model, attend) -> None:
    with jax.disable_jit():
        position = jnp.arange(256)[None]
        run(llm.config, llm.params, jnp.asarray([TOKENS]), position, lambda _: attend, None)


def _mean_keys(llm: jkvq.Model) -> Calibration:
    means, middle = [], np.arange(256) // 64 * 64 + 32

    def attend(q, k, v, state, sinks=None):
        q, k, v = (heads.finished for heads in (q, k, v))
        means.append(rope(np.asarray(k[0], np.float64), -middle, BIASED).mean(0))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), state

    _run(llm, attend)
    return Calibration(key=SideCalibration(Transform(np.stack(means).astype(np.float32))))


def test_a_constant_in_the_keys_does_not_drown_the_moments_of_the_rest():
    llm, seen = biased_model(3000.0), []

    def attend(q, k, v, state, sinks=None):
        q, k, v = (heads.finished for heads in (q, k, v))
        seen.append([np.asarray(x[0], np.float64) for x in (q, k)])
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), state

    _run(llm, attend)
    read = observe(llm.config, llm.params, TOKENS, context=BIASED.context)[0].read
    G = BIASED.heads // BIASED.kv_heads
    for layer, head in np.ndindex(1, BIASED.kv_heads):  # float32 makes another second layer
        q, k = seen[layer][0][:, head * G : head * G + G], seen[layer][1][:, head]
        S = np.exp(np.einsum("tgh,sh->gts", q, k - k.mean(0)) / np.sqrt(BIASED.head_dim))
        S = np.where(np.tri(256, dtype=bool), S, 0.0)
        received = (S / S.sum(-1, keepdims=True)).sum((0, 1))
        k = moved(seen[layer][1], 256, 0, BIASED)[:, head]
        _, left = about(k, received, middles(256, 256, 0, BIASED), BIASED)
        wanted = (left * received[:, None]).T @ left / received.sum()
        found = read.k_covariance[layer, head] / read.weight[layer, head]
        np.testing.assert_allclose(found, wanted, atol=2e-3 * np.abs(wanted).max())


def _kl(llm: jkvq.Model) -> dict[str, float]:
    centred = jkvq.with_cache(llm, "saw-int4,key.center=true", _mean_keys(llm))
    caches = {name: jkvq.with_cache(llm, name) for name in ("f32", "int4", "saw-int4")}
    subjects = {name: Cached(each) for name, each in (caches | {"centred": centred}).items()}
    scores = compare(subjects, TOKENS, reference="f32")
    return {name: score.kl or 0.0 for name, score in scores.items()}


def test_a_key_bias_defeats_rotation_and_centring_cures_it():
    plain, biased = _kl(biased_model(0.0)), _kl(biased_model(300.0))
    assert max(plain.values()) < 0.01
    assert min(biased["int4"], biased["saw-int4"]) > 100 * biased["centred"]
    assert biased["centred"] < 1.5 * plain["centred"]  # as if there were no bias


def test_a_mean_follows_the_positions_of_the_keys(tmp_path):
    """The constant turns by a third of a radian over the context."""
    llm = biased_model(100.0, config=dataclasses.replace(BIASED, rope_theta=1e4))
    text = Corpus("letters", "".join(chr(97 + (7 * i * i + i) % 26) for i in range(2048)))
    made = jkvq.calibrate(llm, text=text, tokens=2048, window=128, out=tmp_path / "made")
    for cache in ("jkvq-int4,page=8,sink=8,recent=8", "saw-int4,center=true,page=8"):
        caches = jkvq.with_cache(llm, "f32"), jkvq.with_cache(llm, cache, made.calibration)
        subjects = {"f32": Cached(caches[0]), "coded": Cached(caches[1])}
        near, far = (
            compare(subjects, TOKENS, reference="f32", position=position)["coded"].kl or 0.0
            for position in (0, BIASED.context - len(TOKENS))
        )
        assert 0 < far < 0.003
        assert far < 1.5 * near


@pytest.mark.slow
def test_qwen_collapses_without_centring(wikitext):
    """What int4 and SAW-INT4 do to Qwen2.5-Coder-1.5B, recorded as what it is."""
    if not cached_file("qwen2.5-coder-1.5b").exists():
        pytest.skip("qwen2.5-coder-1.5b is not cached: fetch it with `jkvq inspect --model`")
    model = jkvq.load_model("qwen2.5-coder-1.5b")
    tokens = first_tokens(model.tokenizer, read_text(wikitext), 1024)
    assert perplexity(jkvq.with_cache(model, "bf16"), tokens).ppl == pytest.approx(9.18, rel=0.005)
    for cache in ("int4", "saw-int4"):
        assert perplexity(jkvq.with_cache(model, cache), tokens).ppl > 1000
