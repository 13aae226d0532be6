"""ARC: recency and frequency share the slots, in a proportion that what was evicted too early keeps correcting."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from sluice.experts.policies.base import ColdFirst, Evictable
from sluice.types import ExpertKey

Queue = OrderedDict[ExpertKey, None]  # the least recent first


class ARC(ColdFirst):
    """Megiddo & Modha 2003 (FAST, "ARC: a self-tuning, low overhead replacement cache"), in the paper's names.

    `t1` holds what was used once lately, `t2` what was used more often; `b1` and `b2` remember what either lost, and
    `p` is how many of the c slots `t1` ought to have: a miss that `b1` remembers raises it, one that `b2` remembers
    lowers it. Of several victims for one acquire, each is chosen as if what got room before had joined already.
    """

    def __init__(self, n_slots: int) -> None:
        super().__init__()
        self._c = n_slots
        self._p = 0.0
        self._t1: Queue = OrderedDict()
        self._t2: Queue = OrderedDict()
        self._b1: Queue = OrderedDict()
        self._b2: Queue = OrderedDict()
        self._unused: set[ExpertKey] = set()  # in t1 or t2, waiting for the use that brought them
        self._returning: set[ExpertKey] = set()  # remembered when room was made for them

    def _enter(self, key: ExpertKey) -> None:
        self._recall(key)
        self._unused.add(key)
        if key in self._returning:
            self._returning.remove(key)
            self._t2[key] = None
            return
        self._t1[key] = None
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        while b1 and len(t1) + len(b1) > self._c:
            b1.popitem(last=False)
        while b2 and len(t1) + len(t2) + len(b1) + len(b2) > 2 * self._c:
            b2.popitem(last=False)

    def _use(self, key: ExpertKey) -> None:
        if key in self._unused:
            self._unused.remove(key)
            queue = self._t1 if key in self._t1 else self._t2
            queue.move_to_end(key)
        else:
            self._t1.pop(key, None)
            self._t2[key] = None
            self._t2.move_to_end(key)

    def _leave(self, key: ExpertKey) -> None:
        self._unused.discard(key)
        if key in self._t1:
            del self._t1[key]
        else:
            self._t2.pop(key, None)

    def _recall(self, key: ExpertKey) -> bool:
        """A miss of `key`: adapt p if it is remembered. Whether it was b2 that remembered it."""
        b1, b2 = self._b1, self._b2
        if key in b1:
            self._p = min(self._p + max(len(b2) / len(b1), 1), self._c)
        elif key in b2:
            self._p = max(self._p - max(len(b1) / len(b2), 1), 0)
        else:
            return False
        in_b2 = key in b2
        del (b2 if in_b2 else b1)[key]
        self._returning.add(key)
        return in_b2

    def _choose(self, n: int, evictable: Evictable, incoming: Sequence[ExpertKey]) -> list[ExpertKey]:
        found: list[ExpertKey] = []
        joining = 0  # those to come into t1
        free = len(incoming) - n
        for i in range(max(free, 0) + n):
            in_b2 = i < len(incoming) and self._recall(incoming[i])
            if i >= free:
                victim = self._replace(joining, in_b2, evictable)
                if victim is None:
                    break
                found.append(victim)
            joining += i < len(incoming) and incoming[i] not in self._returning
        return found

    def _replace(self, joining: int, in_b2: bool, evictable: Evictable) -> ExpertKey | None:
        """The paper's REPLACE: the least recent of t1 or of t2, moved to where it is remembered."""
        n1 = len(self._t1) + joining
        from_t1 = n1 > self._p or (n1 == self._p and in_b2)
        for _ in range(2):
            queue, ghost = (self._t1, self._b1) if from_t1 else (self._t2, self._b2)
            for key in queue:
                if evictable(key):
                    del queue[key]
                    ghost[key] = None
                    return key
            from_t1 = not from_t1
        return None
