"""Pinned: a fixed set of experts stays; the others come and go among themselves."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sluice.experts.policies.base import Evictable, Policy
from sluice.experts.policies.lru import LRU
from sluice.types import ExpertKey


class Pinned:
    """A fixed set that goes only when nothing else is left; LRU within the set, and `rest` (LRU) has the others.

    An empty set makes it what `rest` is.
    """

    def __init__(self, keys: Collection[ExpertKey], rest: Policy | None = None) -> None:
        self._fixed, self._members = frozenset(keys), LRU()
        self._rest: Policy = LRU() if rest is None else rest

    def _part(self, key: ExpertKey) -> Policy:
        return self._members if key in self._fixed else self._rest

    def tick(self, tick: int) -> None:
        self._rest.tick(tick)

    def admit(self, key: ExpertKey, scan: bool = False) -> None:
        self._part(key).admit(key, scan)

    def touch(self, key: ExpertKey, scan: bool = False) -> None:
        self._part(key).touch(key, scan)

    def evict(self, key: ExpertKey) -> None:
        self._part(key).evict(key)

    def victims(self, n: int, evictable: Evictable, incoming: Sequence[ExpertKey] = ()) -> list[ExpertKey]:
        found = self._rest.victims(n, evictable, incoming)
        return found + self._members.victims(n - len(found), evictable) if len(found) < n else found
