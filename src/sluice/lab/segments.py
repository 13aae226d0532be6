"""Local routing consistency as arXiv:2505.16056 measures it: SRP and SCH. Knows one layer's routes at a time.

Liang et al., "Not All Models Suit Expert Offloading: On Local Routing Consistency of Mixture-of-Expert Models"
(ICLR 2026). The SCH of its first version (May 2025) was another measure: a fixed set for each segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sluice.lab.routes import LayerRows

Array = np.ndarray[Any, Any]

SEGMENTS = (4, 16, 64, 256)  # tokens, for SRP
CACHE_RATIOS = (1, 2, 4)  # cache size ÷ top_k, for SCH
FUTURE = 16  # tokens that SCH's cache looks ahead
_CELLS = 1 << 20  # lanes × experts of SCH that advance together


@dataclass(frozen=True)
class Segments:
    """How often experts were chosen in segments of m tokens, at every position.

    `uses[c]` (c = 0 … m): (segment, expert) pairs with c choices. `n`: segments.
    """

    uses: Array  # [m + 1] int64
    n: int

    def __add__(self, other: Segments) -> Segments:
        return Segments(self.uses + other.uses, self.n + other.n)


def segments(rows: LayerRows, m: int) -> Segments:
    """Of one layer, over all segments of `m` consecutive tokens of a sequence."""
    run = np.repeat(np.arange(len(rows.runs) - 1), np.diff(rows.runs))
    uses, n = np.zeros(m + 1, np.int64), 0
    small = np.uint8 if m < 256 else np.uint16 if m < 1 << 16 else np.int64
    for first, cells in rows.chunks(overlap=m - 1):
        end = first + len(cells)
        whole = run[first : end - m + 1] == run[first + m - 1 : end]
        total = np.zeros((len(cells) + 1, cells.shape[1]), small)
        np.cumsum(cells, axis=0, dtype=small, out=total[1:])
        found = total[m:] - total[:-m]  # right, though sums wrap around: it is at most m
        uses += _histogram(found if whole.all() else found[whole], m)
        n += int(whole.sum())
    return Segments(uses, n)


def _histogram(values: Array, top: int) -> Array:
    """[top + 1]: how often 0 … top occur. Two bytes are counted at once, which halves the time."""
    if values.dtype != np.uint8 or values.size % 2:
        return np.bincount(values.ravel(), minlength=top + 1)
    pairs = np.bincount(values.ravel().view(np.uint16), minlength=1 << 16).reshape(256, 256)
    return (pairs.sum(axis=0) + pairs.sum(axis=1))[: top + 1]


def srp(found: Segments) -> tuple[float, float]:
    """(SRP, ρ̂) of a group of experts, equation 6 there; NaN where there is no segment.

    SRP: the best F1 that a router can reach which decides for a whole segment which experts are active. The best one
    takes every expert that is chosen at least α times in the segment, for the best α. ρ̂: how many experts that takes,
    as a multiple of what the real router chooses for one token.
    """
    m = len(found.uses) - 1
    chosen = np.arange(m + 1) * found.uses
    if not chosen.any():
        return np.nan, np.nan
    active = np.cumsum(found.uses[::-1])[::-1][1:]  # (segment, expert) pairs with at least α = 1 … m choices
    true = np.cumsum(chosen[::-1])[::-1][1:]
    f1 = 2 * true / (m * active + chosen.sum())
    best = int(np.argmax(f1))
    return float(f1[best]), float(active[best] / (chosen.sum() / m))


class _Lanes(NamedTuple):
    """Runs of consecutive tokens, longest first: [lanes] first row and length of each, in `experts` [rows, width]."""

    experts: Array
    start: Array
    length: Array


def sch(rows: LayerRows, ratios: Sequence[int], top_k: int, future: int = FUTURE) -> Array:
    """[ratios] Segment cache best hit rate of one layer with room for ratio × `top_k` experts.

    The cache loads what a token chose and evicts, of the others, those that the next `future` tokens choose least, of
    these the least recently used. Each sequence begins with an empty cache; as in the authors' code, loading into a
    slot that is still free is no miss.
    """
    lengths = np.diff(rows.runs)
    order = np.argsort(-lengths, kind="stable")
    lanes = _Lanes(rows.experts, rows.runs[:-1][order], lengths[order])
    n_together = max(1, _CELLS // rows.n_expert)
    rates = []
    for ratio in ratios:
        room = max(ratio * top_k, rows.experts.shape[1])
        misses = 0
        if room < rows.n_expert:
            for first in range(0, len(order), n_together):
                part = slice(first, first + n_together)
                group = _Lanes(rows.experts, lanes.start[part], lanes.length[part])
                misses += _evictions(group, rows.n_expert, room, future)
        rates.append(1 - misses / float(rows.lengths.sum()))
    return np.array(rates)


def _evictions(lanes: _Lanes, n_expert: int, room: int, future: int) -> int:
    """Experts that had to be evicted, all lanes together; they advance side by side, a token a turn."""
    n, longest = len(lanes.start), int(lanes.length[0])
    coming = np.zeros((n, n_expert + 1), np.int64)  # choices in the next `future` tokens; the last column is filling
    used = np.zeros((n, n_expert + 1), np.int64)  # 1 + turn of the last use
    resident = np.zeros((n, n_expert + 1), np.bool_)
    lane, ids = np.arange(n)[:, None], np.arange(n_expert)
    for turn in range(min(future, longest)):
        active = _active(lanes, turn)
        coming[lane[:active], lanes.experts[lanes.start[:active] + turn]] += 1
    evicted = 0
    for turn in range(longest):
        active = _active(lanes, turn)
        now = lanes.experts[lanes.start[:active] + turn]
        here = lane[:active]
        coming[here, now] -= 1
        if turn + future < longest:
            later = _active(lanes, turn + future)
            coming[lane[:later], lanes.experts[lanes.start[:later] + turn + future]] += 1
        used[here, now] = turn + 1
        resident[here, now] = True
        held = resident[:active, :-1]
        excess = np.maximum(held.sum(axis=1) - room, 0)
        if excess.any():
            evicted += int(excess.sum())
            worth = (coming[:active, :-1] * (longest + 2) + used[:active, :-1]) * n_expert + ids  # no two are equal
            worth[~held] = -1
            worth[used[:active, :-1] == turn + 1] = np.iinfo(np.int64).max  # what this token chose stays
            least = np.partition(worth, n_expert - room, axis=1)[:, n_expert - room, None]
            resident[:active, :-1] = held & (worth >= least)
    return evicted


def _active(lanes: _Lanes, turn: int) -> int:
    """Lanes longer than `turn`: the first so many."""
    return int(np.searchsorted(-lanes.length, -turn, side="left"))
