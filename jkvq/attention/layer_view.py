"""One layer of the cache, with the basis in which it stores."""

import dataclasses
from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float

from jkvq.attention.page_means import MeanScores
from jkvq.attention.step_plan import GroupPlan
from jkvq.cache.basis import Basis, SideBasis
from jkvq.cache.layout import KVCache, LayerGroup, place_of
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.windows import read_window
from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.packed import LayerIndex


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerView:
    """A view of one layer; changes give a new cache.

    Its layer is a number like any other: what takes a view is traced once for all layers of a spec.
    """

    cache: KVCache
    key: SideBasis
    value: SideBasis
    layer: LayerIndex  # of the model
    index: LayerIndex  # among the layers of its group
    spec: CacheSpec = field(metadata={"static": True})  # of the layer
    group: int = field(metadata={"static": True})

    @classmethod
    def of(cls, cache: KVCache, basis: Basis, layer: int) -> "LayerView":
        """The view of a layer of the model."""
        place = place_of(cache.spec, cache.layers, layer)
        spec = cache.spec.of_layer(layer)
        return cls(cache, *basis.layer(layer), layer, place.layer, spec, place.group)

    @property
    def storage(self) -> LayerGroup:
        return self.cache.groups[self.group]

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        return self.key.codec(self.layer), self.value.codec(self.layer)

    def with_storage(self, storage: LayerGroup) -> KVCache:
        groups = list(self.cache.groups)
        groups[self.group] = storage
        return dataclasses.replace(self.cache, groups=tuple(groups))

    def window_tokens(
        self, plan: GroupPlan
    ) -> tuple[Float[Array, "B W K H"], Float[Array, "B W K H"]] | None:
        """Keys and values in all slots of the windows; None without windows."""
        windows = self.storage.windows
        if windows is None or plan.windows is None:
            return None
        key, value = (
            read_window(x, self.index, plan.windows.table) for x in (windows.key, windows.value)
        )
        return key, value

    def mean_scores(self, q: Float[Array, "B T N H"], plan: GroupPlan) -> MeanScores | None:
        """q . mean of every page, of queries as they come; None without a mean."""
        if plan.page_angles is None:
            return None
        scores = self.key.mean_scores(q, self.layer, plan.page_angles)
        return MeanScores(scores, self.spec, self.cache.block_table.shape[1])
