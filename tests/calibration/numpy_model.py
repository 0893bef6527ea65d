"""The tiny model in plain numpy and float64: its queries, keys, values, scores and outputs."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jkvq.models.config import ModelConfig
from tests import reference
from tests.tiny import CONFIG


class Seen(NamedTuple):
    """Of one layer and one window of T tokens."""

    q: np.ndarray  # [T, N, H]
    k: np.ndarray  # [T, K, H]
    k_before_rope: np.ndarray
    v: np.ndarray
    S: np.ndarray  # [N, T, T]
    out: np.ndarray  # [T, N, H]


def layers_of(params, tokens: list[int]) -> list[Seen]:
    """What every layer computes on one sequence."""
    weights: Any = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    T, H, G = len(tokens), CONFIG.head_dim, CONFIG.heads // CONFIG.kv_heads

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * weight

    x, seen = weights["embedding"][tokens], []
    for index in range(CONFIG.layers):
        layer = weights["layers"][index]
        attention, mlp = layer["attention"], layer["mlp"]
        h = norm(x, layer["attention_norm"]["weight"])
        heads = (h @ attention["qkv"]["weight"].T).reshape(T, -1, H)
        q, k, v = np.split(heads, [CONFIG.heads, CONFIG.heads + CONFIG.kv_heads], axis=1)
        q = rope(norm(q, attention["q_norm"]["weight"]), np.arange(T))
        before = norm(k, attention["k_norm"]["weight"])
        k = rope(before, np.arange(T))
        S = np.zeros((CONFIG.heads, T, T))
        for n, t in np.ndindex(CONFIG.heads, T):
            e = np.exp(k[: t + 1, n // G] @ q[t, n] / np.sqrt(H))
            S[n, t, : t + 1] = e / e.sum()
        out = np.stack([S[n] @ v[:, n // G] for n in range(CONFIG.heads)], axis=1)
        seen.append(Seen(q, k, before, v, S, out))
        x = x + out.reshape(T, -1) @ attention["o"]["weight"].T
        h = norm(x, layer["mlp_norm"]["weight"])
        gate, up = np.split(h @ mlp["gate_up"]["weight"].T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ mlp["down"]["weight"].T
    return seen


def rope(x: np.ndarray, position: np.ndarray, config: ModelConfig = CONFIG) -> np.ndarray:
    """x [T, N, H] turned by these positions."""
    H = x.shape[-1]
    return reference.rope(x, position, config.rope_theta ** -(np.arange(0, H, 2) / H))


def stands(index: int, width: int, context: int, sink: int = 64) -> np.ndarray:
    """Where the tokens of a window stand: the sink at the beginning, and the rest over the context.

    By multiples of the golden ratio without their whole parts, counted from the text's first token.
    """
    golden = (np.sqrt(5) - 1) / 2
    found = []
    for position in range(width):
        part = np.modf((index * width + position) * golden)[0]
        found.append(position if position < sink else sink + int(part * max(context - sink, 0)))
    return np.array(found)


def middles(
    tokens: int,
    window: int,
    index: int,
    config: ModelConfig = CONFIG,
    *,
    sink: int = 64,
    page: int = 64,
) -> np.ndarray:
    """The middle of the page, behind the sink, in which each token stands."""
    behind = stands(index, window, config.context, sink)[:tokens] - sink
    return sink + behind // page * page + page // 2


def about(
    x: np.ndarray, weight: np.ndarray, middle: np.ndarray, config: ModelConfig = CONFIG
) -> tuple[np.ndarray, np.ndarray]:
    """(mean, x without it) of [T, H], with the mean in the middle of each token's page."""
    mean = weight @ rope(x[:, None], -middle, config)[:, 0] / weight.sum()
    return mean, x - rope(np.broadcast_to(mean, x.shape)[:, None], middle, config)[:, 0]


def moved(
    x: np.ndarray, window: int, index: int, config: ModelConfig = CONFIG, *, sink: int = 64
) -> np.ndarray:
    """Queries or keys [T, N, H] of a window's tokens, where these stand in the context."""
    stand = stands(index, window, config.context, sink)[: len(x)]
    return rope(x, stand - np.arange(len(x)), config)
