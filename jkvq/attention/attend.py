"""Attention of new tokens over the cache and themselves.

What a query sees of the tokens before it is divided by one number, its *boundary*: packed tokens
below it are read from pages; the sink, and packed-to-be tokens from it on, are read exactly, from
pages of windows or from the chunk itself.
"""

import dataclasses
import functools
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Array, Float

from jkvq.attention.layer_view import LayerView
from jkvq.attention.reference import attend_plainly
from jkvq.attention.step_plan import Chunk, GroupPlan, Phase, StepPlan
from jkvq.cache.basis import Basis, SideBasis
from jkvq.cache.layout import LayerGroup, layer_groups, place_of
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec import CacheSpec
from jkvq.pallas_kernels.formats.packed import LayerIndex
from jkvq.pallas_kernels.types import Implementation, NewHeads


@functools.lru_cache(maxsize=1024)
def _on_device(number: int) -> jax.Array:
    """A number that no call has to copy to the device."""
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.int32(number))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer over the cache.

    An argument of the compiled layer: layers that are stored alike share a program, as they differ
    in their numbers alone.
    """

    key: SideBasis
    value: SideBasis
    layer: LayerIndex  # of the model
    index: LayerIndex  # among the layers of its group
    chunk: Chunk
    plan: GroupPlan
    group: int = field(metadata={"static": True})
    spec: CacheSpec = field(metadata={"static": True})  # of the layer
    scale: float = field(metadata={"static": True})
    phase: Phase = field(metadata={"static": True})
    implementation: Implementation = field(metadata={"static": True})

    @classmethod
    def of(
        cls, layer: int, spec: CacheSpec, shape: CacheShape, basis: Basis, plan: StepPlan, **how
    ):
        """That of a layer of the model in a step; ``how``: scale, phase and implementation."""
        place = place_of(spec, shape.layers, layer, shape.windows)
        own = layer_groups(spec, shape.layers, shape.windows)[place.group].spec
        of_group = plan.chunk, plan.groups[place.group], place.group, own
        numbers = _on_device(layer), _on_device(place.layer)
        return cls(*basis.layer(layer), *numbers, *of_group, **how)

    def __call__(
        self,
        q: NewHeads,
        k: NewHeads,
        v: NewHeads,
        groups: tuple[LayerGroup, ...],
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B T N C"], tuple[LayerGroup, ...]]:
        """Stores k and v of a chunk in the layer, and lets its queries attend.

        Values come, and the output goes, in the basis of the cache (cache/basis.py).
        """
        view = LayerView(
            groups[self.group], self.key, self.value, self.layer, self.index, self.spec, sinks
        )
        # No fused attention of a prompt lets each token see as many before it as a window has.
        windowed = self.phase == "prefill" and self.plan.oldest is not None
        if self.implementation == "reference" or windowed:
            how = {"scale": self.scale, "phase": self.phase}
            heads = q.finished, k.finished, v.finished
            out, storage = attend_plainly(view, *heads, self.chunk, self.plan, **how)
        else:
            out, storage = self._by_kernels(view, q, k, v)
        after = (*groups[: self.group], storage, *groups[self.group + 1 :])
        return out.astype(q.joined.dtype), after

    def _by_kernels(self, view: LayerView, q: NewHeads, k: NewHeads, v: NewHeads):
        # Loads the kernels, which nobody needs who runs without them.
        from jkvq.attention.kernels import attend_prefill, attend_token  # noqa: PLC0415

        how = {"scale": self.scale, "interpret": self.implementation == "interpret"}
        if self.phase == "decode":
            return attend_token(view, q, k, v, self.chunk, self.plan, **how)
        heads = q.finished, k.finished, v.finished
        if self.phase == "prefill":
            return attend_prefill(view, *heads, self.chunk, self.plan, **how)
        # Known tokens through the kernels' own decode: what evaluation sees is what runs.
        at = self.plan.page_angles

        def attend_next(storage, now):
            (q, k, v), chunk, plan = now
            now_view = dataclasses.replace(view, storage=storage)
            plan = dataclasses.replace(plan, page_angles=at)
            heads = NewHeads.of(q), NewHeads.of(k), NewHeads.of(v)
            out, storage = attend_token(now_view, *heads, chunk, plan, **how)
            return storage, out

        each = tuple(x.swapaxes(0, 1)[:, :, None] for x in heads)  # [T, B, 1, heads, H]
        plans = dataclasses.replace(self.plan, page_angles=None)
        storage, out = jax.lax.scan(attend_next, view.storage, (each, self.chunk, plans))
        return out[:, :, 0].swapaxes(0, 1), storage
