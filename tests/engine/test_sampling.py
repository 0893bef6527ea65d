import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.engine.drawing.adjust import Adjust, all_allowed
from jkvq.engine.sampling import SamplerArrays, Sampling, draws_of, sample

LOGITS = np.array([1.2, -0.3, 2.0, 0.5, -1.5, 2.0, 0.1, -4.0])
DRAWS = 20_000
_one = jax.jit(sample, static_argnums=4)


@functools.partial(jax.jit, static_argnums=4)
def _every(logits, seen, steps, sampler, draws, adjust):
    added = adjust.added(sampler)
    return jax.vmap(lambda step: sample(logits, seen, step, sampler, draws, added))(steps)


def _exact(rules: Sampling, seen=()) -> np.ndarray:
    """The distribution that the rules define, written out token by token in float64."""
    logits = LOGITS.copy()
    for token in set(seen):
        penalty = rules.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        logits[token] -= rules.frequency_penalty * seen.count(token) + rules.presence_penalty
    for token, bias in rules.logit_bias.items():
        logits[token] += bias
    logits = logits / rules.temperature
    probability = np.exp(logits) / np.exp(logits).sum()
    if rules.top_k:
        least = sorted(probability)[-rules.top_k]
        probability = np.where(probability >= least, probability, 0)
        probability /= probability.sum()
    if rules.top_p < 1:
        kept, total = set(), 0.0
        for token in np.argsort(-probability, kind="stable"):
            if total >= rules.top_p:
                break
            kept.add(token)
            total += probability[token]
        least = min(probability[list(kept)])
        probability = np.where(probability >= least, probability, 0)
    probability = np.where(probability >= rules.min_p * probability.max(), probability, 0)
    return probability / probability.sum()


def _draw(rules: Sampling, seen=()) -> np.ndarray:
    """How often each token comes in DRAWS draws of one stream; ``seen`` are those of the text."""
    marked = np.zeros((1, len(LOGITS)), bool)
    marked[0, list(seen)] = True
    logits = LOGITS.astype(np.float32)[None]
    steps = np.arange(DRAWS)[:, None]
    adjust = Adjust.start([rules], all_allowed(1, len(LOGITS)), len(LOGITS))
    for token in seen:
        adjust = adjust.counted(jnp.array([token]), jnp.array([True]))
    adjust = adjust.counted(jnp.array([7]), jnp.array([False]))  # draws nothing
    sampler = SamplerArrays.stack([rules])
    tokens = _every(logits, marked, steps, sampler, draws_of([rules]), adjust)
    return np.bincount(tokens[:, 0], minlength=len(LOGITS))


@pytest.mark.parametrize(
    ("rules", "seen"),
    [
        (Sampling(temperature=1.0), ()),
        (Sampling(temperature=0.6), ()),
        (Sampling(temperature=1.7, seed=5), ()),
        (Sampling(temperature=1.0, top_k=3), ()),
        (Sampling(temperature=1.0, top_k=1), ()),  # two are tied for the first place
        (Sampling(temperature=1.0, top_p=0.8), ()),
        (Sampling(temperature=0.8, top_k=5, top_p=0.7), ()),
        (Sampling(temperature=1.0, min_p=0.2), ()),
        (Sampling(temperature=1.3, top_k=6, top_p=0.95, min_p=0.1), ()),
        (Sampling(temperature=1.0, repetition_penalty=1.8), (1, 2, 3)),
        (Sampling(temperature=1.0, frequency_penalty=0.7), (2, 2, 2, 0)),
        (Sampling(temperature=1.0, presence_penalty=-1.2), (4, 4, 4, 0)),
        (Sampling(temperature=1.0, logit_bias={2: -100, 4: 2.5}), ()),
        (Sampling(1.8, 0.7, 0.4, {2: 1.0, 0: -2.0}, temperature=0.8, top_k=6), (2, 2, 4)),
    ],
)
def test_sample_draws_from_the_exact_distribution(rules, seen):
    expected, counts = _exact(rules, seen), _draw(rules, seen)
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    # Pearson's statistic; 99.99% of draws from the right distribution stay below the bound, which
    # is the quantile for up to 7 degrees of freedom.
    statistic = ((counts - DRAWS * expected)[possible] ** 2 / (DRAWS * expected)[possible]).sum()
    assert statistic < 29.9


