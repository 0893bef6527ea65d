import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.attention.pack import pack_due
from jkvq.cache.basis import make_basis
from jkvq.cache.layout import KVCache, empty_cache
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.engine.forward import forward
from jkvq.models.decoder import logits
from jkvq.models.formats.hf_folder import HFFolder
from tests.models.helpers import CASES, save_random_model

torch = pytest.importorskip("torch")

SPEC = parse_spec("f32,page=8")
NAN_WORD = 0x7FC00000


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same random weights in transformers and here."""

    theirs: Any  # transformers' model
    ours: HFFolder
    params: dict


def random_pair(case: str, folder: Path) -> Pair:
    """A small random model of a case."""
    theirs = save_random_model(case, folder)
    ours = HFFolder(folder)
    return Pair(theirs, ours, ours.params(jnp.float32))


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Pair:
    return random_pair(request.param, tmp_path_factory.mktemp(request.param))


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 97, length, dtype=np.int32)


def shuffled_cache(pair: Pair, rows: int, spec=SPEC, pages_each: int = 4) -> KVCache:
    """A cache just wide enough, whose pages lie in no order and hold NaN."""
    count = rows * pages_each
    table = 1 + np.random.default_rng(7).permutation(count).astype(np.int32)
    cache = empty_cache(
        spec,
        CacheShape.of(pair.ours.config),
        1 + count,
        jnp.asarray(table.reshape(rows, pages_each)),
    )
    groups = jax.tree.map(lambda words: jnp.full_like(words, NAN_WORD), cache.groups)
    return dataclasses.replace(cache, groups=groups)


_pack = jax.jit(pack_due, static_argnames="implementation")


def step(config, params, cache, tokens, count, phase):
    basis = make_basis(cache.spec, CacheShape.of(config), None)
    if phase == "decode":
        cache = _pack(cache, basis, count, "reference")
    hidden, cache = forward(config, params, basis, cache, tokens, count, phase=phase)
    assert hidden.dtype == params["embedding"].dtype
    return logits(config, params, hidden), cache


def run(
    pair: Pair,
    prompts: list[np.ndarray],
    counts: list[list[int]],
    width: int,
    phase: str,
    spec=SPEC,
):
    """Our logits of each prompt, fed as ``counts[i]`` tokens per row in step i, padded to width."""
    cache = shuffled_cache(pair, len(prompts), spec)
    padding = np.random.default_rng(8)
    done = np.zeros(len(prompts), int)
    scores: list[list[np.ndarray]] = [[] for _ in prompts]
    for count in counts:
        tokens = padding.integers(0, 97, (len(prompts), width), dtype=np.int32)
        for row, n in enumerate(count):
            tokens[row, :n] = prompts[row][done[row] : done[row] + n]
        out, cache = step(
            pair.ours.config, pair.params, cache, jnp.asarray(tokens), jnp.asarray(count), phase
        )
        for row, n in enumerate(count):
            scores[row].append(np.asarray(out)[row, :n])
        done += count
        np.testing.assert_array_equal(cache.sequences.length, done)
    assert done.tolist() == [len(row) for row in prompts]
    return [np.concatenate(rows) for rows in scores]


def expected(pair: Pair, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return pair.theirs(torch.from_numpy(tokens).long()[None]).logits[0].numpy()


# Every test runs three rows and, but for decode, 32 tokens a step: few shapes to compile.


def assert_equal_transformers(pair: Pair, prompts, counts, **how):
    for ours, tokens in zip(run(pair, prompts, counts, **how), prompts, strict=True):
        theirs = expected(pair, tokens)
        assert theirs.std() > 0.3  # logits of about 1: the bound below means something
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4, strict=True)


def test_logits_equal_transformers_when_prefilled_at_once(pair):
    prompts = [prompt(seed, 29) for seed in range(3)]
    assert_equal_transformers(pair, prompts, [[29] * 3], width=32, phase="prefill")


def test_logits_equal_transformers_when_prefilled_in_uneven_chunks(pair):
    prompts = [prompt(seed, 29) for seed in range(3)]
    counts = [[n] * 3 for n in (1, 13, 5, 9, 1)]
    assert_equal_transformers(pair, prompts, counts, width=32, phase="prefill")


def test_logits_equal_transformers_when_decoded_token_by_token(pair):
    prompts = [prompt(seed, 29) for seed in range(3)]
    assert_equal_transformers(pair, prompts, [[1] * 3] * 29, width=1, phase="decode")


def test_logits_equal_transformers_when_the_batch_is_ragged(pair):
    prompts = [prompt(3, 29), prompt(4, 7), prompt(5, 16)]
    counts = [[13, 7, 0], [16, 0, 16]]
    assert_equal_transformers(pair, prompts, counts, width=32, phase="prefill")


def test_logits_are_near_float32_when_params_are_bfloat16(tmp_path):
    theirs = save_random_model("qwen3", tmp_path)
    ours = HFFolder(tmp_path)
    params = ours.params(jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    pair, tokens = Pair(theirs, ours, params), prompt(6, 29)
    (scores,) = run(pair, [tokens], [[29]], width=29, phase="prefill")
    assert scores.dtype == np.float32
    wanted = expected(pair, tokens)
    # Measured 0.9 %; bfloat16 rounds each of a few dozen operations by up to 0.4 %.
    assert 1e-3 < np.std(scores - wanted) / np.std(wanted) < 0.02
