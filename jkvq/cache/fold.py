"""Folding a cache's value basis into the weights: free at run time, exact by construction.

Values are stored as (v - mean) R. W_v and its bias make them so, and W_o and its bias, rotated by
R^-T, take the output back: the weights of a query add up to one, so its output is short by the
mean exactly. Where a model has sinks, these have the rest of the weights, and read the zeros that
they stand for as a value that is stored so.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.cache.basis import Basis, SideBasis
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params
from jkvq.pallas_kernels.formats.packed import LayerIndex


def fold_values(
    config: ModelConfig, params: Params, basis: Basis
) -> tuple[ModelConfig, Params, Basis]:
    """The model whose values come in the cache's basis, and the basis that leaves them alone."""
    sides = [basis.value, *(value for _, value in basis.others)]
    centred = any(side.mean is not None for side in sides)
    if not centred and all(side.matrices is None for side in sides):
        return config, params, basis
    biased = centred or config.v_bias
    layers = {
        layer: _with_biases(params["layers"][layer]) if biased else params["layers"][layer]
        for layer in range(config.layers)
    }
    for layer in range(config.layers):
        if layer not in basis.exact_layers:
            layers[layer] = _fold_layer(config, layers[layer], basis.layer(layer)[1], layer)

    def folded(key: SideBasis, value: SideBasis) -> tuple[SideBasis, SideBasis]:
        bare = {"mean": None, "matrices": None, "kernel_matrices": None}
        return key, dataclasses.replace(value, **bare, zero=_zeros(config, value))

    if biased:
        config = dataclasses.replace(config, v_bias=True, out_bias=True)
    return config, {**params, "layers": layers}, basis.changed(folded)


def _zeros(config: ModelConfig, side: SideBasis) -> Float[Array, "L K H"] | None:
    """What sinks read in each layer; None where that is zeros."""
    if side.mean is None or not config.sinks:
        return None
    return -jnp.stack([side.entered_mean(layer, None)[0, 0] for layer in range(config.layers)])


def _fold_layer(config: ModelConfig, layer: Params, side: SideBasis, index: int) -> Params:
    attention = layer["attention"]
    shape = config.kv_heads, config.head_dim
    new = _folded(shape, attention["qkv"], attention["o"], side, index)
    return {**layer, "attention": {**attention, **new}}


@functools.partial(
    jax.jit,
    static_argnames="shape",
    compiler_options={"xla_gpu_enable_triton_gemm": False},  # they compile for 8 s, for one launch
)
def _folded(
    shape: tuple[int, int], qkv: Params, o: Params, side: SideBasis, index: LayerIndex
) -> dict[str, Params]:
    """The projections of values, the last of ``qkv``, and of the output in a layer's basis."""
    (K, H), dtype = shape, o["weight"].dtype
    v = {kind: x[-K * H :] for kind, x in qkv.items()}
    v, o = jax.tree.map(lambda x: x.astype(jnp.float32), (v, o))
    R, dual = (
        jnp.broadcast_to(jnp.eye(H)[None] if x is None else x, (K, H, H))
        for x in (side.rotation(index), side.dual(index))
    )
    weight = jnp.einsum("khd,khi->kid", v["weight"].reshape(K, H, -1), R, precision="highest")
    out = o["weight"].reshape(len(o["weight"]), K, -1, H)
    new_v = {"weight": weight.reshape(K * H, -1)}
    rotated_out = jnp.einsum("dkgh,khi->dkgi", out, dual, precision="highest")
    new_o = {"weight": rotated_out.reshape(len(out), -1)}
    mean = jnp.zeros((K, H)) if side.mean is None else side.mean[index]
    if "bias" in v:
        centred = v["bias"].reshape(K, H) - mean
        new_v["bias"] = jnp.einsum("kh,khi->ki", centred, R, precision="highest").reshape(-1)
    if "bias" in o:
        new_o["bias"] = o["bias"] + jnp.einsum("dkgh,kh->d", out, mean, precision="highest")
    new_v, new_o = jax.tree.map(lambda x: x.astype(dtype), (new_v, new_o))
    return {"qkv": {kind: x.at[-K * H :].set(new_v[kind]) for kind, x in qkv.items()}, "o": new_o}


def _with_biases(layer: Params) -> Params:
    """The layer with value and output biases, zero where it had none."""
    attention = dict(layer["attention"])
    for name in ("qkv", "o"):
        weight = attention[name]["weight"]
        if "bias" not in attention[name]:
            zeros = jnp.zeros(len(weight), weight.dtype)
            attention[name] = {**attention[name], "bias": zeros}
    return {**layer, "attention": attention}
