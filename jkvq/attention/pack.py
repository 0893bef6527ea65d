"""Packing ahead of time: pages of windows whose tokens will leave the recent window soon.

A page is complete at least ``recent`` tokens before a query reads it packed, so that packing it
needs no moment of its own: it is done between bursts of decode steps, for all layers at once. Until
then both copies exist, and which of them a query reads depends on its position alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jkvq.attention.layer_view import LayerView
from jkvq.attention.step_plan import PackPlan, plan_packing
from jkvq.attention.store import pack_plainly
from jkvq.cache.basis import Basis
from jkvq.cache.layout import PACK_EVERY, GroupSpec, KVCache, LayerGroup, layer_groups
from jkvq.pallas_kernels.types import COMPILED, Implementation


def pack_due(
    cache: KVCache, basis: Basis, count: Int[Array, " B"], implementation: Implementation
) -> KVCache:
    """The cache with everything packed that the next ``count`` tokens may read so.

    At most PACK_EVERY of them, and no more than ``recent``: what they read packed is complete then.
    """
    groups = []
    of_spec = layer_groups(cache.spec, cache.layers, cache.windows)
    for storage, group in zip(cache.groups, of_spec, strict=True):
        if storage.exact is None:
            groups.append(storage)
            continue
        plan = plan_packing(group, cache.sequences, count, PACK_EVERY)
        groups.append(_pack_group(storage, group, basis, plan, implementation))
    return dataclasses.replace(cache, groups=tuple(groups))


def _pack_group(
    storage: LayerGroup, group: GroupSpec, basis: Basis, plan: PackPlan, implementation
) -> LayerGroup:
    key, value = basis.layer(group.layers[0])
    number = jnp.asarray(group.layers, jnp.int32)

    def pack_one(index, storage: LayerGroup) -> LayerGroup:
        view = LayerView(storage, key, value, number[index], index, group.spec)
        if implementation == "reference":
            return pack_plainly(view, plan)
        from jkvq.attention.kernels import pack_layer  # noqa: PLC0415 (loads the kernels)

        return pack_layer(view, plan, interpret=implementation == "interpret")

    def pack_all() -> LayerGroup:
        return jax.lax.fori_loop(0, len(group.layers), pack_one, storage)

    if implementation in COMPILED:
        return pack_all()  # a GPU leaves out what is not due, and need not ask its host
    return jax.lax.cond(plan.to.real.any(), pack_all, lambda: storage)
