"""The sum of hidden states and what a block adds to them, and its norm, in one launch.

Compiled from plain JAX it takes two or three: a launch is most of the time of a decode step's few
tokens, and a prompt's are read again by each. A program takes one token.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from jkvq.pallas_kernels.norm import rms_norm
from jkvq.pallas_kernels.types import Unsummed


def add_norm(
    x: Float[Array, "*rows D"],
    more: Unsummed,
    weight: Float[Array, " D"],
    eps: float,
    *,
    of_one: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """x and more, and the norm of that (norm.py)."""
    return _launch(x, more, weight, eps, of_one, interpret)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def _launch(x, more, weight, eps: float, of_one: bool, interpret: bool):
    width = x.shape[-1]
    operands = [x.reshape(-1, width), more.parts.reshape(len(more.parts), -1, width), weight]
    operands += [] if more.bias is None else [more.bias]
    shape = jax.ShapeDtypeStruct(operands[0].shape, x.dtype)
    total, normed = pl.pallas_call(
        functools.partial(_kernel, eps=eps, of_one=of_one),
        grid=shape.shape[:1],
        in_specs=[pl.no_block_spec] * len(operands),
        out_specs=[pl.no_block_spec] * 2,
        out_shape=[shape] * 2,
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(*operands)
    return total.reshape(x.shape), normed.reshape(x.shape)


@_launch.defjvp
def _derivative(eps: float, of_one: bool, interpret: bool, at, along):
    """That of plain JAX: a kernel has none."""

    def plain(x, more, weight):
        total = x + more.total
        return total, rms_norm(total, weight, eps, of_one=of_one)

    return _launch(*at, eps, of_one, interpret), jax.jvp(plain, at, along)[1]


def _kernel(x_ref, more_ref, weight_ref, *refs, eps: float, of_one: bool):
    *bias, total_ref, normed_ref = refs
    row, width = pl.program_id(0), x_ref.shape[1]
    channel = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    real = channel < width

    def load(ref, *at):
        return plt.load(ref.at[(*at, channel)], mask=real, other=0.0).astype(jnp.float32)

    def store(ref, numbers):
        plt.store(ref.at[row, channel], numbers.astype(ref.dtype), mask=real)

    total = load(x_ref, row)
    for part in range(more_ref.shape[0]):
        total = total + load(more_ref, part, row)
    for ref in bias:
        total = total + load(ref)
    total = total.astype(x_ref.dtype)
    store(total_ref, total)
    wide, weight = total.astype(jnp.float32), load(weight_ref)
    wide = wide * jax.lax.rsqrt(jnp.sum(wide * wide) / width + eps)
    if of_one:
        store(normed_ref, wide * (1.0 + weight))
    else:
        store(normed_ref, wide.astype(x_ref.dtype).astype(jnp.float32) * weight)
