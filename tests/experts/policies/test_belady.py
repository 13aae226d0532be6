from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from policy_harness import N_LAYERS, Trace, assert_same_requests, belady, key_of, libcachesim, replay, traces

from sluice.experts.policies import POLICIES, Belady, make_policy
from sluice.types import ExpertKey


@settings(deadline=None, max_examples=200)
@given(trace=traces(), n_slots=st.integers(3, 12))
def test_bounds_every_policy(trace: Trace, n_slots: int) -> None:
    bound = replay(trace, belady(trace), n_slots).hits
    for name in POLICIES:
        policy = make_policy(name, n_slots=n_slots, n_layers=N_LAYERS, pinned=[ExpertKey(1, 0), ExpertKey(2, 3)])
        assert replay(trace, policy, n_slots).hits <= bound, name


@settings(deadline=None, max_examples=100)
@given(trace=traces(), n_slots=st.integers(3, 6))
def test_is_the_best_there_is(trace: Trace, n_slots: int) -> None:
    """Against every choice of victims, tried exhaustively on the start of the trace."""
    trace = trace[:7]
    states = {frozenset[ExpertKey](): 0}  # experts in slots -> most hits so far
    for keys in trace:
        after: dict[frozenset[ExpertKey], int] = {}
        for held, hits in states.items():
            hits += len(held.intersection(keys))
            for kept in subsets(held.difference(keys), n_slots - len(keys)):
                state = kept.union(keys)
                after[state] = max(hits, after.get(state, 0))
        states = after
    assert replay(trace, belady(trace), n_slots).hits == max(states.values())


def subsets(items: frozenset[ExpertKey], most: int) -> set[frozenset[ExpertKey]]:
    """Those of `items` that can stay: all if they fit, else each choice of `most`."""
    if len(items) <= most:
        return {items}
    return set().union(*(subsets(items - {item}, most) for item in items))


def test_uses_to_come() -> None:
    a, b, c = (ExpertKey(0, e) for e in range(3))
    policy = Belady([a, b, c, b, a, b])
    assert (policy.use_after_next(a), policy.use_after_next(b), policy.use_after_next(c)) == (4, 3, float("inf"))
    for key in (a, b):
        policy.admit(key)
        policy.touch(key)
    assert policy.farthest() == 4
    policy.skip(c)
    policy.touch(b)
    policy.touch(a)
    assert policy.farthest() == float("inf")  # a is not used again
    policy.evict(a)
    assert policy.farthest() == 5


def test_hits_leave_no_garbage() -> None:
    """Every touch changes a rank: what is left of old ones must not grow with the run."""
    trace = [[ExpertKey(0, i % 3)] for i in range(5000)]
    policy = belady(trace)
    replay(trace, policy, 4)
    assert len(policy._heap) < 200


def test_same_as_libcachesim() -> None:
    assert_same_requests(lambda n_slots, ids: Belady(map(key_of, ids)), libcachesim("Belady"))
