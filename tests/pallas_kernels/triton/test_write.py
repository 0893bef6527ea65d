"""The write kernel against the codecs' own encoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkvq.cache.basis import make_basis
from jkvq.cache.layout import abstract_groups
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.presets import PRESETS
from jkvq.cache.specs.spec import CALIBRATED_ROTATIONS
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.pallas_kernels.formats.codecs import AffineCodec, FloatCodec
from jkvq.pallas_kernels.formats.packed import Packed
from jkvq.pallas_kernels.reference.scatter import scatter
from jkvq.pallas_kernels.triton.write import writable, write
from jkvq.pallas_kernels.types import (
    HeadNorm,
    InPages,
    NewHeads,
    Unsummed,
    WriteSettings,
    WriteSide,
)
from tests.made_up import random_calibration

LAYER, PAGE, PAGES = 1, 16, 9


class Tokens:
    """New tokens, some at the same page, and pages full of other data."""

    def __init__(self, cache: str, head_dim: int, shape=(3, 11)):
        # As without windows: tokens are coded where they land.
        self.spec = parse_spec(f"{cache},page={PAGE},sink=0,recent=0")
        layers = CacheShape(2, 2, head_dim)
        frequency = np.geomspace(1, 1e-4, head_dim // 2)
        self.basis = make_basis(self.spec, layers, random_calibration(layers), frequency)
        rng = np.random.default_rng(0)
        self.middle = rng.integers(0, 1000, shape)
        self.k, self.v = (
            jnp.asarray(rng.normal(size=(*shape, 2, head_dim)).astype(jnp.bfloat16))
            for _ in range(2)
        )
        place = rng.choice(np.arange(PAGE, PAGE * PAGES), np.prod(shape), replace=False)
        self.page, self.slot = (
            jnp.asarray(x.reshape(shape)) for x in (place // PAGE, place % PAGE)
        )
        group = abstract_groups(self.spec, layers, PAGES, 1)[0]
        self.pages = [
            jax.tree.map(lambda leaf: np.full(leaf.shape, 7, leaf.dtype), side)
            for side in (group.key, group.value)
        ]

    def sides(self) -> tuple[WriteSide, WriteSide]:
        def side(pages, x, basis) -> WriteSide:
            codec = basis.codec(LAYER)
            angles = basis.angles(jnp.asarray(self.middle))
            wide = None if angles is None else angles.wide
            return WriteSide(pages, NewHeads.of(x), codec, basis.transform(LAYER, wide))

        key, value = self.pages
        return side(key, self.k, self.basis.key), side(value, self.v, self.basis.value)

    def entered(self) -> list:
        """Tokens in the basis of the cache."""
        return jax.jit(self._enter)(self.k, self.v, self.basis)

    def _enter(self, k, v, basis) -> list:
        sides = basis.key, basis.value
        return [
            side.enter(x, LAYER, side.angles(jnp.asarray(self.middle)))
            for x, side in zip((k, v), sides, strict=True)
        ]

    def expected(self) -> list:
        """The pages as the codecs' own encoding leaves them.

        Tokens are arguments: of constants XLA works out the least of some heads wrongly.
        """

        @jax.jit
        def run(pages, k, v, basis):
            codecs = (side.codec(LAYER) for side in (basis.key, basis.value))
            return [
                scatter(side, codec.encode(x), LAYER, self.page, self.slot)
                for side, codec, x in zip(pages, codecs, self._enter(k, v, basis), strict=True)
            ]

        return run(self.pages, self.k, self.v, self.basis)

    def decoded(self, *pages) -> list[list[np.ndarray]]:
        """What the codecs read of the tokens, in each of these pages of both sides."""

        @jax.jit
        def run(pages):
            codecs = [basis.codec(LAYER) for basis in (self.basis.key, self.basis.value)]
            real = jnp.ones(self.page.shape, bool)
            return [
                [
                    codec.decode(_row(side, self.page, self.slot), real)
                    for codec, side in zip(codecs, both, strict=True)
                ]
                for both in pages
            ]

        return jax.tree.map(np.asarray, run(pages))

    def assert_stored(self, found, expected):
        """No token 5% farther off than the codec has it, 2% of values elsewhere, no other slot."""
        found, expected = jax.tree.map(np.asarray, (list(found), expected))
        entered = [np.asarray(x) for x in self.entered()]
        for x, a, b, *decoded in zip(
            entered, found, expected, *self.decoded(found, expected), strict=True
        ):
            for new, wanted in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                changed = (new != 7).sum() - (wanted != 7).sum()
                assert abs(changed) <= 4  # no other slot is touched; a word may happen to be 7
                np.testing.assert_array_equal(new[0], wanted[0])  # the layer below
            # lo may round to the next bfloat16 number: 2^-7 of the largest value at most.
            close = 2**-6 * np.abs(decoded[1]).max(-1, keepdims=True)
            # A code that turns at a tie may move a fitted step, and with it its whole token.
            far = (np.abs(decoded[0] - decoded[1]) > close).mean()
            error, wanted_error = (np.linalg.norm(y - x, axis=-1) for y in decoded)
            worse = (error / (wanted_error + 1e-3 * np.linalg.norm(x, axis=-1))).max()
            assert worse <= 1.05 and far < 0.02, (worse, far)


def _row(pages: Packed, page, slot) -> Packed:
    params = None if pages.params is None else pages.params[LAYER, page, :, :, slot]
    return Packed(pages.codes[LAYER, page, :, slot], params)


def check(cache: str, head_dim: int, interpret: bool, shape=(3, 11)):
    tokens = Tokens(cache, head_dim, shape)
    run = jax.jit(
        lambda key, value, k, v: write(
            dataclasses.replace(tokens.sides()[0], pages=key, tokens=NewHeads.of(k)),
            dataclasses.replace(tokens.sides()[1], pages=value, tokens=NewHeads.of(v)),
            LAYER,
            tokens.page,
            tokens.slot,
            settings=WriteSettings(16, 2),
            interpret=interpret,
        )[:2]
    )
    tokens.assert_stored(run(*tokens.pages, tokens.k, tokens.v), tokens.expected())


CACHES = [("oscar-int2", 64), ("jkvq-int2", 64), ("int3", 128), ("int4,center=true", 64)]
CACHES += [("bf16", 64), ("int2,group=32,step=fitted", 64)]


@pytest.mark.parametrize(("cache", "head_dim"), CACHES)
def test_write_step_by_step(cache, head_dim):
    check(cache, head_dim, interpret=True)


@pytest.mark.parametrize("cache", ["saw-int4,center=true", "jkvq-int2"])
def test_queries_are_rotated_in_the_same_launch(cache):
    tokens = Tokens(cache, 64)
    q = jax.random.normal(jax.random.key(1), (3, 11, 6, 64), jnp.bfloat16)
    key, value, queries = write(
        *tokens.sides(),
        LAYER,
        tokens.page,
        tokens.slot,
        queries=NewHeads.of(q),
        settings=WriteSettings(16, 2),
        interpret=True,
    )
    assert queries is not None and queries.means is not None
    np.testing.assert_allclose(
        queries.rotated, tokens.basis.key.rotate_queries(q, LAYER), rtol=2e-3, atol=2e-3
    )
    angle = 0.7 * np.arange(1, 33)
    assert tokens.basis.key.mean is not None
    mean = np.repeat(np.asarray(tokens.basis.key.mean[LAYER], np.float64), 3, axis=0)
    mean = turned(mean, angle)
    turns = np.concatenate([np.cos(angle), np.sin(angle)])
    expected = (np.asarray(q, np.float64) * mean).sum(-1)
    np.testing.assert_allclose(np.asarray(queries.means) @ turns, expected, rtol=1e-4, atol=1e-4)
    tokens.assert_stored((key, value), tokens.expected())


def turned(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Heads turned by the angles of their pairs, in float64."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("of_one", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("parts", "biased"), [(1, False), (1, True), (2, True)])
def test_heads_are_summed_normed_and_turned_in_the_same_launch(
    parts, biased, normed, of_one, interpret
):
    tokens, rng, dtype = Tokens("bf16", 64), np.random.default_rng(2), jnp.bfloat16
    joined = rng.normal(size=(parts, 3, 11, 10, 64)) * 3  # 6 of queries, 2, 2
    joined = jnp.asarray(joined, dtype if parts == 1 else jnp.float32)
    bias = jnp.asarray(rng.normal(size=(10, 64)) * 3, dtype) if biased else None
    whole = np.asarray(joined, np.float64).sum(0)
    whole = jnp.asarray(whole if bias is None else whole + np.asarray(bias, np.float64), dtype)
    joined = Unsummed(joined, bias, jnp.dtype(dtype))
    weights = jnp.asarray(rng.uniform(0.5, 2, (2, 64)), dtype)
    angle = rng.uniform(-3, 3, (3, 11, 32))
    rotary = jnp.cos(angle).astype(jnp.float32), jnp.sin(angle).astype(jnp.float32)
    norms = [HeadNorm(weight, 1e-6, of_one) if normed else None for weight in weights]
    q = NewHeads(joined, 0, 6, norms[0], rotary)
    k = NewHeads(joined, 6, 2, norms[1], rotary)

    def expected(heads: NewHeads) -> np.ndarray:
        x = np.asarray(whole, np.float64)[:, :, heads.first : heads.first + heads.count]
        if heads.norm is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
            x = x * (np.asarray(heads.norm.weight, np.float64) + of_one)
        return turned(x, angle[:, :, None])

    sides = tokens.sides()
    key, value, queries = write(
        dataclasses.replace(sides[0], tokens=k),
        dataclasses.replace(sides[1], tokens=NewHeads(joined, 8, 2)),
        *(LAYER, tokens.page, tokens.slot),
        queries=q,
        settings=WriteSettings(16, 2),
        interpret=interpret,
    )
    assert queries is not None and queries.means is None and queries.rotated.dtype == dtype
    stored = [
        np.asarray(jax.lax.bitcast_convert_type(x.codes[LAYER, tokens.page, :, tokens.slot], dtype))
        for x in (key, value)
    ]
    np.testing.assert_array_equal(stored[1], np.asarray(whole[:, :, 8:]))
    for heads, numbers in ((q, queries.rotated), (k, stored[0])):
        wanted, found = expected(heads), np.asarray(numbers, np.float64)
        bound = 0.02 * np.abs(wanted).max(-1, keepdims=True)  # three roundings to bfloat16
        assert (np.abs(found - wanted) < bound).all()
        plain = np.asarray(heads.finished, np.float64)
        assert (np.abs(found - plain) <= 2**-7 * np.abs(plain) + 1e-6).all()  # its last place


@pytest.mark.parametrize("held", [FloatCodec(jnp.float16), AffineCodec(8, None, "min-max")])
@pytest.mark.parametrize("cache", ["int4", "jkvq-int2"])
def test_tokens_move_from_pages(cache, held):
    tokens = Tokens(cache, 64)
    rng = np.random.default_rng(1)
    place = rng.choice(np.arange(5 * PAGE), 33, replace=False).reshape(3, 11)
    at = jnp.asarray(place // PAGE), jnp.asarray(place % PAGE)
    sides, expected = [], []
    for side, x in zip(tokens.sides(), tokens.entered(), strict=True):
        new = held.encode(x)
        words, numbers = new.codes.shape[-1], new.params is not None
        pages = Packed(
            jnp.full((2, 5, 2, PAGE, words), 0xFFFF, jnp.uint16),
            jnp.full((2, 5, 2, 2, PAGE), 0xFFFF, jnp.uint16) if numbers else None,
        )
        pages = scatter(pages, new, LAYER, *at)
        sides.append(WriteSide(side.pages, InPages(pages, held, *at), side.codec))
        coded = jax.jit(side.codec.encode)(held.decode(new, jnp.ones(x.shape[:2], bool)))
        to = jax.tree.map(jnp.asarray, side.pages)
        expected.append(scatter(to, coded, LAYER, tokens.page, tokens.slot))
    how = LAYER, tokens.page, tokens.slot
    found = write(sides[0], sides[1], *how, settings=WriteSettings(16, 2), interpret=True)[:2]
    tokens.assert_stored(found, expected)


def test_blocks_without_a_real_token_are_left_out():
    tokens = Tokens("int4", 64, (1, 48))
    real = jnp.arange(48)[None] // 16 == 1  # the second of three blocks
    how = LAYER, tokens.page, tokens.slot
    key, _, _ = write(
        *tokens.sides(), *how, real=real, settings=WriteSettings(16, 2), interpret=True
    )
    touched = np.asarray(key.codes[LAYER, tokens.page, :, tokens.slot] != 7).any((-1, -2))
    np.testing.assert_array_equal(touched, real)


def test_a_codec_the_kernel_cannot_write_is_refused():
    tokens = Tokens("tq-k3v3", 64)
    with pytest.raises(ValueError, match="write takes affine and 16-bit float codecs, not Lloyd"):
        write(*tokens.sides(), LAYER, tokens.page, tokens.slot, settings=WriteSettings(16, 2))


def _kernel_of(preset) -> tuple:
    """What the kernel is compiled for; presets that differ otherwise are the same to it."""
    sides = preset.spec.key, preset.spec.value
    fixed = [
        side.rotation if side.rotation in ("none", *CALIBRATED_ROTATIONS) else "" for side in sides
    ]
    return tuple(
        (side.bits, side.codec, side.clip, side.step, side.center, side.digits, rotation)
        for side, rotation in zip(sides, fixed, strict=True)
    )


WRITABLE = {
    _kernel_of(preset): name
    for name, preset in PRESETS.items()
    if name != "f32" and preset.spec.key.codec != "lloyd" and not preset.spec.key.centroids
}


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("cache", WRITABLE.values())
def test_write_of_every_preset(cache, head_dim):
    if cache.startswith("bdr128"):
        cache = cache.replace("bdr128", f"bdr{head_dim}")
    assert all(writable(side.codec) for side in Tokens(cache, head_dim).sides())
    check(cache, head_dim, interpret=False)
