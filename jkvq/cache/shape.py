"""What a model asks of its cache, whatever the spec."""

from typing import NamedTuple, Protocol


class Architecture(Protocol):
    """What a cache asks of a model's configuration."""

    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def latent_width(self) -> int | None: ...


class CacheShape(NamedTuple):
    """Layers, KV heads and channels per head; and what each layer sees.

    windows: how many of the latest tokens each layer sees, None where it sees all; nothing where
        all layers do.
    latent: channels of values, if these are latents that keys are made of too; None where values
        have those of a head.
    """

    layers: int  # L
    kv_heads: int  # K
    head_dim: int  # H
    windows: tuple[int | None, ...] = ()
    latent: int | None = None

    @classmethod
    def of(cls, config: Architecture) -> "CacheShape":
        """That of a model."""
        sizes = config.layers, config.kv_heads, config.head_dim
        return cls(*sizes, config.windows, config.latent_width)

    @property
    def value_dim(self) -> int:
        return self.latent or self.head_dim

    @property
    def window(self) -> int | None:
        """The tokens that local layers see, the most where they differ; None without such."""
        return max((window for window in self.windows if window is not None), default=None)

    @property
    def elements_per_token(self) -> int:
        return self.layers * self.kv_heads * (self.head_dim + self.value_dim)
