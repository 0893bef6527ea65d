"""x W^T of a few rows by a large matrix, on Hopper: as fast as the matrix can be read.

A decode step multiplies one row of each sequence by every weight, and little but the reading of the
weights takes time. Each block has some rows of W, and where there would be too few blocks, a part
of their length: 128 blocks, of which all run at once. It reads them in steps, several ahead, and a
step's part of x with them, which lies in the second-level cache. Rows of W in a block are many, for
all of them share what is read of x. Whoever takes the result adds its parts.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

_BLOCKS = 128  # of the 132 multiprocessors of an H100 or H200
_FEWEST, _MOST = 96, 192  # rows of W in a block
_ROWS = 64  # of x, as a tensor core takes them
_SWIZZLE = 128  # bytes
_SHARED = 200 * 1024  # bytes of a block
_PARTS = (1, 2, 4, 8)  # of the length of W


_Shaped = Array | jax.ShapeDtypeStruct


class Cut(NamedTuple):
    """How a matrix is cut into blocks.

    rows: of W that a block has.
    parts: of their length, one for a block.
    step: columns that are read at once; stages: steps that are read ahead.
    """

    rows: int
    parts: int
    step: int
    stages: int


@functools.lru_cache
def cut_of(outputs: int, inputs: int) -> Cut | None:
    """How W [outputs, inputs] is cut; None where it cannot be cut evenly."""
    for parts in _PARTS:
        rows, rest = divmod(outputs * parts, _BLOCKS)
        if rest or rows % 8 or not _FEWEST <= rows <= _MOST:
            continue
        for step in (128, 64):
            if inputs % (parts * step) == 0:
                return Cut(rows, parts, step, _SHARED // (2 * step * (_ROWS + rows)))
    return None


def serves(x: _Shaped, weight: _Shaped) -> bool:
    """Whether ``thin_product`` takes these and is faster than XLA's own products."""
    both, rows = x.dtype == weight.dtype == jnp.bfloat16, x.size // x.shape[-1]
    return both and rows in range(16, _ROWS + 1, 8) and cut_of(*weight.shape) is not None


def serves_gated(x: _Shaped, weight: _Shaped) -> bool:
    """Whether ``gated_thin_product`` takes these."""
    if not serves(x, weight):
        return False
    cut = cut_of(*weight.shape)
    return cut is not None and cut.parts == 1 and cut.rows % 16 == 0


def thin_product(
    x: BFloat16[Array, "*rows I"], weight: BFloat16[Array, "O I"]
) -> Float[Array, "parts *rows O"]:
    """What x W^T is the sum of: float32, unless it is one."""
    cut = cut_of(*weight.shape)
    assert cut is not None
    dtype = x.dtype if cut.parts == 1 else jnp.float32
    return _launch(x, weight, cut, [0], lambda y: y, len(weight), dtype)


def gated_thin_product(
    x: BFloat16[Array, "*rows I"],
    weight: BFloat16[Array, "O I"],
    activation: Callable[[Array], Array],
) -> BFloat16[Array, "*rows F"]:
    """activation(gate) * up, with gate and up the halves of x W^T."""
    cut = cut_of(*weight.shape)
    assert cut is not None and cut.parts == 1
    half, outputs = cut._replace(rows=cut.rows // 2), len(weight) // 2
    first = [0, outputs // half.rows]
    return _launch(x, weight, half, first, lambda g, u: activation(g) * u, outputs, x.dtype)[0]


def _launch(
    x: Array, weight: Array, cut: Cut, first: list[int], finish: Callable, outputs: int, dtype
) -> Array:
    """What ``finish`` makes of the products with rows of W, cut from each of ``first`` on."""
    rows = x.reshape(-1, x.shape[-1])
    steps = x.shape[-1] // cut.parts // cut.step
    transforms = plgpu.TilingTransform((8, _SWIZZLE // 2)), plgpu.SwizzleTransform(_SWIZZLE)
    spec = functools.partial(plgpu.BlockSpec, transforms=transforms, delay_release=1)

    def thin_product_block(x_ref, weight_ref, out_ref):
        own, part = jax.lax.axis_index("rows"), jax.lax.axis_index("part")

        def products(*totals):
            def multiply(_, x, *own):
                for total, rows in zip(totals, own, strict=True):
                    plgpu.wgmma(total, x, rows.T)

            def of_weight(number):
                at = first[number] + own
                return spec((cut.rows, cut.step), lambda step: (at, part * steps + step))

            plgpu.emit_pipeline(
                multiply,
                grid=(steps,),
                in_specs=[
                    # JAX 0.12 refuses a plain 0 where x has fewer rows than are copied: the rest
                    # comes as zeros.
                    spec((_ROWS, cut.step), lambda step: (own * 0, part * steps + step)),
                    *(of_weight(number) for number in range(len(first))),
                ],
                max_concurrent_steps=cut.stages,
            )(x_ref, *[weight_ref] * len(first))
            return [total[...] for total in totals]

        found = pl.run_scoped(products, *[plgpu.ACC((_ROWS, cut.rows))] * len(first))

        @functools.partial(pl.run_scoped, to=plgpu.SMEM((_ROWS, cut.rows), dtype))
        def _(to):
            to[...] = finish(*found).astype(dtype)
            plgpu.commit_smem()
            there = out_ref.at[part, :, pl.ds(own * cut.rows, cut.rows)]
            plgpu.copy_smem_to_gmem(to.at[pl.ds(0, len(rows))], there)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    found = plgpu.kernel(
        thin_product_block,
        out_type=jax.ShapeDtypeStruct((cut.parts, len(rows), outputs), dtype),
        grid=(outputs // cut.rows, cut.parts),
        grid_names=("rows", "part"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(rows, weight)
    return found.reshape(cut.parts, *x.shape[:-1], outputs)
