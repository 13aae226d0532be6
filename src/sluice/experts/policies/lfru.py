"""LFRU: frequency and recency in one figure, the sum of an expert's uses, each worth less the longer it is ago."""

from __future__ import annotations

from math import inf, log2

from sluice.experts.policies.ranked import Ranked
from sluice.types import ExpertKey

HALF_LIFE = 2.0  # steps; on synthetic traces of one stream, the longest that is nowhere worse than LRU


class LFRU(Ranked):
    """The lowest combined recency and frequency goes first: LRFU of Lee et al. 2001 (IEEE Trans. Computers 50, 12).

    A use x steps ago counts (1/2)^(x / HALF_LIFE); a half-life of 0 would be LRU, an endless one LFU without aging.
    Unlike the original, what was counted outlives an eviction: there are only so many experts. All sums fade alike,
    so what is kept is their logarithm at time 0, which changes only when its expert is used. What only scans have
    touched ranks below everything, the newest lowest.
    """

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self._n_layers = n_layers
        self._now = 0.0  # half-lives
        self._clock = 0
        self._sum: dict[ExpertKey, float] = {}  # log2 of each expert's sum, as if it had faded backwards to time 0

    def tick(self, tick: int) -> None:
        self._now = tick / (self._n_layers * HALF_LIFE)

    def admit(self, key: ExpertKey, scan: bool = False) -> None:
        self._clock += 1
        self._rank[key] = (-inf, -self._clock) if scan else (self._sum.get(key, -inf), self._clock)
        self._push(key)

    def touch(self, key: ExpertKey, scan: bool = False) -> None:
        if not scan:
            now = self._now
            before = self._sum.get(key, -inf)
            after = self._sum[key] = now + log2(1 + 2 ** (before - now))  # of 2^before + 2^now
            self._clock += 1
            self._rank[key] = (after, self._clock)
