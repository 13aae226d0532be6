"""The expert cache: a state machine that decides which expert sits in which slot, and knows nothing of files or time.

Events go in (`acquire`, `prefetch`, `preload`, `complete`, …), instructions come out (`Read`s to submit, promote or
cancel). The engine carries them out; a simulator pretends to. Both see the same slots, counters and evictions.

    free ──acquire/prefetch──▶ loading ──complete──▶ resident ──evicted──▶ free
                                  └──fail/drop────────────────────────────▲

One pool serves all layers. On top of its state an expert may be *pinned* (demanded and not yet released) or *protected*
(prefetched for a deadline that has not passed). A slot whose read is in flight is never reused, whatever happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from heapq import heappop, heappush
from typing import NamedTuple

from sluice.errors import SluiceError
from sluice.experts.counters import CacheCounters
from sluice.experts.policies import Policy
from sluice.types import ExpertKey, Read

PRELOAD_DEADLINE = 0  # of reads that no layer waits for: all are over before the first step


class CacheFull(SluiceError):
    """Internal: an acquire wants more slots than it may claim. Nothing was changed."""


class Acquired(NamedTuple):
    """What `ExpertCache.acquire` decided. `slots[i]` is the slot of the i-th key, pinned until released."""

    slots: list[int]
    submit: list[Read]  # new reads, deadline = the acquire's tick
    promote: list[Read]  # reads of prefetches, in flight, demanded for the first time
    hits: int
    late_hits: int
    misses: int
    waiting: list[ExpertKey]  # not resident yet: late hits and misses, in key order


class _Entry:
    """One expert that owns a slot."""

    __slots__ = ("binding", "deadline", "key", "pins", "read", "slot", "unused")

    def __init__(self, key: ExpertKey, slot: int, read: Read) -> None:
        self.key = key
        self.slot = slot
        self.read: Read | None = read  # None: resident
        self.pins = 0
        self.deadline: int | None = None  # protected until this tick has passed; None: not protected
        self.binding = False  # its protection holds against demands too
        self.unused = False  # prefetched and never demanded


class ExpertCache:
    """A pool of `n_slots` slots for experts of all layers; `policy` picks the victims.

    `reserve` is the number of slots that prefetches leave claimable for demands.

    Ticks and deadlines are steps × layers + layer. `complete`, `fail` and `drop` of a read that the cache no longer
    waits for (its serial is stale) change nothing.
    """

    def __init__(self, n_slots: int, policy: Policy, *, reserve: int = 0) -> None:
        assert n_slots > 0 and reserve >= 0
        self.n_slots = n_slots
        self.reserve = reserve
        self.policy = policy
        self.counters = CacheCounters()
        self._entries: dict[ExpertKey, _Entry] = {}
        self._free = list(range(n_slots - 1, -1, -1))  # a stack, lowest slot on top: slots in use stay low
        self._n_evictable = 0  # resident, not pinned, not protected
        self._n_yielding = 0  # resident, not pinned, protected but not binding: a demand may take it in need
        self._deadlines: list[tuple[int, int, _Entry]] = []  # heap of (deadline, tie-break, entry), stale ones included
        self._forgotten: dict[ExpertKey, int] = {}  # pins of demands whose read failed, still to be released
        self._serial = 0

    # -- demands --

    def acquire(self, keys: Sequence[ExpertKey], tick: int, *, scan: bool = False) -> Acquired:
        """Pin the distinct `keys`, which a router chose at `tick`, and start reading those that are absent.

        All are pinned before any victim is chosen, and used in the order of `keys` once the absent ones own a slot, so
        that the policy's view doesn't depend on what was resident. A prefetch's protection ends here, unless its
        deadline is a later tick than this. `scan` says that the keys belong to a sweep over a layer (a prefill wave),
        which the policy keeps from flushing the working set. Raises CacheFull before changing anything.
        """
        assert len(set(keys)) == len(keys), "the keys of an acquire must be distinct"
        found = list(map(self._entries.get, keys))
        if len(self._free) + self._n_evictable < len(keys):  # it may be too many: count
            self._check_room(found)

        policy, counters = self.policy, self.counters
        policy.tick(tick)
        absent: list[int] = []  # indices into keys
        waiting: list[ExpertKey] = []
        promote: list[Read] = []
        late_hits = idle = 0
        for i, entry in enumerate(found):
            if entry is None:
                absent.append(i)
                waiting.append(keys[i])
                continue
            if entry.read is None:
                if not entry.pins:
                    if entry.deadline is None:
                        idle += 1  # counted below: nearly all that is hit is of this kind
                    else:
                        self._count(entry, -1)
            else:
                late_hits += 1
                waiting.append(entry.key)
                if entry.unused:
                    promote.append(entry.read)
                    counters.prefetch_late += 1
            entry.pins += 1
            if entry.unused:
                entry.unused = False
                counters.prefetch_used += 1
            if entry.deadline is not None and entry.deadline <= tick:
                entry.deadline = None
                entry.binding = False
        self._n_evictable -= idle

        submit: list[Read] = []
        if absent:
            missing = [keys[i] for i in absent]
            self._make_room(missing)
            for i in absent:
                entry, read = self._start(keys[i], tick, scan)
                entry.pins = 1
                found[i] = entry
                submit.append(read)
        touch = policy.touch
        for key in keys:
            touch(key, scan)
        hits = len(keys) - late_hits - len(absent)
        counters.hits += hits
        counters.late_hits += late_hits
        counters.misses += len(absent)
        slots = [entry.slot for entry in found]  # type: ignore[union-attr]  # all have one now
        return Acquired(slots, submit, promote, hits, late_hits, len(absent), waiting)

    def _check_room(self, found: Sequence[_Entry | None]) -> None:
        """Raise CacheFull unless the entries `found`, None where a key has none, can all be pinned at once."""
        claimable = self.n_claimable
        for entry in found:
            if entry is None or (entry.read is None and not entry.pins and not entry.binding):
                claimable -= 1  # an absent key takes one, a resident one stops being one
        if claimable < 0:
            raise CacheFull(f"{len(found)} experts lack {-claimable} of {self.n_slots} slots; raise --ram")

    def release(self, keys: Sequence[ExpertKey]) -> None:
        """Undo one pin of each key.

        Pins that `fail` forgot are released first: while both a failed and a newer demand of a key are out, the newer
        one can stay pinned too long, never too short.
        """
        entries = self._entries
        for key in self._not_forgotten(keys) if self._forgotten else keys:
            entry = entries[key]
            assert entry.pins > 0, f"{key} is not pinned"
            entry.pins -= 1
            if not entry.pins and entry.read is None:
                if entry.deadline is None:
                    self._n_evictable += 1
                else:
                    self._count(entry, 1)

    def _not_forgotten(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Those of `keys` whose pins are there; one pin less is forgotten of each of the others."""
        held: list[ExpertKey] = []
        for key in keys:
            if key not in self._forgotten:
                held.append(key)
            elif self._forgotten[key] > 1:
                self._forgotten[key] -= 1
            else:
                del self._forgotten[key]
        return held

    # -- prefetches --

    def prefetch(self, keys: Sequence[ExpertKey], deadline: int, *, binding: bool = False) -> list[Read]:
        """Start reading the distinct `keys`, ranked best first, that are absent, and protect all until `deadline`.

        Stops at the first key that would leave fewer than `reserve` slots claimable (free, or resident and neither
        pinned nor protected). Other prefetches never evict a protected expert; a demand does only when nothing else is
        left, and not at all when the protection is `binding`: the prediction is the route.
        """
        assert len(set(keys)) == len(keys), "the keys of a prefetch must be distinct"
        room = len(self._free) + self._n_evictable - self.reserve
        absent: list[ExpertKey] = []
        for at, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None or entry.deadline is None:
                cost = entry is None or (entry.read is None and not entry.pins)  # what it takes now; pinned: later
                if room < cost:
                    self.counters.prefetch_crowded += sum(other not in self._entries for other in keys[at:])
                    break
                room -= cost
            if entry is None:
                absent.append(key)
            elif entry.deadline is None or entry.deadline < deadline or binding > entry.binding:
                self._protect(entry, max(deadline, entry.deadline or deadline), binding or entry.binding)
        if not absent:
            return []
        self._make_room(absent)
        reads: list[Read] = []
        for key in absent:
            entry, read = self._start(key, deadline, False)
            entry.unused = True
            self._protect(entry, deadline, binding)
            reads.append(read)
        self.counters.prefetch_issued += len(reads)
        return reads

    def expire(self, tick: int) -> list[Read]:
        """End the protection of everything due before `tick`; return the reads among it that nobody has demanded.

        The caller tries to cancel those and `drop`s the cancelled; the others complete and become evictable. Costs
        O(1) when nothing is due.
        """
        stale: list[Read] = []
        while self._deadlines and self._deadlines[0][0] < tick:
            deadline, _, entry = heappop(self._deadlines)
            if entry.deadline != deadline:
                continue  # met, moved or gone since
            self._protect(entry, None, False)
            if entry.read is not None and entry.unused:
                stale.append(entry.read)
        return stale

    # -- a working set from before --

    def preload(self, keys: Sequence[ExpertKey]) -> list[Read]:
        """Start reading those of the distinct `keys` that are absent, into free slots. The policy admits them in order.

        Nothing is evicted, pinned or counted: these are neither misses nor prefetches, and none can be wasted. Raises
        CacheFull before changing anything where fewer slots are free.
        """
        assert len(set(keys)) == len(keys), "the keys of a preload must be distinct"
        absent = [key for key in keys if key not in self._entries]
        if len(absent) > len(self._free):
            raise CacheFull(f"{len(absent)} experts to preload and {len(self._free)} free slots")
        return [self._start(key, PRELOAD_DEADLINE, False)[1] for key in absent]

    def discard(self, key: ExpertKey) -> bool:
        """Free the slot of `key`, which lies elsewhere too. False, and nothing is done, unless it could be evicted.

        It is not counted as an eviction: nothing has to be read again for it.
        """
        if key not in self._entries or not self._is_evictable(key):
            return False
        self._n_evictable -= 1
        self._leave(self._entries[key])
        return True

    def eviction_order(self) -> list[ExpertKey]:
        """The resident experts in the order in which the policy would give them up now. Changes nothing.

        A new cache with an LRU policy that preloads them in that order goes on where this one is.
        """
        return deepcopy(self.policy).victims(len(self._entries), self.resident)  # a policy forgets whom it has named

    # -- how reads end --

    def complete(self, read: Read) -> None:
        """All bytes of `read` are in its slot."""
        entry = self._in_flight(read)
        if entry is not None:
            entry.read = None
            if not entry.pins:
                self._count(entry, 1)

    def fail(self, read: Read) -> bool:
        """`read` ended in an error: free its slot. True if the expert was demanded: the caller must raise.

        The pins of that demand are forgotten, to be released as usual or not at all after `reset_inflight`.
        """
        entry = self._in_flight(read)
        if entry is None:
            return False
        if entry.pins:
            self._forgotten[read.key] = self._forgotten.get(read.key, 0) + entry.pins
        self._leave(entry)
        return entry.pins > 0

    def drop(self, read: Read) -> None:
        """`read` was cancelled before it began (the reader said so): free its slot."""
        entry = self._in_flight(read)
        if entry is not None:
            assert not entry.pins, f"{read.key} is demanded, its read can't be dropped"
            self._leave(entry)

    def reset_inflight(self) -> None:
        """Clean up after an aborted step, once no read is outstanding: free loading slots, undo pins and protection."""
        for entry in list(self._entries.values()):
            entry.pins = 0
            entry.deadline = None
            entry.binding = False
            if entry.read is not None:
                self._leave(entry)
        self._n_evictable, self._n_yielding = len(self._entries), 0
        self._deadlines.clear()
        self._forgotten.clear()

    # -- questions --

    def __len__(self) -> int:
        """Experts that own a slot, loading or resident."""
        return len(self._entries)

    def resident(self, key: ExpertKey) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.read is None

    def slot_of(self, key: ExpertKey) -> int | None:
        """The slot that `key` is resident in or being read into; None if it has none."""
        entry = self._entries.get(key)
        return None if entry is None else entry.slot

    def keys_resident(self) -> Iterator[ExpertKey]:
        return (key for key, entry in self._entries.items() if entry.read is None)

    def reads_in_flight(self) -> list[Read]:
        """Reads issued that have neither completed, failed nor been dropped, oldest first."""
        return [entry.read for entry in self._entries.values() if entry.read is not None]

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_evictable(self) -> int:
        """Resident experts that are neither pinned nor protected."""
        return self._n_evictable

    @property
    def n_claimable(self) -> int:
        """The most slots an acquire of absent keys could get now."""
        return len(self._free) + self._n_evictable + self._n_yielding

    # -- internals --

    def _is_evictable(self, key: ExpertKey) -> bool:
        entry = self._entries[key]
        return not entry.pins and entry.read is None and entry.deadline is None

    def _is_yielding(self, key: ExpertKey) -> bool:
        entry = self._entries[key]
        return not entry.pins and entry.read is None and entry.deadline is not None and not entry.binding

    def _count(self, entry: _Entry, n: int) -> None:
        """Add `n` to the count that an unpinned resident `entry` belongs to."""
        if entry.deadline is None:
            self._n_evictable += n
        elif not entry.binding:
            self._n_yielding += n

    def _make_room(self, absent: Sequence[ExpertKey]) -> None:
        """Evict until there is a free slot for each of `absent`. The caller has checked that it can be done."""
        n = len(absent) - len(self._free)
        if n <= 0:
            return
        ordinary = min(n, self._n_evictable)
        victims = self.policy.victims(ordinary, self._is_evictable, absent) if ordinary else []
        if n > ordinary:
            victims += self.policy.victims(n - ordinary, self._is_yielding, absent)
        assert len(victims) == n, "the policy lost track of a resident expert"
        self.counters.evictions += n
        self._n_evictable -= ordinary
        self._n_yielding -= n - ordinary
        for key in victims:
            self._leave(self._entries[key])

    def _start(self, key: ExpertKey, deadline: int, scan: bool) -> tuple[_Entry, Read]:
        slot = self._free.pop()
        self._serial += 1
        read = Read(key, slot, deadline, self._serial)
        entry = self._entries[key] = _Entry(key, slot, read)
        self.policy.admit(key, scan)
        return entry, read

    def _leave(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        self._free.append(entry.slot)
        entry.deadline = None  # what the heap still holds of it is stale
        self.counters.prefetch_wasted += entry.unused
        self.policy.evict(entry.key)

    def _protect(self, entry: _Entry, deadline: int | None, binding: bool) -> None:
        idle = entry.read is None and not entry.pins
        if idle:
            self._count(entry, -1)
        entry.deadline = deadline
        entry.binding = binding
        if idle:
            self._count(entry, 1)
        if deadline is not None:
            self._serial += 1
            heappush(self._deadlines, (deadline, self._serial, entry))

    def _in_flight(self, read: Read) -> _Entry | None:
        entry = self._entries.get(read.key)
        return entry if entry is not None and entry.read is not None and entry.read.serial == read.serial else None

    def check(self) -> None:
        """Assert every invariant; for tests, after each event. O(slots)."""
        owned = [entry.slot for entry in self._entries.values()]
        assert sorted(owned + self._free) == list(range(self.n_slots)), "each slot is free or owned by one expert"
        pending = {id(entry): [] for entry in self._entries.values()}
        for deadline, _, entry in self._deadlines:
            pending.setdefault(id(entry), []).append(deadline)
        for key, entry in self._entries.items():
            assert entry.key == key and entry.pins >= 0
            assert not (entry.unused and entry.pins), "a pinned expert was demanded"
            if entry.read is not None:
                assert entry.read.key == key and entry.read.slot == entry.slot
            assert not entry.binding or entry.deadline is not None
            if entry.deadline is not None:
                assert entry.deadline in pending[id(entry)], "a protection must end"
        serials = [entry.read.serial for entry in self._entries.values() if entry.read is not None]
        assert len(set(serials)) == len(serials)
        assert self._n_evictable == sum(map(self._is_evictable, self._entries))
        assert self._n_yielding == sum(map(self._is_yielding, self._entries))
        assert all(n > 0 for n in self._forgotten.values())
        unused = sum(entry.unused for entry in self._entries.values())
        c = self.counters
        assert c.prefetch_issued == c.prefetch_used + c.prefetch_wasted + unused
        assert 0 <= c.prefetch_late <= c.prefetch_used
        assert min(c.hits, c.late_hits, c.misses, c.evictions) >= 0