def test_sample_check_would_see_a_slightly_wrong_temperature():
    expected, counts = _exact(Sampling(temperature=1.0)), _draw(Sampling(temperature=1.06))
    assert ((counts - DRAWS * expected) ** 2 / (DRAWS * expected)).sum() > 29.9


def test_sample_at_temperature_zero_takes_the_likeliest():
    rules = Sampling(temperature=0.0, top_k=3, top_p=0.5)
    assert draws_of([rules]) == "greedy"
    assert np.flatnonzero(_draw(rules)).tolist() == [2]
    assert np.flatnonzero(_draw(Sampling(repetition_penalty=2.0), (2, 5))).tolist() == [0]


@pytest.mark.parametrize(
    ("rows", "needed"),
    [
        ([], "greedy"),
        ([Sampling(top_k=5), Sampling()], "greedy"),
        ([Sampling(), Sampling(temperature=0.5)], "drawn"),
        ([Sampling(temperature=0.5), Sampling(temperature=0.5, top_k=5)], "filtered"),
        ([Sampling(temperature=0.5, top_p=0.9)], "filtered"),
        ([Sampling(temperature=0.5, min_p=0.1)], "filtered"),
    ],
)
def test_a_batch_is_drawn_as_its_most_demanding_row(rows, needed):
    assert draws_of(rows) == needed


def test_sample_of_a_row_does_not_depend_on_the_other_rows():
    rows = [Sampling(temperature=1.0, seed=7), Sampling(), Sampling(temperature=2.0, top_k=2)]
    logits = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    seen = jnp.zeros((3, 50), bool)
    step = jnp.array([4, 0, 9])
    together = _one(logits, seen, step, SamplerArrays.stack(rows), "filtered")
    for row, rules in enumerate(rows):
        own = slice(row, row + 1)
        sampler, needed = SamplerArrays.stack([rules]), draws_of([rules])
        alone = _one(logits[own], seen[own], step[own], sampler, needed)
        assert together[row] == alone[0]


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**31, 2**32 - 1, np.int64(7), np.uint32(2**31)])
def test_seeds_of_32_bits_give_the_streams_of_jax_random_key(seed):
    """Drawn as before seeds had 64 bits: a text can be had again."""
    logits, steps = jax.random.normal(jax.random.key(3), (1000,)), np.arange(20)
    stream = jax.random.key(int(seed))
    wanted = [
        int((logits + jax.random.gumbel(jax.random.fold_in(stream, step), (1000,))).argmax())
        for step in steps
    ]
    assert draws(logits, Sampling(temperature=1.0, seed=seed), steps) == wanted


def test_seeds_of_64_bits_give_streams_of_their_own():
    logits, steps = jnp.zeros(1000), np.arange(20)
    seeds = [5, 2**32 + 5, 2 * 2**32 + 5, 5 * 2**32, 2**63, 2**64 - 1, np.uint64(2**64 - 2)]
    streams = [draws(logits, Sampling(temperature=1.0, seed=seed), steps) for seed in seeds]
    assert len({tuple(stream) for stream in streams}) == len(seeds)


def draws(logits: jax.Array, rules: Sampling, steps: np.ndarray) -> list[int]:
    rows = len(steps)
    arrays = SamplerArrays.stack([rules] * rows)
    batch = jnp.broadcast_to(logits, (rows, len(logits)))
    seen = jnp.zeros(batch.shape, bool)
    return sample(batch, seen, jnp.asarray(steps), arrays, "drawn").tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("presence_penalty", float("nan")),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("seed", True),
        ("seed", "7"),
    ],
)
def test_sampling_out_of_range_is_refused(field, value):
    with pytest.raises(jkvq.UserError, match=f"{field}={value!r}"):
        Sampling(**{field: value})
