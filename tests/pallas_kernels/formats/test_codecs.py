"""Every codec against the methods written out in numpy (tests/reference.py)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.cache.basis import SideBasis, make_basis
from jkvq.cache.specs.presets import PRESETS
from jkvq.cache.specs.spec import SideSpec
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.pallas_kernels.formats.affine import GAUSSIAN_STEP
from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.digits import GAUSSIAN_ERROR
from jkvq.pallas_kernels.formats.lloyd import group_levels
from jkvq.pallas_kernels.formats.words import from_words
from tests import reference
from tests.made_up import SHAPE, random_calibration

L, K, H, *_ = SHAPE
LAYER = 1


@functools.lru_cache
def levels_of(bits: int, size: int) -> np.ndarray:
    """Above 3 bits they are polynomials, tested below."""
    return reference.lloyd_levels(bits, size) if bits < 4 else group_levels(bits, size)


def side_of(text: str) -> SideBasis:
    spec = parse_spec(text)
    made_up = random_calibration(centroids=spec.key.centroids, bits=spec.key.bits)
    return make_basis(spec, SHAPE, made_up).key


# The presets that code keys differently; rotations and means are not the codec's.
CODED = {
    dataclasses.replace(key, rotation="balanced" if key.digits else "random", center=False): name
    for name, key in ((name, preset.spec.key) for name, preset in PRESETS.items())
    if key.codec != "float" and key.centroids < 2048
}
NAMES = list(CODED.values())
NAMES += [
    "jkvq-int2,key.digits=none",
    "jkvq-int3,key.digits=1+2+0+1",
    "jkvq-int2,key.digits=3+1+0+0",
]
NAMES += ["int4,group=32", "int3,group=64", "int2,step=fitted,group=32", "oscar-int2,group=64"]
NAMES += ["tq-k3v3,step=fitted", "blockgtq-k2v2,step=fitted"]


def tokens(name: str) -> np.ndarray:
    x = np.random.default_rng(5).standard_normal((2, 30, K, H)) * 2 + 0.5
    x[0, 0] = 1.5  # equal values
    x[0, 1] = 0.0
    return x.astype(np.float32)


def expected(spec: SideSpec, x: np.ndarray, layer_side: SideBasis, head: int):
    """(codes, params, distance to the nearest tie) of one token and head."""
    group = spec.group or H
    if spec.codec == "affine":
        if spec.clip < 1:
            x = reference.clip(x, spec.clip)
        if spec.digits:
            codes, scale, lo, ties = reference.affine_digits(x, spec.bits, spec.digits)
            return codes, np.array([scale, lo]), ties
        encode = reference.affine_fitted if spec.step == "fitted" else reference.affine_min_max
        codes, scale, lo, ties = encode(x, spec.bits, group)
        return codes, np.concatenate([scale, lo]), ties
    widths = [spec.bits] * H
    if layer_side.allocation is not None:
        widths = np.asarray(layer_side.allocation.width)[LAYER, head].tolist()
    codes, units = reference.lloyd(x, widths, levels_of, fitted=spec.step == "fitted")
    ties = np.zeros(H)  # a head of zeros: both middle levels are as near
    if units.all():
        widths = np.asarray(widths)
        levels = {w: levels_of(w, (widths == w).sum()) for w in set(widths.tolist())}
        edges = [(levels[w][1:] + levels[w][:-1]) / 2 for w in widths]
        ratio = x / [np.sqrt(np.mean(x[widths == w] ** 2)) for w in widths]
        ties = np.array([np.abs(e - r).min() for e, r in zip(edges, ratio, strict=True)])
    return codes, units, ties


@pytest.mark.parametrize("name", NAMES)
def test_encode_equals_the_definition(name):
    side = side_of(name)
    codec, x = side.codec(LAYER), tokens(name)
    packed = jax.jit(codec.encode)(jnp.asarray(x))
    decoded = np.asarray(jax.jit(codec.decode)(packed, jnp.ones(x.shape[:2], bool)))
    floats = jnp.bfloat16 if side.spec.codec == "affine" else jnp.float16
    params = np.asarray(from_words(packed.params, floats), np.float64)
    stored = np.asarray(packed.codes)
    residual, base = x.astype(np.float64), np.zeros(x.shape)
    if side.centroids is not None:
        centroids = np.asarray(side.centroids, np.float64)[LAYER]
        distance = ((residual[:, :, None] - centroids[None, None]) ** 2).sum((-1, -2))
        index = distance.argmin(-1)
        np.testing.assert_array_equal(packed.index, index)
        base = centroids[index]
        residual = residual - base
    compared = 0
    for b, t, k in np.ndindex(*x.shape[:3]):
        if side.spec.step == "fitted" and np.ptp(residual[b, t, k]) == 0:
            continue  # nothing to fit; see the test below
        codes, wanted, ties = expected(side.spec, residual[b, t, k], side, k)
        found = params[b, t, k][: len(wanted)]
        # float32 and float64 may round a scale to neighbours.
        np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=1e-6)
        if not np.array_equal(found, wanted):
            continue
        compared += 1
        sure = ties > 1e-3
        if sure.all():
            words = _pack(side, codes, k)
            np.testing.assert_array_equal(stored[b, t, k], words)
        value = _decode(side, codes, wanted, k) + base[b, t, k]
        np.testing.assert_allclose(decoded[b, t, k][sure], value[sure], atol=2e-5)
    assert compared > 0.8 * np.prod(x.shape[:3])


def _pack(side: SideBasis, codes, head: int) -> np.ndarray:
    if side.allocation is None:
        return reference.pack_planes(codes, side.spec.bits)
    return reference.pack_bits(codes, np.asarray(side.allocation.width)[LAYER, head].tolist())


def _decode(side: SideBasis, codes, params, head: int) -> np.ndarray:
    if side.spec.codec == "affine":
        scale, lo = np.split(params, 2)
        if side.spec.digits:
            return reference.decode_digits(codes, scale, lo, side.spec.bits, side.spec.digits)
        group = H // len(scale)
        return np.repeat(lo, group) + np.repeat(scale, group) * codes
    widths = [side.spec.bits] * H
    if side.allocation is not None:
        widths = np.asarray(side.allocation.width)[LAYER, head].tolist()
    unit = dict(zip(dict.fromkeys(widths), params, strict=True))
    return np.array(
        [
            levels_of(w, widths.count(w))[int(code)] * unit[w]
            for w, code in zip(widths, codes, strict=True)
        ]
    )


def round_trip(codec: Codec, x) -> np.ndarray:
    """x encoded and decoded, in one program."""
    run = jax.jit(lambda x: codec.decode(codec.encode(x), jnp.ones(x.shape[:2], bool)))
    return np.asarray(run(np.asarray(x, np.float32)))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


# Others keep a unit, or the difference to a centroid, or leave channels out.
LEVELLED = [
    name
    for name in NAMES
    if not name.startswith(("tq", "blockgtq", "kmeans")) and not parse_spec(name).key.digits
]


@pytest.mark.parametrize("name", LEVELLED)
def test_equal_values_decode_to_themselves(name):
    codec = side_of(name).codec(LAYER)
    x = np.broadcast_to(np.array([1.5, 0.0, -2.0])[None, :, None, None], (1, 3, K, H))
    np.testing.assert_array_equal(round_trip(codec, x), x)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_lloyd_error_is_within_its_bound(bits):
    side = make_basis(parse_spec(f"tq-k4v4,bits={bits}"), SHAPE, None).key
    x = jnp.asarray(normal(1, 500, K, H) * np.geomspace(0.1, 10, H), jnp.float32)
    x = np.asarray(side.rotate_queries(x, 0))
    error = round_trip(side.codec(0), x) - x
    bound = np.sqrt(3) * np.pi / 2 * 4.0**-bits
    assert float((error**2).sum() / (x**2).sum()) < bound


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_of_many_channels_are_those_of_max(bits):
    positive = group_levels(bits, 100_000)[2 ** (bits - 1) :]
    np.testing.assert_allclose(positive, reference.MAX_1960[bits], rtol={4: 0.02}.get(bits, 5e-4))


@pytest.mark.parametrize("size", [2, 4, 64])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_levels_of_few_bits_are_those_of_lloyd(bits, size):
    expected = reference.lloyd_levels(bits, size)
    np.testing.assert_allclose(group_levels(bits, size), expected, atol=2e-5)


# Of a coordinate of vectors of norm sqrt(64), and of norm sqrt(2)
ANGLES = (np.arange(400_000) + 0.5) / 400_000 * np.pi - np.pi / 2
VALUES = {size: np.sqrt(size) * np.sin(ANGLES) for size in (2, 64)}
DENSITY = {size: np.cos(ANGLES) ** (size - 2) for size in (2, 64)}


def _coded(levels, size: int):
    """The code of every value: of the nearest level."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, VALUES[size])


