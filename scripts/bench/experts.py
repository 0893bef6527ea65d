"""Times a layer's experts on this GPU in the shape of Qwen3-30B-A3B, by the ways to compute them.

    python -m scripts.bench.experts

Microseconds of one feed-forward block without its router, for a decode step of each batch, and the
part of the memory's speed at which it reads the experts that the tokens chose, each once.
chosen: each token by its own experts. all: every token by every expert. The model takes chosen
where tokens times experts of each are fewer than the experts (models/layers/experts.py).
For comparison, rows sorted by their experts, a token's once for each of its experts:
ragged: `jax.lax.ragged_dot_general`.
mosaic: jax's own example of a ragged kernel for Hopper; ``--batches 2048`` is a chunk of a prompt.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jkvq.bench.shapes import shape_config
from jkvq.bench.steps import stream_bandwidth
from jkvq.models.layers.experts import ExpertStack
from scripts.bench.kernels import timed

_BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)


def _ragged(x, weight, count):
    return jax.lax.ragged_dot_general(x, weight, count, _BY_EXPERT)


def _mosaic(x, weight, count):
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot  # noqa: PLC0415

    return ragged_dot(
        x,
        weight,
        group_sizes=count,
        transpose_rhs=True,
        block_m=64,
        block_n=128,
        block_k=64,
        max_concurrent_steps=4,
        grid_block_n=2,
    )


def by_rows(product, stack: ExpertStack, x, weights, chosen):
    """The rows of all tokens, sorted by their experts, through ragged products."""
    expert, k = chosen.reshape(-1), chosen.shape[1]
    order = jnp.argsort(expert)
    count = jnp.bincount(expert, length=stack.how.number).astype(jnp.int32)
    hidden = stack._gated(product(x[order // k], stack.gate_up.weight[...], count))
    out = product(hidden, stack.down.weight[...], count).astype(jnp.float32)
    back = jnp.zeros_like(out).at[order].set(out * weights.reshape(-1)[order][:, None])
    return back.reshape(len(x), k, -1).sum(1).astype(x.dtype)


WAYS = {
    "chosen": ExpertStack._of_chosen,
    "all": ExpertStack._of_all,
    "ragged": functools.partial(by_rows, _ragged),
    "mosaic": functools.partial(by_rows, _mosaic),
}


def time_way(way: str, batch: int, shape: str) -> tuple[float, int]:
    """Microseconds, and the bytes of the experts that are chosen."""
    config = shape_config(shape)
    experts = config.experts
    assert experts is not None
    graph = nnx.eval_shape(lambda: ExpertStack(config, experts))
    keys = iter(jax.random.split(jax.random.key(0), 3))

    def draw(shape, scale):
        return jax.random.normal(next(keys), shape, jnp.bfloat16) * jnp.bfloat16(scale)

    rows = draw((batch, config.width), 1.0)
    matrices = jax.tree.map(lambda leaf: draw(leaf.shape, 0.02), nnx.to_pure_dict(nnx.state(graph)))
    rng = np.random.default_rng(0)
    own = [rng.permutation(experts.number)[: experts.chosen] for _ in range(batch)]
    chosen = jnp.asarray(np.stack(own), jnp.int32)
    weights = jnp.full(chosen.shape, 1 / experts.chosen, jnp.float32)

    def call(x, matrices, weights, chosen):
        stack = nnx.merge(nnx.graphdef(graph), nnx.State(matrices))
        out = WAYS[way](stack, x, weights, chosen).astype(x.dtype)
        return x + out * jnp.bfloat16(1e-30)

    each = sum(leaf.nbytes for leaf in jax.tree.leaves(matrices)) // experts.number
    return timed(call, rows, matrices, weights, chosen, rounds=2), each * len(np.unique(own))


def main() -> None:
    """Prints a row for every batch and way."""
    parser = argparse.ArgumentParser(description="Times a layer's experts on this GPU.")
    parser.add_argument("--batches", default="1,4,8,15,16,32,128")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("there is no GPU here")
    stream = stream_bandwidth()
    print(f"{jax.devices()[0].device_kind}, stream {stream / 1e12:.2f} TB/s", flush=True)
    for batch in map(int, args.batches.split(",")):
        for way in args.ways.split(","):
            try:
                us, size = time_way(way, batch, args.shape)
            except Exception as error:  # the next way may run
                print(f"batch {batch:>4} {way:>7} {str(error)[:200]}", flush=True)
                continue
            rate = size / us * 1e6 / stream
            print(
                f"batch {batch:>4} {way:>7} {us:>9.1f} us {size / 1e6:>7.0f} MB {rate:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
