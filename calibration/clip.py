"""Clip ratios: for each layer and side the quantile that errs least in the attention output.

A second pass over the text; the errors of every quantile are sums, so it keeps no activations.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkvq.cache.basis import Basis, SideBasis, make_basis
from jkvq.cache.calibrated import Calibration
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.specs.spec_text import spec_text
from jkvq.calibration.observe import sequences
from jkvq.calibration.solve import CalibrationOptions
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, embed, run_layer
from jkvq.pallas_kernels.formats.packed import LayerIndex
from jkvq.pallas_kernels.reference.dense_attention import causal, products, softmax, weighted_sum
from jkvq.support.errors import UserError
from jkvq.support.progress import count_bar

GRID = (0.88, 0.90, 0.92, 0.94, 0.96, 0.98, 1.00)


def require_clipping(spec: CacheSpec) -> None:
    """Refuses a spec that has no clip ratios to choose."""
    if spec.key.clip == 1 or spec.value.clip == 1:
        raise UserError(f"clip_for={spec_text(spec)}: this cache does not clip; oscar-int2 does")
    if spec.other_layers:
        raise UserError(f"clip_for={spec_text(spec)}: only a cache that codes all layers alike")


def choose_clips(
    config: ModelConfig,
    params: Params,
    tokens: Sequence[int],
    spec: CacheSpec,
    calibration: Calibration,
    options: CalibrationOptions,
    leading: int = 0,
) -> Calibration:
    """The calibration with the clip ratios that serve a spec best; ``leading`` as in `observe`."""
    basis = make_basis(spec, CacheShape.of(config), calibration, *config.rope_frequencies)
    errors = np.zeros((2, config.layers, len(GRID)))
    with count_bar("Choosing clip ratios", len(tokens)) as bar:
        for index, (chunk, count) in enumerate(sequences(tokens, options.window, leading)):
            errors += np.asarray(clip_errors(config, params, basis, spec, chunk, count), np.float64)
            bar.advance(int(count) - (leading if index else 0))
    key, value = np.asarray(GRID, np.float32)[errors.argmin(-1)]
    return dataclasses.replace(
        calibration,
        key=dataclasses.replace(calibration.key, clip=key),
        value=dataclasses.replace(calibration.value, clip=value),
    )


def clip_errors(
    config: ModelConfig,
    params: Params,
    basis: Basis,
    spec: CacheSpec,
    tokens: Int[Array, "1 T"],
    count: Int[Array, ""],
) -> Float[np.ndarray, "2 L grid"]:
    """Squared error of the attention output with keys, and with values, clipped at each ratio."""
    position, found = np.arange(tokens.shape[1], dtype=np.int32)[None], []
    hidden, rotary = embed(config, params["embedding"], tokens, position)
    for layer in range(config.layers):
        own, weights = config.layer(layer), params["layers"][layer]
        how = spec, own.attention_scale, own.window
        attend = _Measuring(*basis.layer(layer), layer, count, *how)
        hidden, errors = run_layer(own, weights, hidden, rotary, attend, None)
        found.append(np.asarray(errors))
    return np.stack(found, axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Measuring:
    """Attention of a layer, whose state is what each clip ratio makes it err by."""

    key: SideBasis
    value: SideBasis
    layer: LayerIndex
    count: Int[Array, ""]
    spec: CacheSpec = field(metadata={"static": True})
    scale: float = field(metadata={"static": True})
    window: int | None = field(metadata={"static": True})

    def __call__(self, q, k, v, state, sinks=None):
        del state
        q, k, v = (heads.finished for heads in (q, k, v))
        layer, spec, scale = self.layer, self.spec, self.scale
        position = jnp.arange(q.shape[1], dtype=jnp.int32)
        real = position < self.count
        visible = causal(position, len(position), self.window) & real[None]
        at = self.key.angles(spec.middle(position)[None])
        packed = spec.reads_packed(position[:, None], position[None])[None, None]
        rotated = self.key.rotate_queries(q, layer)[0]
        logits = scale * products(q[0], k[0])
        S, _ = softmax(logits, visible, sinks)
        out = weighted_sum(S, v[0])
        k_in, v_in = self.key.enter(k, layer, at)[0], self.value.enter(v, layer, None)[0]
        mean = 0.0 if self.key.mean is None else self.key.entered_mean(layer, at)[0]

        def key_error(clip):
            coded = scale * products(rotated, _coded(self.key, layer, clip, k_in) + mean)
            weights, _ = softmax(jnp.where(packed, coded, logits), visible, sinks)
            return _squared(weighted_sum(weights, v[0]) - out, real)

        def value_error(clip):
            lost = _coded(self.value, layer, clip, v_in) - v_in
            lost = self.value.leave(lost[None], layer)[0]
            return _squared(weighted_sum(jnp.where(packed, S, 0.0), lost), real)

        grid = jnp.asarray(GRID, jnp.float32)
        errors = jnp.stack([jax.lax.map(error, grid) for error in (key_error, value_error)])
        return out[None].astype(q.dtype), errors


def _coded(
    side: SideBasis, layer: LayerIndex, clip, x: Float[Array, "T K H"]
) -> Float[Array, "T K H"]:
    """What the cache gives back of tokens in its basis."""
    codec = dataclasses.replace(side.codec(layer), clip=clip)  # pyright: ignore
    return codec.decode(codec.encode(x[None]), jnp.ones((1, len(x)), bool))[0]


def _squared(x: Float[Array, "T N H"], real) -> Float[Array, ""]:
    return jnp.where(real[:, None, None], x * x, 0.0).sum()
