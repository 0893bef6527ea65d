"""The basis of the cache: what a spec does to keys and values before they are coded.

Keys are stored as (k - mean) R and met by q R^-T, which gives q . (k - mean). Their mean has a
rotary position, as they do: it stands in the middle of a key's page, so that what it adds to the
scores of a query is one number for each page (attention/page_means.py). Values are stored as
(v - mean) R, which is folded into the weights at load (fold.py). Both change nothing by themselves.
R is orthogonal, and R^-T is R, but for the rotation "balanced": any invertible matrix.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float16, Int

from jkvq.cache.calibrated import Calibration, SideCalibration, calibrate_command, methods_for
from jkvq.cache.fixed_rotations import (
    bit_reversal,
    block_hadamard,
    fixed_rotation,
    hadamard,
    random_rotation,
)
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec import CALIBRATED_ROTATIONS, EXACT, CacheSpec, OtherLayers, SideSpec
from jkvq.cache.stored import BLOCK_GROUPS
from jkvq.pallas_kernels.formats.codecs import (
    AffineCodec,
    Codec,
    DigitCodec,
    FloatCodec,
    LloydCodec,
)
from jkvq.pallas_kernels.formats.digits import PARTS, column_channels, relative_step
from jkvq.pallas_kernels.formats.lloyd import Allocation, make_allocation
from jkvq.pallas_kernels.formats.packed import LayerIndex
from jkvq.pallas_kernels.formats.words import GREATEST
from jkvq.pallas_kernels.rotary import along_and_across, angles, rotate
from jkvq.pallas_kernels.types import TokenTransform
from jkvq.support.errors import UserError


class Angles(NamedTuple):
    """Cos and sin of every rotary pair, where means stand.

    Rounded to float16 for all who take part: what keys lose is what scores get back.
    """

    cos: Float16[Array, "*n H/2"]
    sin: Float16[Array, "*n H/2"]

    @property
    def wide(self) -> tuple[Float16[Array, "*n H"], Float16[Array, "*n H"]]:
        """In the width of a head, as kernels take them (`TokenTransform.angles`)."""
        cos = jnp.concatenate([self.cos, self.cos], axis=-1)
        return cos, jnp.concatenate([-self.sin, self.sin], axis=-1)

    @property
    def turns(self) -> Float16[Array, "*n H"]:
        """As `SideBasis.mean_queries` meets them."""
        return jnp.concatenate([self.cos, self.sin], axis=-1)

    def in_float32(self) -> tuple[Float[Array, "*n H/2"], Float[Array, "*n H/2"]]:
        return self.cos.astype(jnp.float32), self.sin.astype(jnp.float32)


class Matrices(NamedTuple):
    """A rotation R and its dual R^-T, of every layer and KV head.

    They repeat: layer i and head j have [i % l, j % k], and one matrix for all is l = k = 1.
    """

    rotation: Float[Array, "l k H H"]
    dual: Float[Array, "l k H H"]  # the same array where R is orthogonal


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SideBasis:
    """One side, keys or values, of every layer: its basis and its codecs' arrays.

    mean: subtracted before coding; None is none.
    frequency: of the rotary pairs by which the mean of keys turns; None is a mean that stands.
    matrices: in float32, for plain JAX.
    kernel_matrices: the same as kernels take them: float16, columns as the codec stores channels.
    zero: what a vector of zeros is in a basis that was folded into the weights; None is zeros.
    """

    mean: Float[Array, "L K H"] | None
    frequency: Float[Array, " H/2"] | None
    matrices: Matrices | None
    kernel_matrices: Matrices | None
    clip: Float[Array, " L"] | None
    centroids: Float[Array, "L C K H"] | None
    allocation: Allocation | None  # arrays with a leading L
    spec: SideSpec = field(metadata={"static": True})
    zero: Float[Array, "L K H"] | None = None

    def angles(self, middle: Int[Array, "*n"]) -> Angles | None:
        """Where means stand that turn with their pages, by the pages' middles."""
        if self.mean is None or self.frequency is None:
            return None
        cos, sin = angles(self.frequency, middle)
        return Angles(cos.astype(jnp.float16), sin.astype(jnp.float16))

    def enter(
        self, x: Float[Array, "B T K H"], layer: LayerIndex, at: Angles | None, factors=jnp.float32
    ) -> Float[Array, "B T K H"]:
        """(x - mean) R, in float32 unless it is x itself; ``at`` from the pages of the tokens.

        ``factors``: what the product is taken of, float16 as the kernels do.
        """
        if self.mean is not None:
            x = x.astype(jnp.float32) - self.mean_at(layer, at)
        return _rotated(x, self.rotation(layer), factors)

    def leave(self, x: Float[Array, "B T K H"], layer: LayerIndex) -> Float[Array, "B T K H"]:
        """x R^-1, in float32 unless it is x itself: without the mean, what ``enter`` undoes."""
        dual = self.dual(layer)
        return _rotated(x, None if dual is None else dual.swapaxes(-1, -2))

    def mean_at(self, layer: LayerIndex, at: Angles | None) -> Float[Array, "#B #T K H"]:
        """The mean of a layer, turned to where it stands."""
        assert self.mean is not None
        mean = self.mean[layer][None, None]
        return mean if at is None else rotate(mean, *at.in_float32())

    def entered_mean(self, layer: LayerIndex, at: Angles | None) -> Float[Array, "#B #S K H"]:
        """What ``enter`` takes off, in the basis of the cache."""
        return _rotated(self.mean_at(layer, at), self.rotation(layer))

    def mean_queries(
        self, q: Float[Array, "B T N H"], layer: LayerIndex
    ) -> Float[Array, "B T N H"] | None:
        """What gives q . mean by the turns of a page, with the mean where it stands there."""
        if self.mean is None:
            return None
        mean = jnp.repeat(self.mean[layer], q.shape[2] // self.mean.shape[1], axis=0)
        return along_and_across(q, mean[None, None])

    def rotate_queries(
        self, q: Float[Array, "B T N H"], layer: LayerIndex, factors=jnp.float32
    ) -> Float[Array, "B T N H"]:
        """q R^-T, each query head by its KV head's R; of such factors, and as such, or q itself."""
        return _rotated(q, self.dual(layer), factors, factors)

    def rotation(self, layer: LayerIndex) -> Float[Array, "k H H"] | None:
        """R of a layer, for k equal shares of its heads."""
        return None if self.matrices is None else _of_layer(self.matrices.rotation, layer)

    def dual(self, layer: LayerIndex) -> Float[Array, "k H H"] | None:
        """R^-T of a layer."""
        return None if self.matrices is None else _of_layer(self.matrices.dual, layer)

    def transform(
        self,
        layer: LayerIndex,
        wide: tuple[Float16[Array, "B T H"], Float16[Array, "B T H"]] | None,
    ) -> TokenTransform:
        """What kernels do to the tokens of a layer; ``wide`` are their angles."""
        found = self.kernel_matrices or (None, None)
        return TokenTransform(self.mean, wide, *found, layer)

    def codec(self, layer: LayerIndex) -> Codec:
        spec = self.spec
        if spec.codec == "float":
            return FloatCodec({16: jnp.bfloat16, 32: jnp.float32}[spec.bits])
        if spec.codec == "lloyd":
            if self.allocation is None:
                return LloydCodec(spec.bits, spec.step)
            allocation = jax.tree.map(lambda x: x[layer], self.allocation)
            return LloydCodec(spec.bits, spec.step, allocation)
        if spec.digits:
            return DigitCodec(spec.bits, spec.digits)
        clip = None if self.clip is None else self.clip[layer]
        centroids = None if self.centroids is None else self.centroids[layer]
        return AffineCodec(spec.bits, spec.group, spec.step, clip, centroids)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Basis:
    """Both sides of every layer.

    others: of layers with codes of their own, in the order of ``other_layers``.
    local_frequency: of the rotary pairs of local layers, if the mean of keys turns.
    """

    key: SideBasis
    value: SideBasis
    others: tuple[tuple[SideBasis, SideBasis], ...]
    local_frequency: Float[Array, " H/2"] | None
    exact_layers: tuple[int, ...] = field(metadata={"static": True})
    other_layers: tuple[tuple[int, ...], ...] = field(metadata={"static": True})
    local_layers: tuple[int, ...] = field(metadata={"static": True})

    def changed(self, change: Callable[[SideBasis, SideBasis], tuple[SideBasis, SideBasis]]):
        """With the sides of all layers changed."""
        key, value = change(self.key, self.value)
        others = tuple(change(*sides) for sides in self.others)
        return dataclasses.replace(self, key=key, value=value, others=others)

    def starting_at(self, first: int) -> "Basis":
        """For sequences whose first token stands at the rotary position ``first``."""

        def moved(key: SideBasis, value: SideBasis) -> tuple[SideBasis, SideBasis]:
            if key.mean is None or key.frequency is None or first == 0:
                return key, value
            mean = _rotated_mean(key.mean, key.frequency, first)
            if self.local_frequency is not None:
                local = _rotated_mean(key.mean, self.local_frequency, first)
                is_local = np.isin(np.arange(len(mean)), self.local_layers)
                mean = jnp.where(is_local[:, None, None], local, mean)
            return dataclasses.replace(key, mean=mean), value

        return self.changed(moved)

    def layer(self, layer: int) -> tuple[SideBasis, SideBasis]:
        """The sides of one layer; an exact one keeps everything as it is."""
        if layer in self.exact_layers:
            return _PLAIN, _PLAIN
        owners = zip(self.other_layers, self.others, strict=True)
        own = next((sides for layers, sides in owners if layer in layers), (self.key, self.value))
        if self.local_frequency is None or layer not in self.local_layers or own[0].mean is None:
            return own
        return dataclasses.replace(own[0], frequency=self.local_frequency), own[1]


_PLAIN = SideBasis(None, None, None, None, None, None, None, EXACT)


@jax.jit
def _rotated_mean(mean: Float[Array, "L K H"], frequency: Float[Array, " H/2"], by):
    return rotate(mean, *angles(frequency, jnp.asarray(by)[None]))


def _of_layer(every: Float[Array, "l k H H"], layer: LayerIndex) -> Float[Array, "k H H"]:
    return every[layer % every.shape[0]]


def _rotated(
    x: Float[Array, "B T N H"],
    R: Float[Array, "k H H"] | None,
    factors=jnp.float32,
    result=jnp.float32,
) -> Float[Array, "B T N H"]:
    """x R, each of k equal shares of the heads with its own R; of such factors, summed in float32.

    A product for every head takes and leaves heads where they are; one for a share would not.
    """
    if R is None:
        return x
    N, H = x.shape[2:]
    each = R if len(R) == 1 else jnp.repeat(R, N // len(R), axis=0)
    rotated = jnp.einsum(
        "rnh,nhi->rni",
        x.astype(factors).reshape(-1, len(each), H),
        each.astype(factors),
        precision="highest",
        preferred_element_type=result,
    )
    return rotated.reshape(x.shape)


def make_basis(
    spec: CacheSpec,
    shape: CacheShape,
    calibration: Calibration | None,
    frequency: Float[np.ndarray, " H/2"] | None = None,
    local_frequency: Float[np.ndarray, " H/2"] | None = None,
) -> Basis:
    """The basis of a spec; refuses one that needs a calibration it is not given.

    ``frequency`` is that of the model's rotary pairs; None is one without rotary positions.
    ``local_frequency`` is that of layers with a window.
    """
    found = calibration or Calibration()
    rotations = {side.rotation for side in spec.sides}.intersection(CALIBRATED_ROTATIONS)
    if found.method and rotations and found.method not in methods_for(spec):
        raise UserError(
            f"this cache has rotation {' and '.join(sorted(rotations))}, and the "
            f"calibration is of method {found.method}: make one with `{calibrate_command(spec)}`"
        )
    if frequency is None:
        frequency = np.zeros(shape.head_dim // 2)

    def sides(own: CacheSpec | OtherLayers) -> tuple[SideBasis, SideBasis]:
        of_layers = dataclasses.replace(spec, key=own.key, value=own.value)
        key = _side("key", of_layers, shape, found.key, seed=0)
        if key.mean is not None:
            key = dataclasses.replace(key, frequency=jnp.asarray(frequency, jnp.float32))
        return key, _side("value", of_layers, shape, found.value, seed=1)

    others = tuple(map(sides, spec.other_layers))
    key, value = sides(spec)
    centred = any(own.mean is not None for own, _ in ((key, value), *others))
    local = (
        jnp.asarray(local_frequency, jnp.float32)
        if centred and local_frequency is not None
        else None
    )
    return Basis(
        key,
        value,
        others,
        local,
        spec.exact_layers,
        tuple(other.layers for other in spec.other_layers),
        tuple(layer for layer, window in enumerate(shape.windows) if window is not None),
    )


_CHANNELS = {"key": "head_dim", "value": "value_dim"}  # of a CacheShape


def _side(name: str, cache: CacheSpec, shape: CacheShape, found: SideCalibration, seed: int):
    spec: SideSpec = getattr(cache, name)
    L, K, H = shape.layers, shape.kv_heads, getattr(shape, _CHANNELS[name])
    parts = vars(found) | vars(found.transform(cache))

    def need(part: str, *expected: int) -> Array:
        array = parts[part]
        if array is None:
            raise UserError(
                f"this cache needs a calibration with the {part} of the {name}s: make one with "
                f"`{calibrate_command(cache)}`"
            )
        if array.shape != expected:
            raise UserError(
                f"the calibration's {name} {part} has shape {array.shape}, and this model and "
                f"cache need {expected}: make one with `{calibrate_command(cache)}`"
            )
        return jnp.asarray(array)

    allocation, rotation, dual = None, None, None
    if spec.allocation == "blocks":
        widths = np.asarray(need("widths", 8, L, K, H // 2), np.int32)[spec.bits - 1]
        rotation, allocation = _blocks(widths, spec.bits, seed)
    elif spec.rotation in CALIBRATED_ROTATIONS:
        rotation = np.asarray(need("rotation", L, K, H, H), np.float64)
        if spec.rotation == "balanced":
            rotation = rotation @ mixing(np.asarray(need("spread", L, K, H)), spec)
            dual = np.linalg.inv(rotation).swapaxes(-1, -2)
    elif spec.rotation != "none":
        rotation = fixed_rotation(spec.rotation, H, seed)[None, None]
    clip = None
    if spec.clip < 1:
        clip = jnp.full(L, spec.clip) if found.clip is None else need("clip", L)
    mean = need("mean", L, K, H).astype(jnp.float32) if spec.center else None
    matrices = None if rotation is None else _even(rotation, dual)
    kernel_matrices = None if matrices is None else _for_kernels(name, matrices, cache, spec)
    basis = SideBasis(mean, None, matrices, kernel_matrices, clip, None, allocation, spec)
    if not spec.centroids:
        return basis
    # Distances are the same in every basis: so are the tokens that share a centroid.
    given = need("centroids", L, spec.centroids, K, H).astype(jnp.float32)
    centroids = jnp.stack([basis.enter(given[layer][None], layer, None)[0] for layer in range(L)])
    return dataclasses.replace(basis, centroids=centroids)


def _even(rotation: Float[np.ndarray, "l k H H"], dual: np.ndarray | None) -> Matrices:
    """R and its dual with greatest numbers of the same size: both must fit float16.

    R c and R^-T / c serve as R does; c is a power of two, which rounds nothing. Without a dual R is
    orthogonal.
    """
    if dual is None:
        array = jax.device_put(rotation.astype(np.float32))
        return Matrices(array, array)
    sizes = (np.abs(x).max((-2, -1), keepdims=True) for x in (dual, rotation))
    c = 2.0 ** np.round(0.5 * np.log2(np.divide(*sizes)))
    both = ((x * by).astype(np.float32) for x, by in ((rotation, c), (dual, 1 / c)))
    return Matrices(*map(jnp.asarray, both))


def _for_kernels(name: str, matrices: Matrices, cache: CacheSpec, spec: SideSpec) -> Matrices:
    """The matrices as the kernels take them, once for all steps."""
    greatest = max(float(np.abs(x).max()) for x in matrices)
    if not greatest <= GREATEST:
        raise UserError(
            f"the calibration's {name} rotation stretches directions by up to {greatest:.2g}, and "
            f"float16 holds {GREATEST:.0f}: calibrate on more text with "
            f"`{calibrate_command(cache)} --tokens 16384`"
        )
    rotation, dual = (np.asarray(x).astype(np.float16) for x in matrices)
    if spec.digits and not cache.windowed:  # windows hold channels as they are
        rotation = rotation[..., column_channels(spec.digits, rotation.shape[-1])]
    return Matrices(jax.device_put(rotation), jax.device_put(dual))


def mixing(spread: Float[np.ndarray, "*n H"], spec: SideSpec) -> Float[np.ndarray, "*#n H H"]:
    """What mixes the directions of a balanced rotation, so that all channels are alike.

    With digits each quarter is mixed by itself, and scaled to the step that all have in common.
    """
    H = spread.shape[-1]
    if not spec.digits:
        return np.expand_dims(hadamard(H)[:, bit_reversal(H)], tuple(range(spread.ndim - 1)))
    size = H // PARTS
    deviation = np.sqrt(spread.reshape(*spread.shape[:-1], PARTS, size).mean(-1))
    steps = [relative_step(spec.bits, count) if count else 1.0 for count in spec.digits]
    scale = np.repeat(1 / (deviation * steps), size, axis=-1)
    return block_hadamard(H, size) * scale[..., None, :]


def _blocks(widths: np.ndarray, bits: int, seed: int) -> tuple[np.ndarray, Allocation]:
    """Block-GTQ: the rotation that gathers the channels of equal width and turns each group.

    Block i of a head is the channels i and i + H/2. Groups stand widest first.
    """
    L, K, half = widths.shape
    if widths.min() < 1 or widths.max() > 8 or (widths.sum(-1) != bits * half).any():
        raise UserError(
            f"block widths must be 1 to 8 bits and average {bits} in every head; these are "
            f"{widths.min()} to {widths.max()} and average {widths.mean():.3g}"
        )
    channel_widths = np.concatenate([widths, widths], axis=-1)  # [L, K, H]
    order = np.argsort(-channel_widths, axis=-1, kind="stable")
    width = np.take_along_axis(channel_widths, order, axis=-1)
    group = np.cumsum(np.diff(width, axis=-1, prepend=width[..., :1]) != 0, axis=-1)
    if group.max() >= BLOCK_GROUPS:
        raise UserError(
            f"a head has {group.max() + 1} different block widths; {BLOCK_GROUPS} may be stored"
        )
    rotation = np.zeros((L, K, 2 * half, 2 * half), np.float32)
    for layer, head in np.ndindex(L, K):
        for index in range(group[layer, head].max() + 1):
            columns = np.flatnonzero(group[layer, head] == index)
            rows = order[layer, head, columns]
            rotation[layer, head][np.ix_(rows, columns)] = random_rotation(len(columns), seed)
    allocation = make_allocation(width, group, groups=BLOCK_GROUPS)
    return rotation, allocation
