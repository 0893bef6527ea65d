"""Attention written out in float64 numpy: the independent side of the comparisons."""

import numpy as np


def dense_attention(q, k, v, visible, scale):
    """q [T, N, H] over k, v [S, K, H] where visible [T, S]; (out [T, N, H], lse [T, N])."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for t in range(q.shape[0]):
        seen = np.flatnonzero(visible[t])
        if len(seen) == 0:
            continue
        for n in range(q.shape[1]):
            scores = scale * k[seen, n // groups] @ q[t, n]
            weights = np.exp(scores - scores.max())
            out[t, n] = weights @ v[seen, n // groups] / weights.sum()
            lse[t, n] = scores.max() + np.log(weights.sum())
    return out, lse
