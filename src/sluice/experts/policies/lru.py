"""LRU: the least recently used expert goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from sluice.experts.policies.base import Evictable
from sluice.types import ExpertKey


class LRU:
    """Least recently used first; of what only scans have touched, the newest first, before all else.

    Scans sweep the layers in a cycle longer than the cache, where evicting the newest is what keeps any of it. Without
    scans it is a stack algorithm (Mattson et al. 1970) as long as every acquire fits: what a smaller cache holds, a
    larger one holds too.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()  # next victim first

    def tick(self, tick: int) -> None:
        pass

    def admit(self, key: ExpertKey, scan: bool = False) -> None:
        self._order[key] = None
        if scan:
            self._order.move_to_end(key, last=False)

    def touch(self, key: ExpertKey, scan: bool = False) -> None:
        if not scan:
            self._order.move_to_end(key)

    def evict(self, key: ExpertKey) -> None:
        del self._order[key]

    def victims(self, n: int, evictable: Evictable, incoming: Sequence[ExpertKey] = ()) -> list[ExpertKey]:
        found: list[ExpertKey] = []
        for key in self._order:
            if evictable(key):
                found.append(key)
                if len(found) == n:
                    break
        return found
