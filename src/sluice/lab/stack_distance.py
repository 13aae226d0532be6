"""LRU at every number of slots from one pass over a trace, by stack distances. Knows no cache.

LRU is a stack algorithm (Mattson et al. 1970): with one slot more it holds what it held and one expert more. So an
expert that is demanded when it is the d-th in the order of recency (0: the newest) hits with more than d slots and
misses with d or fewer. The experts of one execution of a layer are demanded together, so what counts is the order
before any of them is used; then they are used in ascending order.

d is the number of other experts demanded since the expert's own last use and before this execution. With prev[j] the
place of the demand before j that named the same expert, that is the number of places between the two, less those j
among them with prev[j] beyond the expert's own last use, which repeat an expert. Counting the latter for all demands at
once is a wavelet matrix's work (Claude & Navarro 2012): one pass over the demands for each bit of a place.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from sluice.lab.replay import Demands

Array = np.ndarray[Any, Any]

_QUERIES = 1 << 20  # answered at once


class LruStack:
    """Stack distances of a trace's demands, `distances` [n_demands] int32, and what follows from them.

    As the cache itself does it where it `covers`: no execution is a sweep (Execution.scan), and each one's demand fits.
    Otherwise it is LRU that takes any demand in one piece and sweeps like the rest: more misses than the engine's with
    sweeps, and with fewer slots than a demand not its waves.
    """

    def __init__(self, demands: Demands) -> None:
        self._demands = demands
        self.never = len(demands.experts)  # the distance of a first demand: more than any other
        self.exact = not bool(demands.scan.any())  # wherever each demand fits
        self.distances = stack_distances(demands.ids, demands.offsets, self.never)

    @staticmethod
    def covers(demands: Demands, n_slots: int) -> bool:
        """Whether a pass gives exactly what a cache of `n_slots` slots comes to."""
        return not demands.scan.any() and n_slots >= int(demands.counts.max(initial=1))

    def misses(self, n_slots: int) -> Array:
        """[executions] int32: misses of each with `n_slots` slots."""
        missed = (self.distances >= min(n_slots, self.never)).astype(np.int32)
        return np.add.reduceat(missed, self._demands.offsets[:-1], dtype=np.int32)

    @cached_property
    def hits(self) -> Array:
        """[1 + experts demanded] int64: hits with 0, 1, … slots. More slots than experts hit no more."""
        return np.concatenate([[0], np.cumsum(np.bincount(self.distances, minlength=self.never + 1)[:-1])])


def stack_distances(ids: Array, offsets: Array, never: int) -> Array:
    """[n] int32: the place of each demand in the order of recency before its group, `never` if it isn't in it.

    `ids` [n] non-negative; `offsets` [groups + 1]: where groups of distinct ids begin, and the end.
    """
    before = _previous(ids)
    start = np.repeat(offsets[:-1], np.diff(offsets)).astype(np.int32)  # of each demand's group
    # places after the expert's last use, of which those go that only repeat a place among them
    distances = start - before - 1 - _count_above(before, start, before)
    distances[before < 0] = never
    return distances


def _previous(ids: Array) -> Array:
    """[n] int32: the place of the demand before each that has its id, -1 if there is none."""
    order = np.argsort(ids, kind="stable").astype(np.int32)
    before = np.full(len(ids), -1, np.int32)
    same = ids[order[1:]] == ids[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    return before


def _count_above(values: Array, ends: Array, thresholds: Array) -> Array:
    """[queries] int32: how many of values[:end] exceed the threshold, for each end and threshold. All are ≥ -1.

    A wavelet matrix, whose levels are made and forgotten one after the other: on each, what lies in a query's range and
    shares the threshold's higher bits is split by the next bit. Where the threshold has a 0, the ones exceed it.
    """
    n = len(values)
    low, high = np.zeros(len(ends), np.int32), ends.copy()
    count = np.zeros(len(ends), np.int32)
    values = values + 1  # from 0
    for bit in range(n.bit_length() - 1, -1, -1):
        ones = (values >> bit & 1).astype(np.bool_)
        zeros_before = np.zeros(n + 1, np.int32)
        np.cumsum(~ones, dtype=np.int32, out=zeros_before[1:])
        n_zeros = int(zeros_before[n])
        for first in range(0, len(ends), _QUERIES):
            part = slice(first, first + _QUERIES)
            zero = (thresholds[part] + 1 >> bit & 1) == 0
            lo, hi = low[part], high[part]
            lo_zeros, hi_zeros = zeros_before[lo], zeros_before[hi]
            count[part] += np.where(zero, (hi - lo) - (hi_zeros - lo_zeros), 0)
            low[part] = np.where(zero, lo_zeros, lo - lo_zeros + n_zeros)
            high[part] = np.where(zero, hi_zeros, hi - hi_zeros + n_zeros)
        values = np.concatenate([values[~ones], values[ones]])
    return count