def _squared_error(levels, size: int) -> float:
    off = levels[_coded(levels, size)] - VALUES[size]
    return float((DENSITY[size] * off**2).sum() / DENSITY[size].sum())


@pytest.mark.parametrize("size", [2, 64])
@pytest.mark.parametrize(("bits", "loss"), [(4, 1.0002), (5, 1.003), (6, 1.012), (7, 1.03)])
def test_levels_of_many_bits_are_the_best_polynomials_and_lose_little(bits, size, loss):
    levels, count = group_levels(bits, size), 2**bits
    best = _squared_error(reference.lloyd_levels(bits, size), size)
    assert 0.9999 < _squared_error(levels, size) / best < loss
    u = (2 * np.arange(count) + 1) / count - 1
    powers = np.stack([u, u**3, u**5, u**7], 1)
    fit = np.linalg.lstsq(powers, levels, rcond=None)[0]
    np.testing.assert_allclose(powers @ fit, levels, atol=1e-9)
    # At the best polynomial the errors, code by code, have nothing in common with its terms.
    codes, density = _coded(levels, size), DENSITY[size]
    off = np.bincount(codes, density * (VALUES[size] - levels[codes]), count) / density.sum()
    np.testing.assert_allclose(off @ powers, 0, atol=1e-5)


def test_eight_bits_lose_little():
    """Panter and Dite: the error of 2^bits levels nears sqrt(3) pi / 2 * 4^-bits from below."""
    error = _squared_error(group_levels(8, 64), 64)
    assert 0.9 < error / (np.sqrt(3) * np.pi / 2 * 4.0**-8) < 1.05


