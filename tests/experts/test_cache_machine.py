"""Random events in random order, every invariant checked after each, against a model of who holds what."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.experts.cache import CacheFull, ExpertCache
from sluice.experts.policies import POLICIES, make_policy
from sluice.types import ExpertKey, Read

N_LAYERS = 3
experts = st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=5)


class CacheMachine(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(sorted(POLICIES)), n_slots=st.integers(1, 10), reserve=st.integers(0, 4))
    def start(self, name: str, n_slots: int, reserve: int) -> None:
        pinned = [ExpertKey(layer, 0) for layer in range(N_LAYERS)]
        policy = make_policy(name, n_slots=n_slots, n_layers=N_LAYERS, pinned=pinned)
        self.cache = ExpertCache(n_slots, policy, reserve=reserve)
        self.tick = 0
        self.reads: list[Read] = []  # in flight
        self.held: list[list[ExpertKey]] = []  # acquires to be released
        self.bound: dict[ExpertKey, int] = {}  # binding predictions: the tick until which they must stay

    def issue(self, reads: list[Read]) -> None:
        flying = {read.slot for read in self.reads}
        for read in reads:
            assert read.slot not in flying, "a slot with a read in flight was reused"
            assert all(read.serial > other.serial for other in self.reads)
            assert self.cache.slot_of(read.key) == read.slot
            flying.add(read.slot)
            self.reads.append(read)

    @rule(ids=experts, scan=st.booleans(), steps=st.integers(0, 2))
    def acquire(self, ids: list[int], scan: bool, steps: int) -> None:
        self.tick += steps
        keys = [ExpertKey(self.tick % N_LAYERS, expert) for expert in ids]
        resident = {key for key in keys if self.cache.resident(key)}
        loading = {key for key in keys if self.cache.slot_of(key) is not None} - resident
        slots = {key: self.cache.slot_of(key) for key in resident | loading}
        absent = len(keys) - len(slots)
        before, claimable = self.cache.counters.as_dict(), self.cache.n_claimable
        ours = sum(self.cache._is_evictable(key) or self.cache._is_yielding(key) for key in resident)
        try:
            got = self.cache.acquire(keys, self.tick, scan=scan)
        except CacheFull:
            assert claimable - ours < absent
            assert self.cache.counters.as_dict() == before and self.cache.n_claimable == claimable
            return
        assert claimable - ours >= absent
        assert (got.hits, got.late_hits, got.misses) == (len(resident), len(loading), absent)
        assert got.waiting == [key for key in keys if key not in resident]
        assert [read.key for read in got.submit] == [key for key in keys if key not in slots]
        assert set(got.promote) <= set(self.reads) and {read.key for read in got.promote} <= loading
        assert all(got.slots[i] == slots.get(key, got.slots[i]) for i, key in enumerate(keys))
        assert len(set(got.slots)) == len(keys)
        self.issue(got.submit)
        self.held.append(keys)
        for key in keys:
            if self.bound.get(key, self.tick + 1) <= self.tick:
                del self.bound[key]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.cache.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(ids=experts, ahead=st.integers(0, 4), binding=st.booleans())
    def prefetch(self, ids: list[int], ahead: int, binding: bool) -> None:
        deadline = self.tick + ahead
        keys = [ExpertKey(deadline % N_LAYERS, expert) for expert in ids]
        present = {key for key in keys if self.cache.slot_of(key) is not None}
        before = self.cache.n_free + self.cache.n_evictable
        reads = self.cache.prefetch(keys, deadline, binding=binding)
        absent = [key for key in keys if key not in present]
        assert [read.key for read in reads] == absent[: len(reads)], "ranked: the best come first"
        assert self.cache.n_free + self.cache.n_evictable >= min(before, self.cache.reserve)
        ranked_above = keys[: keys.index(reads[-1].key)] if reads else []
        assert all(self.cache.slot_of(key) is not None for key in ranked_above), "a prefetch evicted a better one"
        self.issue(reads)
        if binding:
            for read in reads:
                self.bound[read.key] = deadline

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), event=st.sampled_from(["complete", "complete", "complete", "fail"]))
    def end_a_read(self, data: st.DataObject, event: str) -> None:
        read = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        if event == "complete":
            self.cache.complete(read)
            assert self.cache.resident(read.key) and self.cache.slot_of(read.key) == read.slot
        else:
            demanded = self.cache.fail(read)
            assert self.cache.slot_of(read.key) is None
            assert not demanded or any(read.key in keys for keys in self.held)
            self.bound.pop(read.key, None)
        self.cache.complete(read)  # stale by now
        self.cache.drop(read)
        assert self.cache.fail(read) is False

    @rule(data=st.data(), steps=st.integers(0, 3))
    def expire(self, data: st.DataObject, steps: int) -> None:
        self.tick += steps
        self.bound = {key: deadline for key, deadline in self.bound.items() if deadline >= self.tick}
        stale = self.cache.expire(self.tick)
        assert set(stale) <= set(self.reads)
        held = {key for keys in self.held for key in keys}
        assert all(read.key not in held or read.key in self.cache._forgotten for read in stale), "it was demanded"
        for read in stale:
            if data.draw(st.booleans()):
                self.reads.remove(read)
                self.cache.drop(read)
                assert self.cache.slot_of(read.key) is None

    @rule()
    def abort(self) -> None:
        self.cache.reset_inflight()
        self.reads.clear()
        self.held.clear()
        self.bound.clear()
        assert self.cache.n_free + self.cache.n_evictable == self.cache.n_slots

    @invariant()
    def holds(self) -> None:
        self.cache.check()
        assert all(self.cache.slot_of(key) is not None for key in self.bound), "a binding prediction was evicted"
        pins = Counter(key for keys in self.held for key in keys)
        for key, entry in self.cache._entries.items():
            # A failed demand's pins are forgotten; until they are released a newer demand of that key may hold more.
            assert entry.pins <= pins[key]
            assert key in self.cache._forgotten or entry.pins == pins[key]
        assert self.cache.reads_in_flight() == sorted(self.reads, key=lambda read: read.serial)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
