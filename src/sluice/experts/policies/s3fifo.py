"""S3-FIFO: three queues; an expert must be used again while in the small one to get into the main one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from sluice.experts.policies.base import ColdFirst, Evictable
from sluice.types import ExpertKey

SMALL_SHARE = 0.1  # of the slots
MOST_USES = 3  # that are counted
PROMOTING_USES = 2  # after the one it was admitted for


class S3FIFO(ColdFirst):
    """Yang et al. 2023 (SOSP, "FIFO queues are all you need for cache eviction"), with the paper's parameters.

    Newcomers queue in `small`, a tenth of the slots; from its head those used at least twice again move to `main`, the
    others go, and `ghost` remembers as many of them as `main` holds. What comes back while remembered enters `main`
    at once, and so does, until the first eviction, what finds `small` full, as in the authors' own implementation. At
    `main`'s head an expert with uses left goes round again, with one use fewer.
    """

    def __init__(self, n_slots: int) -> None:
        super().__init__()
        self._small: OrderedDict[ExpertKey, int] = OrderedDict()  # uses since the first; the oldest first
        self._main: OrderedDict[ExpertKey, int] = OrderedDict()
        self._ghost: OrderedDict[ExpertKey, None] = OrderedDict()
        self._small_size = max(1, int(n_slots * SMALL_SHARE))
        self._ghost_size = int(n_slots * (1 - SMALL_SHARE))
        self._filling = True  # nothing has gone yet
        self._unused: set[ExpertKey] = set()  # in a queue, waiting for the use that brought them
        self._returning: set[ExpertKey] = set()  # remembered when room was made for them

    def _enter(self, key: ExpertKey) -> None:
        self._unused.add(key)
        if key in self._returning or key in self._ghost:
            self._returning.discard(key)
            self._ghost.pop(key, None)
            self._main[key] = 0
        elif self._filling and len(self._small) >= self._small_size:
            self._main[key] = 0
        else:
            self._small[key] = 0

    def _use(self, key: ExpertKey) -> None:
        if key in self._unused:
            self._unused.remove(key)
            return
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, MOST_USES)

    def _leave(self, key: ExpertKey) -> None:
        self._unused.discard(key)
        if self._small.pop(key, None) is None:  # else: its read failed
            self._main.pop(key, None)

    def _choose(self, n: int, evictable: Evictable, incoming: Sequence[ExpertKey]) -> list[ExpertKey]:
        for key in incoming:  # before the victims push them out of the ghost queue
            if key in self._ghost:
                del self._ghost[key]
                self._returning.add(key)
        newcomers = [key not in self._returning for key in incoming]
        found: list[ExpertKey] = []
        while len(found) < n:
            # those that got room before this one count as if they had joined
            joining = sum(newcomers[: max(0, len(incoming) - n + len(found))])
            small_first = len(self._small) + joining >= self._small_size
            first, second = (self._of_small, self._of_main) if small_first else (self._of_main, self._of_small)
            victim = first(evictable) or second(evictable)
            if victim is None:
                break
            self._filling = False
            found.append(victim)
        return found

    def _of_small(self, evictable: Evictable) -> ExpertKey | None:
        """The next victim of `small`, taken out; what deserves it moves to `main` on the way."""
        passed, victim = [], None
        while self._small and victim is None:
            key, uses = self._small.popitem(last=False)
            if not evictable(key):
                passed.append((key, uses))
            elif uses >= PROMOTING_USES:
                self._main[key] = 0
            else:
                victim = key
                self._ghost[key] = None
                if len(self._ghost) > self._ghost_size:
                    self._ghost.popitem(last=False)
        _put_back(self._small, passed)
        return victim

    def _of_main(self, evictable: Evictable) -> ExpertKey | None:
        """The next victim of `main`, taken out."""
        passed, victim = [], None
        while self._main and victim is None:
            key, uses = self._main.popitem(last=False)
            if not evictable(key):
                passed.append((key, uses))
            elif uses:
                self._main[key] = uses - 1
            else:
                victim = key
        _put_back(self._main, passed)
        return victim


def _put_back(queue: OrderedDict[ExpertKey, int], passed: list[tuple[ExpertKey, int]]) -> None:
    """Return what was passed over to the head that it came from."""
    for key, uses in reversed(passed):
        queue[key] = uses
        queue.move_to_end(key, last=False)
