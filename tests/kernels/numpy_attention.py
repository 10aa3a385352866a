"""Cache attention in float64 NumPy, one query and one head at a time: what every implementation must give."""

from __future__ import annotations

import numpy as np


def numpy_attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    positions: np.ndarray,
    stride: int = 1,
    offset: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """q [B, T, K, G, H], keys and values [B, K, S, H] of one layer, positions [B, T].

    Returns:
        The attention output [B, T, K, G, H] (0 where a query sees nothing) and log(sum(exp(scores)))
        [B, T, K, G] (-inf there).
    """
    B, T, K, G, H = q.shape
    out, log_sum = np.zeros(q.shape), np.full((B, T, K, G), -np.inf)
    slots = np.arange(keys.shape[2]) * stride + offset
    for b in range(B):
        for t in range(T):
            seen = slots <= positions[b, t]
            if not seen.any():
                continue
            for k in range(K):
                own_keys, own_values = (x[b, k, seen].astype(np.float64) for x in (keys, values))
                for g in range(G):
                    scores = own_keys @ q[b, t, k, g].astype(np.float64) / np.sqrt(H)
                    weights = np.exp(scores - scores.max())
                    out[b, t, k, g] = weights @ own_values / weights.sum()
                    log_sum[b, t, k, g] = scores.max() + np.log(weights.sum())
    return out, log_sum