@pytest.mark.parametrize("name", ["tq-k2v2,step=fitted", "blockgtq-k2v2,step=fitted"])
def test_units_keep_the_scores_length(name):
    """<x^, x> = <x, x>, which norms alone would not give."""
    codec = side_of(name).codec(LAYER)
    x = normal(1, 50, K, H)
    decoded = round_trip(codec, x)
    ratio = np.asarray((decoded * x).sum(-1) / (x * x).sum(-1))
    np.testing.assert_allclose(ratio, 1.0, atol=1e-3)  # units are rounded to float16


def test_fitted_step_keeps_the_scores_length():
    """<x^, x> = <x, x>: the stretch undoes the shrinkage that min-max and least squares have."""
    codec = side_of("jkvq-int2,key.digits=none").codec(LAYER)
    x = normal(1, 50, K, H)
    decoded = round_trip(codec, x)
    ratio = np.asarray((decoded * x).sum(-1) / (x * x).sum(-1))
    np.testing.assert_allclose(ratio, 1.0, atol=0.01)  # scale and lo are rounded to bfloat16
    error = float(((decoded - x) ** 2).sum() / (x * x).sum())
    min_max = round_trip(side_of("int2").codec(LAYER), x)
    assert error < 0.6 * float(((min_max - x) ** 2).sum() / (x * x).sum())


@pytest.mark.parametrize("bits", GAUSSIAN_STEP)
def test_steps_are_the_best_for_a_gaussian(bits):
    """The constants of fitted steps and of digits, by integration."""
    x = np.linspace(-8, 8, 40_001)
    density = np.exp(-x * x / 2) / np.exp(-x * x / 2).sum()

    def error(step: float) -> float:
        half = (2**bits - 1) / 2
        coded = np.clip(np.floor(x / step + half + 0.5), 0, 2**bits - 1) - half
        return float((density * (x - step * coded) ** 2).sum())

    best = min(GAUSSIAN_STEP[bits] * np.linspace(0.95, 1.05, 101), key=error)
    assert GAUSSIAN_STEP[bits] == pytest.approx(best, rel=3e-3)
    assert GAUSSIAN_ERROR[bits] == pytest.approx(error(best), abs=1e-4)


def test_digits_err_least_where_tokens_are_strongest():
    """Each quarter about as much as a Gaussian of its bits would; the last one is not there."""
    steps = np.array([GAUSSIAN_STEP[4] / GAUSSIAN_STEP[2], 1, 1, 1], np.float32)
    x = (normal(1, 500, K, 4, H // 4) / steps[:, None]).reshape(1, 500, K, H)
    decoded = round_trip(side_of("jkvq-int2").codec(LAYER), x)
    quarters = (np.asarray(y).reshape(-1, 4, H // 4) for y in (decoded - x, x))
    error, whole = ((y**2).sum((0, 2)) for y in quarters)
    stretched = [e / (1 - e) for e in (GAUSSIAN_ERROR[4], GAUSSIAN_ERROR[2], GAUSSIAN_ERROR[2])]
    ratio = (error / whole)[:3] / stretched  # a step for each token does a little better
    assert (ratio > 0.7).all() and (ratio < 1.02).all(), ratio
    assert error[3] == whole[3]


def test_digits_of_zeros_are_zeros():
    codec = side_of("jkvq-int2").codec(LAYER)
    np.testing.assert_array_equal(round_trip(codec, np.zeros((1, 2, K, H))), 0.0)
