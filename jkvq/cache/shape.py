"""What a model asks of its cache, whatever the spec."""

from typing import NamedTuple


class CacheShape(NamedTuple):
    """Layers, KV heads and channels per head."""

    layers: int  # L
    kv_heads: int  # K
    head_dim: int  # H

    @property
    def elements_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim
