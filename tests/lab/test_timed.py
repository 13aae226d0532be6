"""Timed replays: against lab.simulate where time can't matter, schedules by hand, and what must always hold."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_traces import Row, info, random_rows, write_rows

from sluice.experts.cache import Acquired, ExpertCache
from sluice.experts.policies import POLICIES, make_policy
from sluice.experts.predictors import PREDICTORS, Predictor, make_predictor
from sluice.lab.machine import Speeds
from sluice.lab.replay import Demands, Execution
from sluice.lab.simulate import policy_for, simulate
from sluice.lab.timed import TimedReplay, TimedResult, reserve
from sluice.trace import TraceInfo, TraceReader
from sluice.types import ExpertKey, Read

SIZE = 100  # bytes of an expert
N_EXPERT, TOP_K = 16, 4
INFO = info(3, N_EXPERT, TOP_K)


def decoding(sets: Sequence[Sequence[int]], of: TraceInfo = INFO, first_step: int = 0) -> list[Execution]:
    """One stream's decode executions, which demand `sets` in turn; layers in a cycle."""
    layers, executions = of.moe_layers, []
    for i, experts in enumerate(sets):
        step, place = divmod(i, len(layers))
        layer, step = layers[place], step + first_step
        keys = [ExpertKey(layer, expert) for expert in sorted(experts)]
        executions.append(Execution(step, "decode", layer, step * of.n_layers + layer, keys, 1, 1, 1, len(keys)))
    return executions


def popular(n_steps: int, seed: int, of: TraceInfo = INFO) -> list[Execution]:
    """Some experts are wanted more often than others."""
    rng = random.Random(seed)
    weights = {layer: [rng.random() ** 2 for _ in range(of.n_expert)] for layer in of.moe_layers}
    return decoding(
        [
            sorted(range(of.n_expert), key=lambda e: -weights[layer][e] * rng.random())[: of.top_k]
            for _ in range(n_steps)
            for layer in of.moe_layers
        ],
        of,
    )


def speeds(rate: float = 1e5, **more: Any) -> Speeds:
    """By default a read takes as long as a layer, and twice as long as an expert."""
    given: dict[str, Any] = {"read_rate": rate, "layer_s": 1e-3, "expert_s": 0.5e-3}
    return Speeds(**given | more)


class CheckedCache(ExpertCache):
    """Asserts every invariant after each event."""

    def acquire(self, keys: Sequence[ExpertKey], tick: int, *, scan: bool = False) -> Acquired:
        acquired = super().acquire(keys, tick, scan=scan)
        self.check()
        return acquired

    def prefetch(self, keys: Sequence[ExpertKey], deadline: int, *, binding: bool = False) -> list[Read]:
        reads = super().prefetch(keys, deadline, binding=binding)
        self.check()
        return reads

    def expire(self, tick: int) -> list[Read]:
        stale = super().expire(tick)
        self.check()
        return stale

    def complete(self, read: Read) -> None:
        assert self._in_flight(read) is not None, "a read ended that nobody waits for"
        super().complete(read)
        self.check()

    def drop(self, read: Read) -> None:
        super().drop(read)
        self.check()

    def release(self, keys: Sequence[ExpertKey]) -> None:
        super().release(keys)
        self.check()


def predictor_of(name: str, of: TraceInfo, recall: float = 0.85) -> Predictor:
    return make_predictor(name, n_layers=len(of.moe_layers), n_experts=of.n_expert, recall=recall)


def replayed(
    executions: Sequence[Execution], name: str, n_slots: int, machine: Speeds, *, policy: str = "lru",
    of: TraceInfo = INFO, recall: float = 0.85, checked: bool = False,
) -> TimedResult:  # fmt: skip
    made = make_policy(policy, n_slots=n_slots, n_layers=of.n_layers)
    replay = TimedReplay(of, made, n_slots, predictor_of(name, of, recall), machine, reserve=of.top_k)
    if checked:
        replay.cache = CheckedCache(n_slots, made, reserve=replay.cache.reserve)
    result = replay.run(executions)
    if checked:
        for read in replay.machine.settle():
            replay.cache.complete(read)
        assert not replay.cache.reads_in_flight()
        assert replay.cache.n_evictable + replay.cache.n_free + replay.cache._n_yielding == n_slots, "a pin was left"
        unused = sum(entry.unused for entry in replay.cache._entries.values())
        assert result.prefetch_unused == unused
    return result


