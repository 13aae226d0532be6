"""Belady's MIN: the expert whose next use is farthest goes first. It needs the future: only simulations have it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from heapq import heappop
from math import inf

from sluice.experts.policies.ranked import Ranked
from sluice.types import ExpertKey


class Belady(Ranked):
    """The bound that no policy's hit rate exceeds on a sequence of acquires that fit (Belady 1966, Mattson 1970).

    `future` is every demand of the run in order. Memory: 8 bytes a demand, and what the experts in slots take.
    """

    def __init__(self, future: Iterable[ExpertKey]) -> None:
        super().__init__()
        self._uses: dict[ExpertKey, array[int]] = {}  # positions of each expert's demands to come, the next one last
        uses = self._uses
        for position, key in enumerate(future):
            if key in uses:
                uses[key].append(position)
            else:
                uses[key] = array("q", (position,))
        for positions in uses.values():
            positions.reverse()

    def use_after_next(self, key: ExpertKey) -> float:
        """The position of the demand of `key` that follows its next one; infinite if there is none."""
        uses = self._uses.get(key)
        return uses[-2] if uses is not None and len(uses) > 1 else inf

    def farthest(self) -> float:
        """The farthest of the next uses of the experts that own a slot."""
        while self._item.get(self._heap[0][2]) is not self._heap[0]:
            heappop(self._heap)
        return -self._heap[0][0]

    def skip(self, key: ExpertKey) -> None:
        """The next demand of `key`, which owns no slot, passes without giving it one."""
        self._uses[key].pop()

    def _next(self, key: ExpertKey) -> float:
        uses = self._uses.get(key)
        return -uses[-1] if uses else -inf

    def admit(self, key: ExpertKey, scan: bool = False) -> None:
        self._rank[key] = (self._next(key), 0)
        self._push(key)

    def touch(self, key: ExpertKey, scan: bool = False) -> None:
        uses = self._uses.get(key)
        if uses:
            uses.pop()
        self._rank[key] = (self._next(key), 0)
        self._push(key)  # its rank has fallen: an item that lags behind would come up too late
