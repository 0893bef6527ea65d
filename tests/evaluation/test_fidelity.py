"""The measures of METHODS.md, section 7, against numpy, one query and head at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.evaluation.fidelity import fidelity
from jkvq.evaluation.subjects import reconstruction, subject
from jkvq.models.decoder import run
from tests import reference
from tests.tiny import CONFIG, model_of, tiny_model

T = 150  # two blocks of queries, the second not full
TOKENS = [(11 * i * i + i) % 256 for i in range(T)]
CACHE = "int2,sink=4,recent=16,page=8"


def _captured(tiny):
    found = []

    def attend(q, k, v, state, sinks=None):
        q, k, v = (np.asarray(x.finished[0], np.float64) for x in (q, k, v))
        found.append((q, k, v))
        seen = np.tril(np.ones((T, T), bool))
        out, _ = reference.attention(q, k, v, seen, CONFIG.head_dim**-0.5)
        return jnp.asarray(out, jnp.float32)[None], state

    with jax.disable_jit():
        position = jnp.arange(T)[None]
        run(CONFIG, tiny.params, jnp.asarray([TOKENS]), position, lambda _: attend, None)
    return found


def _held(x):
    """As a window holds it."""
    return x.astype(np.float16).astype(np.float64)


def _coded(x):
    """int2 of a token that was held in 16 bits."""
    x, out = _held(x), np.zeros(x.shape)
    for t, head in np.ndindex(x.shape[:2]):
        codes, scales, los, _ = reference.affine_min_max(x[t, head], 2, x.shape[-1])
        out[t, head] = los + scales * codes
    return out


def _expected(q, k, v, out_weight):
    coded_k, coded_v, held_k, held_v = _coded(k), _coded(v), _held(k), _held(v)
    score, kl, top, mixed, error = [], [], [], [], []
    scale, groups = CONFIG.head_dim**-0.5, CONFIG.heads // CONFIG.kv_heads
    for t in range(T):
        packed = max(0, (t + 1 - 24) // 8 * 8)  # of the tokens after the sink, a page of 8
        coded = np.array([8 <= s < 8 + packed for s in range(t + 1)])[:, None, None]
        keys = np.where(coded, coded_k[: t + 1], held_k[: t + 1])
        values = np.where(coded, coded_v[: t + 1], held_v[: t + 1])
        row, row_error = [], []
        for n in range(CONFIG.heads):
            head = n // groups
            true, read = k[: t + 1, head] @ q[t, n], keys[:, head] @ q[t, n]
            score += list(np.abs(true - read))
            p, r = (np.exp(scale * x - (scale * x).max()) for x in (true, read))
            p, r = p / p.sum(), r / r.sum()
            kl.append((p * np.log(p / r)).sum())
            if t >= 9:
                top.append(len({*np.argsort(-p)[:10]} & {*np.argsort(-r)[:10]}) / 10)
            row.append(p @ v[: t + 1, head])
            row_error.append(r @ values[:, head] - row[-1])
        mixed.append(np.concatenate(row))
        error.append(np.concatenate(row_error))
    mixed, error = np.array(mixed), np.array(error)
    return {
        "key": ((coded_k - k) ** 2).sum() / (k**2).sum(),
        "value": ((coded_v - v) ** 2).sum() / (v**2).sum(),
        "score": np.mean(score),
        "attention_kl": np.mean(kl),
        "top10": np.mean(top),
        "mixed": (error**2).sum() / (mixed**2).sum(),
        "output": ((error @ out_weight.T) ** 2).sum() / ((mixed @ out_weight.T) ** 2).sum(),
        "rope_score": _rope_score(q, k, coded_k),
    }


def _rope_score(q, k, coded_k):
    """Un-rotates q and k of each token, turns k by each offset, and compares the dot products."""
    half = CONFIG.head_dim // 2
    frequency = CONFIG.rope_theta ** (-np.arange(half) / half)

    def turn(x, by):
        pair = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * frequency * by)
        return np.concatenate([pair.real, pair.imag], -1)

    errors = []
    for t in range(T):
        plain_q, plain_k, plain_coded = (turn(x[t], -t) for x in (q, k, coded_k))
        for offset in np.linspace(-1024, 1024, 50):
            true, read = (np.repeat(turn(x, offset), 2, axis=0) for x in (plain_k, plain_coded))
            errors.append(np.abs(((true - read) * plain_q).sum(-1)))
    return np.mean(errors)


def test_every_measure_equals_numpy_in_every_layer(tiny):
    found = fidelity(model_of(tiny), TOKENS, {CACHE: reconstruction(model_of(tiny), CACHE)})[CACHE]
    captured = _captured(tiny)
    assert len(found) == len(captured) == CONFIG.layers
    for layer, (q, k, v) in enumerate(captured):
        weight = np.asarray(tiny.params["layers"][layer]["attention"]["o"]["weight"], np.float64)
        for name, expected in _expected(q, k, v, weight).items():
            # Last bits differ, and with them codes on a tie.
            assert getattr(found[layer], name) == pytest.approx(expected, rel=5e-3), name


def test_hidden_states_are_those_of_the_model_over_the_cache(tiny):
    """The norm after the last layer is undone by a channel that is 1 in every hidden state."""
    params = jax.tree.map(lambda x: x, tiny.params)
    params["embedding"] = params["embedding"].at[:, 0].set(1.0)
    params["norm"] = {"weight": jnp.ones(CONFIG.width)}
    for layer in params["layers"].values():
        for weights in (layer["attention"]["o"], layer["mlp"]["down"]):
            weights["weight"] = weights["weight"].at[0].set(0.0)
    llm = dataclasses.replace(model_of(tiny), params=params)
    states = []
    for cache in ("f32", CACHE):
        model = subject(llm, cache)
        state, hidden = model.start(T), []
        for token in TOKENS:  # one at a time: a chunk would see itself without rounding
            out, state = model.step(state, np.array([[token]], np.int32), 1, 0)
            hidden.append(np.asarray(out, np.float64)[0, 0])
        states.append(np.array(hidden) / np.array(hidden)[:, :1])
    true, read = states
    expected = (((read - true) ** 2).sum(-1) / (true**2).sum(-1)).mean()
    found = fidelity(llm, TOKENS, {CACHE: reconstruction(llm, CACHE)})[CACHE]
    assert found[-1].hidden == pytest.approx(expected, rel=1e-2)
    assert found[-1].hidden > found[0].hidden > 1e-3


def test_exact_caches_have_no_errors(tiny):
    found = fidelity(model_of(tiny), TOKENS, {"f32": reconstruction(model_of(tiny), "f32")})["f32"]
    for layer in found:
        errors = dataclasses.asdict(layer)
        assert errors.pop("top10") == 1
        assert max(errors.values()) < 1e-5


def test_a_model_with_sinks_has_no_errors_in_an_exact_cache():
    """Its exact attention merges them, and attention over what a cache gives back sums them."""
    model = tiny_model(config=dataclasses.replace(CONFIG, sinks=True))
    (first, *_) = fidelity(model, TOKENS[:20], {"f32": reconstruction(model, "f32")})["f32"]
    assert first.hidden < 1e-10 and abs(first.attention_kl) < 1e-6


@pytest.mark.parametrize("count", [10, 1025])
def test_too_few_or_too_many_tokens_are_refused(tiny, count):
    with pytest.raises(jkvq.UserError, match=f"{count} tokens: from 11 to .* 1024"):
        fidelity(model_of(tiny), [65] * count, {})
