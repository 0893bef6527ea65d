import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import jkvq
from jkvq.cache.basis import Angles, make_basis
from jkvq.cache.calibrated import Calibration, SideCalibration
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from tests.made_up import SHAPE, random_calibration
from tests.reference import rope


@pytest.mark.parametrize(
    ("cache", "part"),
    [
        ("oscar-int2", "rotation of the keys"),
        ("hessian-int4", "rotation of the keys"),
        ("kmeans16-int4", "centroids of the keys"),
        ("blockgtq-k3v3", "widths of the keys"),
        ("bdr64-k,center=true", "mean of the keys"),
    ],
)
def test_a_method_that_needs_calibration_says_so(cache, part):
    with pytest.raises(jkvq.UserError, match=f"needs a calibration with the {part}"):
        make_basis(parse_spec(cache), SHAPE, None)


def test_a_calibration_of_another_model_is_refused():
    other = CacheShape(3, 2, 128)
    with pytest.raises(jkvq.UserError, match=r"rotation has shape \(2, 2, 128, 128\)"):
        make_basis(parse_spec("oscar-int2"), other, random_calibration())


def test_centroids_are_brought_into_the_stored_basis():
    made_up = random_calibration()
    basis = make_basis(parse_spec("kmeans16-bdr-int4"), SHAPE, made_up)
    assert made_up.key.centroids is not None
    assert basis.key.centroids is not None
    R = scipy.linalg.hadamard(128) / np.sqrt(128)
    wanted = made_up.key.centroids.astype(np.float64) @ R
    np.testing.assert_allclose(basis.key.centroids, wanted, atol=1e-4)
    np.testing.assert_array_equal(basis.value.centroids, made_up.value.centroids)


@pytest.mark.parametrize("first", [0, 500])
def test_a_mean_of_keys_stands_in_the_middle_of_pages(first):
    made_up, frequency = random_calibration(), np.geomspace(1, 1e-4, 64)
    basis = make_basis(parse_spec("saw-int4,center=true"), SHAPE, made_up, frequency).starting_at(
        first
    )
    middle = np.array([32, 96, 7000])
    x, q = (
        jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
        for shape in ((3, 2, 128), (1, 1, 6, 128))
    )
    assert made_up.key.all_tokens.mean is not None
    mean = np.broadcast_to(made_up.key.all_tokens.mean[1].astype(np.float64), x.shape)
    mean = rope(mean, middle + first, frequency)
    R = scipy.linalg.hadamard(128) / np.sqrt(128)
    where = basis.key.angles(jnp.asarray(middle))
    assert where is not None
    at = 1, Angles(*(x[None] for x in where))
    # Angles are float32 numbers of thousands, cos and sin float16 ones.
    np.testing.assert_allclose(basis.key.enter(x[None], *at)[0], (x - mean) @ R, atol=1e-2)
    np.testing.assert_allclose(basis.key.entered_mean(*at)[0], mean @ R, atol=1e-2)
    scores = basis.key.mean_queries(q, 1) @ where.turns.astype(jnp.float32).T
    wanted = np.einsum("nh,snh->ns", q[0, 0], np.repeat(mean, 3, axis=1))
    np.testing.assert_allclose(scores[0, 0], wanted, atol=2e-2)


def test_digits_mix_quarters_and_give_all_widths_one_step():
    made_up = random_calibration().key.past_windows
    assert made_up.rotation is not None and made_up.spread is not None
    matrices = make_basis(parse_spec("jkvq-int2"), SHAPE, random_calibration()).key.matrices
    assert matrices is not None
    R = np.asarray(matrices.rotation)
    for layer, head in np.ndindex(2, 2):
        # Tokens whose variances along the calibrated directions are those of the calibration
        inverse = np.linalg.inv(made_up.rotation[layer, head].astype(np.float64))
        C = inverse.T @ np.diag(made_up.spread[layer, head]) @ inverse
        turned = R[layer, head].T.astype(np.float64) @ C @ R[layer, head]
        step = np.repeat([0.9957 / 0.3352, 1, 1, 1], 32)  # the best of 2 bits over that of 4
        scale = np.exp2(np.round(np.log2(np.diag(turned)[-1]) / 2))  # a power of two for all
        np.testing.assert_allclose(np.diag(turned), (step * scale) ** 2, rtol=1e-4)
        quarter = np.arange(128) // 32
        apart = quarter[:, None] != quarter[None]
        np.testing.assert_allclose(turned[apart], 0, atol=1e-4)


@pytest.mark.parametrize("size", [1e-7, 1e-4, 1.0, 1e5])
def test_rotations_fit_float16_whatever_the_size_of_keys(size):
    made_up = random_calibration()
    side = made_up.key.past_windows
    assert side.rotation is not None and side.spread is not None
    scaled = dataclasses.replace(side, spread=side.spread * np.float32(size) ** 2)
    key = dataclasses.replace(made_up.key, past_windows=scaled)
    basis = make_basis(parse_spec("jkvq-int2"), SHAPE, dataclasses.replace(made_up, key=key)).key
    assert basis.kernel_matrices is not None
    R, dual = (np.asarray(x, np.float64) for x in basis.kernel_matrices)
    assert np.isfinite(R).all() and np.isfinite(dual).all()
    identity = np.broadcast_to(np.eye(128), R.shape)
    np.testing.assert_allclose(R.swapaxes(-1, -2) @ dual, identity, atol=5e-3)


def test_a_rotation_beyond_float16_is_refused():
    made_up = random_calibration()
    side = made_up.key.past_windows
    assert side.rotation is not None
    stretch = np.geomspace(1e-10, 1e10, 128).astype(np.float32)
    key = dataclasses.replace(
        made_up.key, past_windows=dataclasses.replace(side, rotation=side.rotation * stretch)
    )
    with pytest.raises(jkvq.UserError, match="key rotation stretches directions by up to"):
        make_basis(parse_spec("jkvq-int3"), SHAPE, dataclasses.replace(made_up, key=key))


def test_block_rotation_gathers_groups_and_is_orthogonal():
    basis = make_basis(parse_spec("blockgtq-k3v3"), SHAPE, random_calibration()).key
    assert basis.allocation is not None
    assert basis.matrices is not None
    R = np.asarray(basis.matrices.rotation, np.float64)
    np.testing.assert_allclose(
        R @ R.transpose(0, 1, 3, 2), np.broadcast_to(np.eye(128), R.shape), atol=1e-6
    )
    widths = random_calibration().key.widths
    assert widths is not None
    channels = np.concatenate([widths[2], widths[2]], axis=-1)
    for layer, head in np.ndindex(2, 2):
        given, kept = channels[layer, head], np.asarray(basis.allocation.width)[layer, head]
        assert sorted(given, reverse=True) == kept.tolist()
        # A channel only reaches columns of its own width.
        assert (R[layer, head][given[:, None] != kept[None]] == 0).all()


@pytest.mark.parametrize(
    ("widths", "sentence"),
    [
        ([4] * 64, "average 3 in every head; these are 4 to 4"),
        ([9] + [3] * 62 + [-3], "must be 1 to 8 bits"),
        ([1, 2, 3, 4, 5] * 12 + [3] * 4, "5 different block widths; 4 may be stored"),
    ],
)
def test_block_widths_that_cannot_be_stored_are_refused(widths, sentence):
    given = np.broadcast_to(np.array(widths), (8, 2, 2, 64))
    calibration = Calibration(key=SideCalibration(widths=given))
    with pytest.raises(jkvq.UserError, match=sentence):
        make_basis(parse_spec("blockgtq-k3v3"), SHAPE, calibration)
