"""One layer of the cache, with the basis in which it stores."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkvq.attention.page_means import PageMeans
from jkvq.attention.step_plan import GroupPlan
from jkvq.cache.basis import SideBasis
from jkvq.cache.exact_pages import read_pages, window_codec
from jkvq.cache.layout import LayerGroup
from jkvq.cache.specs.spec import CacheSpec
from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.packed import LayerIndex
from jkvq.pallas_kernels.reference.merge import sink_part
from jkvq.pallas_kernels.types import Queries


@dataclass(frozen=True)
class LayerView:
    """A layer among those that are stored alike.

    Its numbers may be traced: code that takes a view serves all layers of a spec.
    """

    storage: LayerGroup  # of all layers of its group
    key: SideBasis
    value: SideBasis
    layer: LayerIndex  # of the model
    index: LayerIndex  # among the layers of its group
    spec: CacheSpec  # of the layer
    sinks: Float[Array, " N"] | None = None  # logits of its query heads beside those of tokens

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        return self.key.codec(self.layer), self.value.codec(self.layer)

    @property
    def window_codecs(self) -> tuple[Codec, Codec]:
        key, value = map(window_codec, self.spec.window_sides)
        return key, value

    def exact_tokens(
        self, plan: GroupPlan
    ) -> tuple[Float[Array, "B W K H"], Float[Array, "B W K C"]] | None:
        """Keys and values in the windows that a step reads; None without windows."""
        pages, codecs = self.storage.exact, self.window_codecs
        if pages is None or plan.exact is None:
            return None
        at = self.index, plan.exact.table
        return read_pages(pages.key, codecs[0], *at), read_pages(pages.value, codecs[1], *at)

    def sink_parts(
        self, q: Float[Array, "*rows N H"]
    ) -> list[tuple[Float[Array, "*rows N H"], Float[Array, "*rows N"]]]:
        """What the sinks add to partial results of attention: one more, or nothing."""
        if self.sinks is None:
            return []
        zero = self.value.zero
        value = jnp.zeros((1, q.shape[-1])) if zero is None else zero[self.layer]
        return [sink_part(self.sinks, value, q.shape[:-2])]

    def queries(self, q: Float[Array, "B T N H"]) -> Queries:
        """As they meet the layer."""
        rotated = self.key.rotate_queries(q, self.layer)
        return Queries(rotated, self.key.mean_queries(q, self.layer))

    def page_means(self, queries: Queries, plan: GroupPlan) -> PageMeans | None:
        """q . mean of every page; None without a mean."""
        if queries.means is None or plan.page_angles is None:
            return None
        return PageMeans(queries.means, plan.page_angles.turns, self.spec)
