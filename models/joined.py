"""Projections of the same input as one matrix: one product where a checkpoint has two or three.

The rows of the parts stand one after the other.
"""

from typing import NamedTuple

import jax

from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, abstract_params


class Part(NamedTuple):
    """Rows of a joined projection that are one of a checkpoint's."""

    name: str
    rows: slice
    bias: bool

    def of(self, kind: str, array):
        """Its rows of a joined weight, which may be a stack of matrices, or bias."""
        return array[..., self.rows, :] if kind == "weight" else array[..., self.rows]


def joined_parts(config: ModelConfig) -> dict[tuple[str, ...], list[Part]]:
    """The parts of every joined projection of a layer, by the path of the projection."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = [
        ("q", queries, config.qk_bias),
        ("k", keys, config.qk_bias),
        ("v", keys, config.v_bias),
    ]
    parts: dict[tuple[str, ...], list[Part]] = {}
    if config.latent is None:
        parts["attention", "qkv"] = _in_a_row(qkv)
    experts = config.experts
    if experts is None:
        parts["mlp", "gate_up"] = _gate_up(config.mlp_width, config.mlp_bias)
        return parts
    parts["mlp", "experts", "gate_up"] = _gate_up(experts.width, experts.bias)
    if experts.shared_width:
        parts["mlp", "shared", "gate_up"] = _gate_up(experts.shared_width, config.mlp_bias)
    return parts


def _gate_up(width: int, bias: bool) -> list[Part]:
    return _in_a_row([(name, width, bias) for name in ("gate", "up")])


def _in_a_row(sizes: list[tuple[str, int, bool]]) -> list[Part]:
    parts, first = [], 0
    for name, rows, bias in sizes:
        parts.append(Part(name, slice(first, first + rows), bias))
        first += rows
    return parts


def split_layer(config: ModelConfig, layer: Params) -> Params:
    """A layer of the decoder as a checkpoint has it; ``config`` is the layer's own."""
    split = dict(layer)
    for (*above, name), parts in joined_parts(config).items():
        holder = split
        for step in above:
            holder[step] = dict(holder[step])
            holder = holder[step]
        joined = holder.pop(name)
        for part in parts:
            kinds = ("weight", "bias") if part.bias else ("weight",)
            holder[part.name] = {kind: part.of(kind, joined[kind]) for kind in kinds}
    return split


def abstract_checkpoint(config: ModelConfig, dtype) -> Params:
    """Shapes of every parameter as a checkpoint has them."""
    params, kinds = abstract_params(config, dtype), {}
    for number, layer in params["layers"].items():
        kind = config.layer(number)
        if kind not in kinds:
            kinds[kind] = jax.eval_shape(lambda layer, kind=kind: split_layer(kind, layer), layer)
    layers = {number: kinds[config.layer(number)] for number in params["layers"]}
    return {**params, "layers": layers}
