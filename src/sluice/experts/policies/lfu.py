"""LFU: the least frequently used expert goes first, and old fame fades."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.experts.policies.base import Evictable
from sluice.experts.policies.ranked import Ranked
from sluice.types import ExpertKey


class LFU(Ranked):
    """Least frequently used first, the least recent of equals, with dynamic aging (LFU-DA, Arlitt et al. 2000).

    An expert's rank is its touches since it was admitted plus the rank of the last victim before its newest touch, so
    what was popular long ago is overtaken. What only scans have touched ranks below everything, the newest lowest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._count: dict[ExpertKey, int] = {}
        self._age: float = 0
        self._clock = 0

    def admit(self, key: ExpertKey, scan: bool = False) -> None:
        self._clock += 1
        self._count[key] = 0
        self._rank[key] = (-1, -self._clock) if scan else (self._age, self._clock)
        self._push(key)

    def touch(self, key: ExpertKey, scan: bool = False) -> None:
        if not scan:
            self._clock += 1
            self._count[key] += 1
            self._rank[key] = (self._age + self._count[key], self._clock)

    def evict(self, key: ExpertKey) -> None:
        super().evict(key)
        del self._count[key]

    def victims(self, n: int, evictable: Evictable, incoming: Sequence[ExpertKey] = ()) -> list[ExpertKey]:
        found = super().victims(n, evictable)
        if found:
            self._age = max(self._age, self._rank[found[-1]][0])
        return found
