"""What an eviction policy is: it ranks the experts that own a slot, and knows neither slots nor pins nor reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sluice.types import ExpertKey

Evictable = Callable[[ExpertKey], bool]


class Policy(Protocol):
    """What the cache tells a policy, and the one thing it asks. All deterministic.

    Of an acquire a policy hears `tick`, then `victims` if room is needed, `admit` for each expert that is absent, and
    at last `touch` for every expert demanded, in the order of the keys.

    `scan` marks a sweep over a layer (a prefill wave): what it admits is colder than anything else, and the first to
    go when the sweep itself needs room.
    """

    def tick(self, tick: int) -> None:
        """An acquire at `tick` (steps × layers + layer) begins."""
        ...

    def admit(self, key: ExpertKey, scan: bool = False) -> None:
        """A read of `key` was issued: it owns a slot from now on."""
        ...

    def touch(self, key: ExpertKey, scan: bool = False) -> None:
        """A router chose `key`, which owns a slot."""
        ...

    def evict(self, key: ExpertKey) -> None:
        """`key` lost its slot, as a victim or otherwise."""
        ...

    def victims(self, n: int, evictable: Evictable, incoming: Sequence[ExpertKey] = ()) -> list[ExpertKey]:
        """The `n` evictable experts to lose first, fewer if there are no more. The caller evicts all of them.

        `incoming` are the absent experts for whom room is made, of which the last `n` find no free slot.
        """
        ...


class ColdFirst:
    """Base of policies whose queues hold only what a router chose or a predictor named.

    What only scans have touched lies apart from them, and goes first, the newest before the older; the first touch
    that is no scan's brings it in like a newcomer.
    """

    def __init__(self) -> None:
        self._cold: dict[ExpertKey, None] = {}  # in the order of admission

    def tick(self, tick: int) -> None:
        pass

    def admit(self, key: ExpertKey, scan: bool = False) -> None:
        if scan:
            self._cold[key] = None
        else:
            self._enter(key)

    def touch(self, key: ExpertKey, scan: bool = False) -> None:
        if scan:
            return
        if key in self._cold:
            del self._cold[key]
            self._enter(key)
        self._use(key)

    def evict(self, key: ExpertKey) -> None:
        if key in self._cold:
            del self._cold[key]
        else:
            self._leave(key)

    def victims(self, n: int, evictable: Evictable, incoming: Sequence[ExpertKey] = ()) -> list[ExpertKey]:
        found: list[ExpertKey] = []
        for key in reversed(self._cold):
            if len(found) == n:
                break
            if evictable(key):
                found.append(key)
        return found + self._choose(n - len(found), evictable, incoming) if len(found) < n else found

    def _enter(self, key: ExpertKey) -> None:
        """`key` joins the queues, not used yet."""
        raise NotImplementedError

    def _use(self, key: ExpertKey) -> None:
        """A router chose `key`, which is in the queues; the first time since it joined is the use it joined for."""
        raise NotImplementedError

    def _leave(self, key: ExpertKey) -> None:
        """`key` lost its slot: one that `_choose` has named, or one whose read ended without success."""
        raise NotImplementedError

    def _choose(self, n: int, evictable: Evictable, incoming: Sequence[ExpertKey]) -> list[ExpertKey]:
        """`victims` among the queues."""
        raise NotImplementedError
