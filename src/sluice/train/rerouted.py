"""The routes that cache-aware rerouting takes of a batch of texts, each with a cache of its own. Knows no model.

The rule is `experts.rerouting.reroute`'s, worked out for all texts of a batch at once, token after token, as what a
token takes decides what the next one finds. The cache is an LRU of a layer's own, as `losses.locality.held_before` has
it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def rerouted(ids: Array, scores: Array, slots: int, margin: float, keep: int = 1) -> Array:
    """The final ids [B, T, k] of `ids`, a router's choice, best first.

    `scores` [B, T, E] are in the margin's unit. Of a token's experts past the first `keep`, one without a slot gives
    way to the best that has one and was not chosen, if its score is at most `margin` below.
    """
    B, T, k = ids.shape
    n_expert = scores.shape[-1]
    rows = np.arange(B)
    used_at = np.full((B, n_expert), -1)  # when each was last taken
    final = ids.copy()
    for t in range(T):
        oldest = -np.partition(-used_at, min(slots, n_expert) - 1, axis=1)[:, min(slots, n_expert) - 1]
        held = used_at >= np.maximum(oldest, 0)[:, None]
        spare = np.where(held, scores[:, t], -np.inf)
        np.put_along_axis(spare, ids[:, t], -np.inf, axis=1)
        for rank in range(keep, k):
            own, best = ids[:, t, rank], spare.argmax(1)
            moved = ~held[rows, own] & (scores[rows, t, own] - spare[rows, best] <= margin)
            final[moved, t, rank] = best[moved]
            spare[rows[moved], best[moved]] = -np.inf
        for rank in range(k - 1, -1, -1):
            used_at[rows, final[:, t, rank]] = t * k + k - 1 - rank
    return final
