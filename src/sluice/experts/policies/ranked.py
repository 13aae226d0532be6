"""The mechanism of policies that evict the lowest rank first: a heap that is put right only where it is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from sluice.experts.policies.base import Evictable
from sluice.types import ExpertKey

LEFTOVERS = 4  # items of the heap to one that is live, beyond which it is built anew


class Ranked:
    """Base of policies that evict the lowest rank first.

    A lazy heap: each expert in a slot has one live item, which may lag behind a rank that has risen, and is put right
    when it comes up; when a rank falls, `_push` it. Touching is O(1) without a push, a victim O(log n) plus what is
    passed over because it isn't evictable.
    """

    def __init__(self) -> None:
        self._rank: dict[ExpertKey, tuple[float, int]] = {}  # experts that own a slot
        self._heap: list[tuple[float, int, ExpertKey]] = []
        self._item: dict[ExpertKey, tuple[float, int, ExpertKey]] = {}  # the live item of each; others are leftovers

    def tick(self, tick: int) -> None:
        pass

    def evict(self, key: ExpertKey) -> None:
        del self._rank[key]
        self._item.pop(key, None)

    def _push(self, key: ExpertKey) -> None:
        first, second = self._rank[key]
        item = self._item[key] = (first, second, key)
        heappush(self._heap, item)
        if len(self._heap) > LEFTOVERS * len(self._item) + 64:
            self._heap = list(self._item.values())
            heapify(self._heap)

    def victims(self, n: int, evictable: Evictable, incoming: Sequence[ExpertKey] = ()) -> list[ExpertKey]:
        found: list[ExpertKey] = []
        passed: list[ExpertKey] = []
        heap, live, rank = self._heap, self._item, self._rank
        while heap and len(found) < n:
            item = heappop(heap)
            key = item[2]
            if live.get(key) is not item:
                continue
            first, second = rank[key]
            if first != item[0] or second != item[1]:
                live[key] = item = (first, second, key)
                heappush(heap, item)
            elif evictable(key):
                del live[key]
                found.append(key)
            else:
                passed.append(key)
        for key in passed:
            self._push(key)
        return found
