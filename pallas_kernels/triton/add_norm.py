"""The sum of hidden states and what a block adds to them, and its norm, in one launch.

For the few tokens of a decode step: compiled from plain JAX it takes three, and a launch is most of
their time. A program takes one token.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float


def add_norm(
    x: Float[Array, "*rows D"],
    more: Float[Array, "*rows D"],
    weight: Float[Array, " D"],
    eps: float,
    *,
    of_one: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """x + more, and its norm (norm.py)."""
    width = x.shape[-1]
    rows = x.reshape(-1, width), more.reshape(-1, width)
    total, normed = pl.pallas_call(
        functools.partial(_kernel, eps=eps, of_one=of_one),
        grid=(len(rows[0]),),
        in_specs=[pl.no_block_spec] * 3,
        out_specs=[pl.no_block_spec] * 2,
        out_shape=[jax.ShapeDtypeStruct(rows[0].shape, x.dtype)] * 2,
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(*rows, weight)
    return total.reshape(x.shape), normed.reshape(x.shape)


def _kernel(x_ref, more_ref, weight_ref, total_ref, normed_ref, *, eps: float, of_one: bool):
    row, width = pl.program_id(0), x_ref.shape[1]
    channel = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    real = channel < width

    def load(ref, *at):
        return plt.load(ref.at[(*at, channel)], mask=real, other=0.0).astype(jnp.float32)

    def store(ref, numbers):
        plt.store(ref.at[row, channel], numbers.astype(ref.dtype), mask=real)

    total = (load(x_ref, row) + load(more_ref, row)).astype(x_ref.dtype)
    store(total_ref, total)
    wide, weight = total.astype(jnp.float32), load(weight_ref)
    wide = wide * jax.lax.rsqrt(jnp.sum(wide * wide) / width + eps)
    if of_one:
        store(normed_ref, wide * (1.0 + weight))
    else:
        store(normed_ref, wide.astype(x_ref.dtype).astype(jnp.float32) * weight)
