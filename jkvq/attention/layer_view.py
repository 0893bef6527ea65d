"""One layer of the cache, with the basis in which it stores."""

import dataclasses
from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float, Int

from jkvq.cache.basis import Basis, SideBasis
from jkvq.cache.layout import KVCache, Stack, home
from jkvq.cache.spec import CacheSpec
from jkvq.cache.windows import held_positions, read_window, window_table
from jkvq.pallas_kernels.formats.codecs import Codec
from jkvq.pallas_kernels.formats.packed import LayerIndex


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """A view of one layer; changes give a new cache.

    Its layer is a number like any other: what takes a view is traced once for all layers of a spec.
    """

    cache: KVCache
    key: SideBasis
    value: SideBasis
    layer: LayerIndex  # of the model
    index: LayerIndex  # of the stack
    spec: CacheSpec = field(metadata={"static": True})
    home: int = field(metadata={"static": True})  # which stack

    @classmethod
    def of(cls, cache: KVCache, basis: Basis, layer: int) -> "LayerCache":
        """The view of a layer of the model."""
        at = home(cache.spec, layer)
        spec = cache.spec.of_layer(layer)
        return cls(cache, *basis.layer(layer), layer, at.layer, spec, at.stack)

    @property
    def stack(self) -> Stack:
        return self.cache.stacks[self.home]

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        return self.key.codec(self.layer), self.value.codec(self.layer)

    def with_stack(self, stack: Stack) -> KVCache:
        stacks = list(self.cache.stacks)
        stacks[self.home] = stack
        return dataclasses.replace(self.cache, stacks=tuple(stacks))

    def exact_tokens(self) -> tuple[Float[Array, "B W K H"], Float[Array, "B W K H"]] | None:
        """Keys and values in all slots of the windows; None without windows."""
        windows = self.stack.windows
        if windows is None:
            return None
        table = window_table(self.spec, self.cache.row)
        return (
            read_window(windows.key, self.index, table),
            read_window(windows.value, self.index, table),
        )

    def exact_positions(self) -> Int[Array, "B W"]:
        """Of the tokens in the windows' slots; negative where there is none."""
        return held_positions(self.spec, self.cache.length)
