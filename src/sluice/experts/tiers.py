"""Decides which experts a device's memory holds, above the pool in RAM: events in, copies out. It copies nothing.

An expert comes up when it is demanded again soon after it was demanded before, or while there is room; whom it
displaces goes down again. On the way up it leaves the pool in RAM, and who goes down takes its slot there: each expert
lies in one place, so both memories together hold as many as they have slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sluice.experts.cache import CacheFull, ExpertCache
from sluice.experts.policies import Policy
from sluice.types import ExpertKey, Read

MOST_RISES = 1  # of a layer in a step, once the memory is full: each costs two copies


class Rise(NamedTuple):
    """`read.key` is to be copied into the device's slot `read.slot`, once the expert `down` has been taken from there.

    `down` is None where nobody has to go, or who goes need not be kept.
    """

    read: Read
    down: ExpertKey | None


class UpperLevel:
    """The slots of one device for the experts of `layers`, all of one size; `policy` picks who goes down.

    `cache.counters` counts demands met there as hits, and rises as misses.
    """

    def __init__(self, n_slots: int, policy: Policy) -> None:
        self.cache = ExpertCache(n_slots, policy)
        self._owner: dict[int, ExpertKey] = {}
        self._passing: set[ExpertKey] = set()  # brought for a prompt: they lie in RAM too
        self._demanded: dict[ExpertKey, int] = {}  # when last, in demands of this level's layers
        self._clock = 0

    @property
    def n_slots(self) -> int:
        return self.cache.n_slots

    def meet(
        self, keys: Sequence[ExpertKey], tick: int, *, scan: bool = False
    ) -> tuple[dict[ExpertKey, int], list[ExpertKey]]:
        """The slots of those of `keys` that are here, pinned until released; and who of the others should rise.

        In a `scan`, a prompt's sweep over a layer, only what finds a free slot should.
        """
        here = [key for key in keys if self.cache.resident(key)]
        slots = dict(zip(here, self.cache.acquire(here, tick, scan=scan).slots, strict=True)) if here else {}
        if not scan:
            self._passing.difference_update(here)
        room, rising = self.cache.n_free, []
        full = 0 if scan else MOST_RISES
        for key in keys:
            if key not in slots:
                if room > 0:
                    room -= 1
                    rising.append(key)
                elif full > 0 and self._comes_again(key):
                    full -= 1
                    rising.append(key)
            if not scan:
                self._demanded[key] = self._clock
                self._clock += 1
        return slots, rising

    def _comes_again(self, key: ExpertKey) -> bool:
        """It was demanded so lately that, had it been here, it would still be."""
        last = self._demanded.get(key)
        return last is not None and self._clock - last <= self.n_slots

    def rise(self, key: ExpertKey, tick: int, *, passing: bool = False) -> Rise | None:
        """Give `key`, which isn't here, a slot, pinned until released; None where every slot is pinned.

        `passing`: for this step alone, a prompt's. Call `arrived` once it is copied.
        """
        try:
            read = self.cache.acquire([key], tick, scan=passing).submit[0]
        except CacheFull:
            return None
        down = self._owner.pop(read.slot, None)
        if down in self._passing:
            self._passing.discard(down)
            down = None
        self._owner[read.slot] = key
        if passing:
            self._passing.add(key)
        return Rise(read, down)

    def arrived(self, read: Read) -> None:
        """The expert of `read` is in its slot."""
        self.cache.complete(read)

    def release(self, keys: Sequence[ExpertKey]) -> None:
        self.cache.release(keys)

    def stays_below(self, key: ExpertKey) -> None:
        """`key`, which has risen, keeps its slot in RAM as well: when it goes down, nothing has to be kept."""
        self._passing.add(key)

    def forget(self, key: ExpertKey) -> None:
        """Free the slot of `key`, which isn't pinned."""
        slot = self.cache.slot_of(key)
        if slot is not None and self.cache.discard(key):
            del self._owner[slot]
            self._passing.discard(key)

    def lost(self) -> None:
        """A step was broken off: no pins hold any more, and what had not arrived is not here."""
        self.cache.reset_inflight()
        self._owner = {slot: key for slot, key in self._owner.items() if self.cache.slot_of(key) == slot}


def settle(upper: UpperLevel, below: ExpertCache, rise: Rise) -> Read | None:
    """The expert of `rise` has been copied up: it leaves `below`, where it must not be pinned, and who went down takes
    its slot.

    The read is to be carried out by copying to its slot, and to be completed. None where nobody is kept: nobody went
    down, or it lies there already, or there is no room as who rose is protected there.
    """
    upper.arrived(rise.read)
    if not below.discard(rise.read.key):
        upper.stays_below(rise.read.key)
        return None
    return come_down(below, rise.down)


def come_down(below: ExpertCache, down: ExpertKey | None) -> Read | None:
    """A read that gives `down` a free slot, to be carried out by copying; None where there is none, or it has one."""
    if down is None or below.slot_of(down) is not None or not below.n_free:
        return None
    [read] = below.preload([down])
    return read
