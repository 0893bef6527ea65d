"""The order of a head's channels: rotary pairs as halves, whatever order a checkpoint has.

The decoder turns channels i and i + H/2 together. Some checkpoints have the two of a pair side by
side, and some turn the first channels of a head only. Scores are the same in any order that queries
and keys have in common, so that loading puts the channels where the decoder wants them; pairs that
do not turn come behind those that do.
"""

import functools

import numpy as np
from jaxtyping import Int

from jkvq.models.config import ModelConfig

Path = tuple[str | int, ...]  # of a parameter


def in_decoder_order(
    config: ModelConfig, path: Path, tensor: np.ndarray, *, interleaved: bool
) -> np.ndarray:
    """A parameter with its rows as the decoder has them."""
    if len(path) < 2 or path[-3:-2] != ("attention",):
        return tensor
    name, find = str(path[-2]), _row_order if config.latent is None else _latent_rows
    rows = find(config, name, interleaved)
    return tensor if rows is None else tensor[rows]


_ROWS = ("qkv", "q_norm", "k_norm")


def _latent_rows(config: ModelConfig, name: str, interleaved: bool) -> np.ndarray | None:
    """The same for MLA: the rotary channels stand behind the others of a head, or of the latent."""
    latent = config.latent
    assert latent is not None
    before, heads = {
        "q": (latent.key, config.heads),
        "q_b": (latent.key, config.heads),
        "kv_a": (latent.width, 1),
    }.get(name, (0, 0))
    order = _channel_order(config.head_dim, 2 * len(config.rope_divisors), interleaved)
    head = np.concatenate([np.arange(before), before + order])
    return np.concatenate([n * len(head) + head for n in range(heads)]) if heads else None


@functools.lru_cache(maxsize=64)
def _row_order(config: ModelConfig, name: str, interleaved: bool) -> np.ndarray | None:
    """Which row of the checkpoint each of the decoder's is; None where all are in their places."""
    order = _channel_order(config.head_dim, 2 * len(config.rope_divisors), interleaved)
    if name not in _ROWS or (order == np.arange(config.head_dim)).all():
        return None
    N, K = config.heads, config.kv_heads
    turning, standing = {
        "qkv": (N + K, K),
        "q_norm": (N if config.qk_norm_whole else 1, 0),
        "k_norm": (K if config.qk_norm_whole else 1, 0),
    }[name]
    plain = np.arange(config.head_dim)
    heads = [order] * turning + [plain] * standing
    return np.concatenate([head * len(plain) + own for head, own in enumerate(heads)])


def _channel_order(head_dim: int, rotary: int, interleaved: bool) -> Int[np.ndarray, " H"]:
    turning, rest = np.arange(rotary), np.arange(rotary, head_dim)
    first, second = turning.reshape(-1, 2).T if interleaved else turning.reshape(2, -1)
    return np.concatenate([first, rest[: len(rest) // 2], second, rest[len(rest) // 2 :]])
