import jax
import jax.numpy as jnp
import numpy as np

from jkvq.calibration.centroids import kmeans, nearest


def _blobs():
    rng = np.random.default_rng(0)
    centres = rng.uniform(-100, 100, (12, 6))
    member = rng.integers(0, 12, 500)
    return (centres[member] + rng.standard_normal((500, 6))).astype(np.float32), member


def test_kmeans_finds_clusters_that_stand_apart():
    x, member = _blobs()
    found = np.asarray(kmeans(jnp.asarray(x), 12))
    wanted = np.stack([x[member == i].astype(np.float64).mean(0) for i in range(12)])
    distance = np.linalg.norm(found[:, None] - wanted[None], axis=-1)
    assert sorted(distance.argmin(1)) == list(range(12))
    assert distance.min(1).max() < 1e-3


def test_one_centroid_is_the_mean():
    x, _ = _blobs()
    np.testing.assert_allclose(kmeans(jnp.asarray(x), 1)[0], x.mean(0), atol=1e-3)


def test_more_starts_are_never_worse():
    x = np.random.default_rng(1).standard_normal((300, 4)).astype(np.float32)

    def error(starts):
        centres = np.asarray(kmeans(jnp.asarray(x), 20, starts=starts), np.float64)
        return ((x[:, None] - centres[None]) ** 2).sum(-1).min(1).sum()

    errors = [error(starts) for starts in (1, 8)]
    assert errors[1] <= errors[0]


def test_chunks_change_nothing(monkeypatch):
    x, _ = _blobs()
    whole = np.asarray(kmeans(jnp.asarray(x), 12))
    monkeypatch.setattr("jkvq.calibration.centroids._CHUNK_DISTANCES", 12 * 64)
    jax.clear_caches()
    np.testing.assert_allclose(kmeans(jnp.asarray(x), 12), whole, atol=1e-3)


def test_nearest_is_the_nearest():
    rng = np.random.default_rng(2)
    x, centres = rng.standard_normal((50, 5)), rng.standard_normal((7, 5))
    distance = ((x[:, None] - centres[None]) ** 2).sum(-1)
    index, least = nearest(jnp.asarray(x, jnp.float32), jnp.asarray(centres, jnp.float32))
    np.testing.assert_array_equal(index, distance.argmin(1))
    np.testing.assert_allclose(least, distance.min(1), rtol=1e-4)


def test_equal_tokens_give_no_nan():
    assert np.isfinite(np.asarray(kmeans(jnp.ones((10, 3)), 4))).all()
