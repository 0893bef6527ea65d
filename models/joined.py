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

    @property
    def count(self) -> int:
        """Of its rows."""
        return self.rows.stop - self.rows.start


def joined_parts(config: ModelConfig) -> dict[str, dict[str, list[Part]]]:
    """The parts of every joined projection, by module and name."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = [
        ("q", queries, config.qk_bias),
        ("k", keys, config.qk_bias),
        ("v", keys, config.v_bias),
    ]
    gate_up = [(name, config.mlp_width, config.mlp_bias) for name in ("gate", "up")]
    return {"attention": {"qkv": _in_a_row(qkv)}, "mlp": {"gate_up": _in_a_row(gate_up)}}


def _in_a_row(sizes: list[tuple[str, int, bool]]) -> list[Part]:
    parts, first = [], 0
    for name, rows, bias in sizes:
        parts.append(Part(name, slice(first, first + rows), bias))
        first += rows
    return parts


def split_layer(config: ModelConfig, layer: Params) -> Params:
    """A layer of the decoder as a checkpoint has it."""
    split = dict(layer)
    for module, projections in joined_parts(config).items():
        rest = dict(layer[module])
        for name, parts in projections.items():
            joined = rest.pop(name)
            for part in parts:
                kinds = ("weight", "bias") if part.bias else ("weight",)
                rest[part.name] = {kind: joined[kind][part.rows] for kind in kinds}
        split[module] = rest
    return split


def abstract_checkpoint(config: ModelConfig, dtype) -> Params:
    """Shapes of every parameter as a checkpoint has them."""
    params = abstract_params(config, dtype)
    split = jax.eval_shape(lambda layer: split_layer(config, layer), params["layers"][0])
    return {**params, "layers": dict.fromkeys(range(config.layers), split)}
