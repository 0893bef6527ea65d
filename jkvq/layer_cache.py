"""One layer of the cache, with the basis in which it stores."""

import dataclasses
from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from jkvq.basis import Basis, SideBasis
from jkvq.cache import KVCache, Stack, home
from jkvq.pallas_kernels.codecs import Codec
from jkvq.spec import CacheSpec
from jkvq.window import held_positions, read_window, window_table


@dataclass(frozen=True)
class LayerCache:
    """A view of one layer; changes give a new cache."""

    cache: KVCache
    basis: Basis
    layer: int

    @property
    def spec(self) -> CacheSpec:
        return self.cache.spec.of_layer(self.layer)

    @property
    def stack(self) -> Stack:
        return self.cache.stacks[home(self.cache.spec, self.layer).stack]

    @property
    def index(self) -> int:
        """Of the layer in its stack."""
        return home(self.cache.spec, self.layer).layer

    @property
    def key(self) -> SideBasis:
        return self.basis.layer(self.layer)[0]

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        key, value = self.basis.layer(self.layer)
        return key.codec(self.layer), value.codec(self.layer)

    def with_stack(self, stack: Stack) -> KVCache:
        stacks = list(self.cache.stacks)
        stacks[home(self.cache.spec, self.layer).stack] = stack
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