# --- where time can't matter


@pytest.mark.parametrize("rate", [math.inf, 3e4])
def test_on_demand_it_counts_what_simulate_counts(rate: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    prompt = [
        row._replace(step=0, phase="prefill") for row in random_rows(rng, layers=3, n_expert=12, top_k=3, tokens=9)
    ]
    rows = sorted(prompt, key=lambda row: row.layer)
    rows += [row._replace(step=row.step + 1) for row in random_rows(rng, layers=3, n_expert=12, top_k=3, tokens=40)]
    again = [row._replace(step=41, phase="prefill", sequence=9) for row in prompt]
    rows += sorted(again, key=lambda row: row.layer)
    more = random_rows(rng, layers=3, n_expert=12, top_k=3, tokens=30, sequences=1)
    rows += [row._replace(step=row.step + 42, sequence=9, position=row.position + 50) for row in more]
    with TraceReader(write_rows(tmp_path / "t", rows, info(3, 12, 3))) as reader:
        demands = Demands.of(reader)
    assert {execution.phase for execution in demands} == {"prefill", "decode"}
    assert any(execution.scan for execution in demands)
    for policy in POLICIES:
        for n_slots in (1, 4, 9, 20, 36):
            replay = TimedReplay(
                demands.info, policy_for(demands, policy, n_slots), n_slots, predictor_of("none", demands.info),
                speeds(rate), reserve=reserve(demands),
            )  # fmt: skip
            found, expected = replay.run(demands), simulate(demands, policy, n_slots, phase="decode")
            assert found.late_hits == found.prefetch_issued == 0 and found.recall_at_k is None
            for name in ("demands", "hits", "misses", "evictions", "hit_rate"):
                assert getattr(found, name) == getattr(expected, name), (policy, n_slots, name)
            whole = simulate(demands, policy, n_slots)
            counters = replay.cache.counters
            assert (counters.hits, counters.misses, counters.evictions) == (whole.hits, whole.misses, whole.evictions)
            assert found.tokens == demands.tokens("decode") == 40 * 3 + 30 and found.steps == 70
            assert found.bytes_read == found.misses * 100


def test_the_reserve_is_one_layers_demand_of_all_streams(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for sequences, expected in ((1, 2), (2, 4), (5, 6)):
        rows = random_rows(rng, layers=2, n_expert=6, top_k=2, sequences=sequences, tokens=3)
        with TraceReader(write_rows(tmp_path / f"t{sequences}", rows, info(2, 6, 2))) as reader:
            assert reserve(Demands.of(reader)) == expected


# --- schedules by hand


def test_arithmetic_of_what_is_resident_runs_while_the_rest_arrives() -> None:
    one = info(1, 8, 2)
    # a layer 10 ms, an expert 3 ms, a read 5 ms
    machine = Speeds(read_rate=SIZE / 0.005, layer_s=0.010, expert_s=0.003)
    result = replayed(decoding([[0, 1], [1, 2], [3, 4]], one), "none", 8, machine, of=one)
    # two reads: 5, then 3 of arithmetic and 2 more of waiting; one read: 3 of arithmetic first; then two again
    assert result.wait_s == pytest.approx(0.007 + 0.002 + 0.007)
    assert result.compute_s == pytest.approx(3 * 0.010 + 6 * 0.003)
    assert (result.hits, result.misses) == (1, 5)
    assert result.tok_per_s == pytest.approx(3 / (0.016 + 0.048))


def test_every_layer_of_every_step_is_paid_once() -> None:
    own = TraceInfo("", "test", "dense ends", 6, (1, 2, 4), 8, 2, (SIZE, 2 * SIZE, SIZE), "a test")
    machine = Speeds(math.inf, layer_s=0.5, expert_s=0.25, step_s=0.125, layer_host_s=2.0)
    result = replayed(popular(10, 1, own), "none", 8, machine, of=own)
    assert result.compute_s == 10 * (6 * 0.5 + 3 * 2 * 0.25)
    assert result.host_s == 10 * (0.125 + 6 * 2.0)
    assert (result.wait_s, result.tokens, result.steps) == (0, 10, 10)


def test_bytes_are_counted_by_layer() -> None:
    own = TraceInfo("", "test", "two sizes", 2, (0, 1), 4, 1, (100, 250), "a test")
    result = replayed(decoding([[0], [0], [1], [0]], own), "none", 4, speeds(), of=own)
    assert result.bytes_read == 100 + 250 + 100


def test_a_perfect_predictor_with_time_enough_never_waits_after_its_first_layer() -> None:
    machine = Speeds(read_rate=SIZE / 1e-4, layer_s=1e-3, expert_s=0.0)
    result = replayed(popular(50, 2), "perfect", 3 * N_EXPERT, machine)
    assert result.wait_s == pytest.approx(TOP_K * 1e-4)  # nothing was known before the first
    assert (result.misses, result.late_hits, result.recall_at_k) == (TOP_K, 0, 1.0)
    assert result.prefetch_used == result.prefetch_issued > 0
    assert result.lead_ms == pytest.approx((1.0, 1.0))  # a layer ahead is a layer's time


def test_a_token_ahead_is_a_tokens_time() -> None:
    rng = random.Random(1)
    fresh = iter(rng.sample(range(400), 300))
    own = info(3, 400, 2)
    executions = decoding([[next(fresh), next(fresh)] for _ in range(90)], own)  # none is ever used twice
    machine = Speeds(read_rate=SIZE / 1e-4, layer_s=1e-3, expert_s=0.0)
    near, far = (replayed(executions, name, 40, machine, of=own) for name in ("perfect", "perfect-token"))
    assert near.lead_ms == pytest.approx((1.0, 1.0)) and far.lead_ms == pytest.approx((3.0, 3.0), rel=0.2)
    assert near.misses == 2 and far.misses == 6
    assert replayed(executions, "previous-token", 40, machine, of=own).prefetch_used == 0


def test_late_reads_are_late_hits_and_still_save_time() -> None:
    executions, slow = popular(60, 3), speeds(0.5e5)
    none, perfect = (replayed(executions, name, 20, slow) for name in ("none", "perfect"))
    assert perfect.late_hits >= perfect.prefetch_late > 0
    assert perfect.prefetch_late <= perfect.prefetch_used
    assert perfect.wait_s < none.wait_s
    assert perfect.tok_per_s is not None and none.tok_per_s is not None and perfect.tok_per_s > none.tok_per_s


def test_wrong_guesses_are_wasted_reads() -> None:
    executions = popular(100, 4)
    good, poor = (replayed(executions, "next-layer", 18, speeds(), recall=recall) for recall in (1.0, 0.2))
    assert poor.prefetch_wasted > 2 * good.prefetch_wasted
    assert poor.bytes_read > good.bytes_read
    assert (good.recall_at_k, poor.recall_at_k) == (1.0, pytest.approx(0.2, abs=0.06))  # of 800: 4 standard deviations


def test_guesses_that_never_began_are_given_up() -> None:
    """Only wrong ones, on a disk that reads one expert while a hundred layers run: their bytes are not read."""
    own = info(3, 200, 2)
    result = replayed(decoding([[0, 1]] * 300, own), "next-layer", 60, speeds(SIZE / 0.2, depth=1), of=own, recall=0.0)
    assert (result.misses, result.prefetch_used) == (6, 0)
    assert result.prefetch_issued > 300
    assert result.bytes_read < 20 * SIZE
    assert result.prefetch_wasted > result.prefetch_issued - 20


def test_a_layers_router_sees_no_later_token() -> None:
    fresh = iter(range(400))
    own = info(4, 400, 1)
    executions = decoding([[next(fresh)] for _ in range(80)], own)
    result = replayed(executions, "next-layer", 60, speeds(1e6), of=own, recall=1.0)
    assert result.misses == 20  # layer 0 of each token
    assert result.prefetch_used == 60


def test_nothing_is_read_ahead_across_a_prompt() -> None:
    fresh = iter(range(400))
    own = info(2, 400, 1)

    def text(first_step: int) -> list[Execution]:
        return decoding([[next(fresh)] for _ in range(8)], own, first_step)

    prompt = [
        Execution(4, "prefill", layer, 8 + layer, [ExpertKey(layer, e) for e in range(300, 309)], 9, 9, 1, 9)
        for layer in range(2)
    ]
    result = replayed([*text(0), *prompt, *text(5)], "perfect", 60, speeds(1e6), of=own)
    assert (result.tokens, result.demands, result.misses) == (8, 16, 2)  # what begins each text
    alone = replayed(text(0), "perfect", 60, speeds(1e6), of=own)
    assert result.compute_s == pytest.approx(2 * alone.compute_s)


# --- what must always hold


@settings(deadline=None, max_examples=60)
@given(
    sets=st.lists(st.sets(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=45),
    n_slots=st.integers(1, 14),
    rates=st.lists(st.floats(1e2, 1e7), min_size=2, max_size=3),
    latency=st.sampled_from([0.0, 1e-4, 1e-2]),
    depth=st.integers(1, 3),
)
def test_a_slower_disk_is_never_faster_on_demand(
    sets: list[set[int]], n_slots: int, rates: list[float], latency: float, depth: int
) -> None:
    own = info(3, 8, 4)
    executions = decoding([sorted(each) for each in sets], own)
    found = [
        replayed(executions, "none", n_slots, speeds(rate, latency_s=latency, depth=depth), of=own)
        for rate in sorted(rates)
    ]
    for slower, faster in pairwise(found):
        assert slower.wait_s >= faster.wait_s * (1 - 1e-9) - 1e-12
        assert slower.misses == faster.misses


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_much_slower_disk_is_slower_with_reads_ahead_too(name: str) -> None:
    executions = popular(60, 5)
    found = [replayed(executions, name, 20, speeds(rate)).tok_per_s or 0 for rate in (1e3, 1e4, 1e5, 1e6)]
    assert found == sorted(found) and found[0] < found[-1]


@settings(deadline=None, max_examples=150)
@given(
    sets=st.lists(st.sets(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=40),
    n_slots=st.integers(1, 16),
    name=st.sampled_from(sorted(PREDICTORS)),
    policy=st.sampled_from(sorted(POLICIES)),
    rate=st.sampled_from([1e3, 3e4, 1e5, 1e6, math.inf]),
    depth=st.integers(1, 5),
    latency=st.sampled_from([0.0, 2e-3]),
    beside=st.sampled_from([1.0, 0.6]),
    prompts=st.sets(st.integers(0, 12), max_size=3),
)
def test_invariants_hold_after_every_event(
    sets: list[set[int]], n_slots: int, name: str, policy: str, rate: float, depth: int, latency: float, beside: float,
    prompts: set[int],
) -> None:  # fmt: skip
    own = info(3, 8, 3)
    executions = [
        execution._replace(phase="prefill", n_tokens=3) if execution.step in prompts else execution
        for execution in decoding([sorted(each) for each in sets], own)
    ]
    machine = speeds(rate, depth=depth, latency_s=latency, compute_beside=beside, read_beside=0.9)
    result = replayed(executions, name, n_slots, machine, policy=policy, of=own, recall=0.5, checked=True)
    decode = [execution for execution in executions if execution.phase == "decode"]
    assert result.hits + result.late_hits + result.misses == result.demands == sum(len(e.keys) for e in decode)
    assert result.prefetch_issued == result.prefetch_used + result.prefetch_wasted + result.prefetch_unused
    assert 0 <= result.prefetch_late <= result.prefetch_used and result.prefetch_late <= result.late_hits
    assert SIZE * result.misses <= result.bytes_read <= SIZE * (result.misses + result.prefetch_issued)
    assert result.tokens == result.steps == len({execution.step for execution in decode})
    assert (result.lead_ms is None) or 0 <= result.lead_ms.p10 <= result.lead_ms.p50
    if rate == math.inf and not latency:
        assert result.wait_s == result.late_hits == 0
    if decode:
        least = sum(len(e.keys) for e in decode) * machine.expert_s
        assert result.compute_s >= least * (1 - 1e-9)
        assert result.tok_per_s == pytest.approx(result.tokens / (result.compute_s + result.wait_s + result.host_s))
    else:
        assert result.tok_per_s is None and result.hit_rate is None


def test_a_replay_repeats_exactly() -> None:
    first, second = (replayed(popular(40, 6), "next-layer", 16, speeds()).as_dict() for _ in range(2))
    assert first == second and first["lead_ms"].keys() == {"p10", "p50"}


def test_rows_of_a_step_are_tokens(tmp_path: Path) -> None:
    rows = [Row(step, sequence, step, 0, (step % 4, 5)) for step in range(6) for sequence in range(2)]
    with TraceReader(write_rows(tmp_path / "t", rows, info(1, 6, 2))) as reader:
        result = replayed(list(Demands.of(reader)), "none", 6, speeds(), of=info(1, 6, 2))
    assert (result.tokens, result.steps, result.demands) == (12, 6, 12)
