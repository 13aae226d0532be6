"""Predictions against cases worked out by hand, and their direction in bandwidth, memory and hit rate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from profiles import profile

from sluice.plan.bandwidth import (
    bottleneck,
    predict_counters,
    predict_decode,
    predict_prefill,
    prompt_cost,
    remedies,
)
from sluice.plan.profile import MachineProfile, StepCost
from sluice.plan.timeline import Times
from sluice.plan.workload import PAPER_HITS, PAPER_SHARE, Absences, AssumedWorkload


def absences(absent: float, steps: int = 3) -> Absences:
    """Each layer needs 4 experts and lacks `absent`."""
    shape = (steps, 10)
    return Absences(np.full(shape, 4.0), np.full(shape, absent), 0.0)


def speed(of: MachineProfile, absent: float, *, prefetch: bool = False, disk: float = 1.0) -> float:
    predicted = predict_decode(of, absences(absent), prefetch=prefetch, disk=disk)
    assert predicted is not None
    return predicted.tok_per_s


def test_all_resident_is_what_was_measured_resident() -> None:
    predicted = predict_decode(profile(sampling_s=0.009), absences(0))
    assert predicted is not None
    assert predicted.tok_per_s == pytest.approx(1 / (0.041 + 0.040 + 0.010 + 0.009))
    assert (predicted.compute_s, predicted.host_s) == (pytest.approx(0.081), pytest.approx(0.019))
    assert predicted.wait_s == predicted.read_s == predicted.bytes_per_step == 0


def test_all_absent_on_demand() -> None:
    # a layer: 4 loads of 1 ms, then the last expert's 1 ms; the other three experts ran under the loads
    predicted = predict_decode(profile(), absences(4))
    assert predicted is not None
    assert 1 / predicted.tok_per_s == pytest.approx(0.041 + 0.010 + 10 * (4 * 0.001 + 0.001))
    assert predicted.bytes_per_step == pytest.approx(40 * 1e6)
    assert predicted.read_s == pytest.approx(0.040)


def test_a_disk_that_is_the_bound() -> None:
    slow = predict_decode(profile(load_b_s=0.1), absences(2), prefetch=True)
    assert slow is not None
    assert slow.bottleneck == "disk"
    assert 1 / slow.tok_per_s == pytest.approx(2 * 10 * 0.1, rel=0.1)  # bytes ÷ bandwidth, and little else


def test_reading_ahead_hides_reads_and_costs_its_own_arithmetic() -> None:
    assert speed(profile(), 2, prefetch=True) == pytest.approx(1 / (0.044 + 0.040 + 0.012), rel=0.03)
    never = profile(prefetch=None)
    assert speed(never, 2, prefetch=True) == speed(never, 2)


def test_more_bandwidth_and_more_hits_are_never_slower() -> None:
    contended = profile(read_beside=0.7, compute_beside=0.8, host_read_s=1e-4)
    for prefetch in (False, True):
        by_disk = [speed(contended, 2, prefetch=prefetch, disk=disk) for disk in (0.1, 0.5, 1, 2, 10)]
        by_hits = [speed(contended, absent, prefetch=prefetch) for absent in (4, 3, 2, 1, 0)]
        assert by_disk == sorted(by_disk) and by_disk[0] < by_disk[-1]
        assert by_hits == sorted(by_hits) and by_hits[0] < by_hits[-1]


def test_contention_costs() -> None:
    assert speed(profile(compute_beside=0.5), 2) < speed(profile(), 2)
    assert speed(profile(read_beside=0.5), 2) < speed(profile(), 2)
    assert speed(profile(compute_beside=0.5, read_beside=0.5), 0) == speed(profile(), 0)


def test_no_steps_no_prediction() -> None:
    nothing = Absences(np.zeros((0, 10)), np.zeros((0, 10)), 0.0)
    assert nothing.hit_rate is None
    assert predict_decode(profile(), nothing) is None
    assert predict_prefill(profile(), nothing, ()) is None
    assert predict_counters(profile(), {"steps": 0}, slots=50) is None
    assert remedies(profile(), nothing) == {}


def test_a_prompt_is_between_the_widths_that_were_measured() -> None:
    assert prompt_cost(profile(), 32).compute_s == pytest.approx(0.5)
    assert prompt_cost(profile(), 80).compute_s == pytest.approx(1.0)
    assert prompt_cost(profile(), 128).host_s == pytest.approx(0.2)
    assert prompt_cost(profile(), 224).compute_s == pytest.approx(2.5)  # along the last line
    assert prompt_cost(profile(), 1).compute_s == pytest.approx(0.081)
    assert prompt_cost(profile(), 10_000).experts == 160  # all there are


def test_a_prompt_that_reads_all_its_experts() -> None:
    resident = Absences(np.full((1, 10), 15.0), np.zeros((1, 10)), 0.0)
    predicted = predict_prefill(profile(), resident, (32,))
    assert predicted is not None and predicted.tok_per_s == pytest.approx(32 / 0.6)
    cold = predict_prefill(profile(load_b_s=0.1), replace(resident, absent=resident.needed), (32,))
    assert cold is not None and cold.bottleneck == "disk"
    assert 32 / cold.tok_per_s == pytest.approx(150 * 0.1, rel=0.05)


def test_counters_of_a_run_give_its_speed() -> None:
    counters = {"steps": 5, "demands": 200, "misses": 60, "prefetch_used": 40, "reads": 100, "evictions": 100}
    predicted = predict_counters(profile(), counters, slots=160)
    assert predicted is not None
    assert predicted.bytes_per_step == pytest.approx(20e6)
    assert speed(profile(), 4) < predicted.tok_per_s < speed(profile(), 0)


@pytest.mark.parametrize("evictions", [0, 40, 100, 120])
def test_reads_that_evicted_nothing_went_into_fresh_memory(evictions: int) -> None:
    counters = {"steps": 5, "demands": 200, "misses": 100, "prefetch_used": 0, "reads": 100, "evictions": evictions}
    predicted = predict_counters(profile(fresh_host_s=0.009), counters, slots=160)
    assert predicted is not None
    assert predicted.fresh_s == pytest.approx(max(0, 100 - evictions) / 5 * 0.009)


def filling(absent: float, slots: int, steps: int = 3) -> Absences:
    """`absences` of a pool that was empty."""
    free = np.maximum(0, slots - 10 * absent * np.arange(steps))
    return replace(absences(absent, steps), free=free)


def test_the_first_reads_of_a_pool_touch_its_memory() -> None:
    touching = profile(fresh_host_s=0.009)
    plain, fresh = predict_decode(touching, absences(2)), predict_decode(touching, filling(2, 30))
    assert plain is not None and fresh is not None
    assert plain.fresh_s == 0 and plain == predict_decode(profile(), absences(2))
    assert fresh.fresh_s == pytest.approx(30 * 0.009 / 3)
    spent = fresh.compute_s + fresh.wait_s + fresh.host_s + fresh.fresh_s
    assert 1 / fresh.tok_per_s == pytest.approx(spent) and spent > 1 / plain.tok_per_s
    assert predict_decode(profile(), filling(2, 30)) == replace(plain)
    slow = predict_decode(profile(fresh_host_s=0.09), filling(2, 1000))
    assert slow is not None and slow.bottleneck == "fresh memory" and slow.fresh_s == pytest.approx(20 * 0.09)
    cold = predict_prefill(touching, filling(2, 30, 1), (32,))
    assert cold is not None and cold.fresh_s == pytest.approx(20 * 0.009)


def test_needless_reads_ahead_touch_memory_too() -> None:
    guessing = profile(fresh_host_s=0.009, recall=0.5)
    few, many = (
        predict_decode(replace(guessing, recall=recall), filling(2, 150), prefetch=True) for recall in (1.0, 0.5)
    )
    assert few is not None and many is not None
    assert few.fresh_s == pytest.approx(20 * 0.009)
    assert few.fresh_s * 1.1 < many.fresh_s < few.fresh_s * 2


def test_all_of_a_long_run_counts_alike() -> None:
    long = filling(1, 5000, 1000)  # full after half of it
    predicted = predict_decode(profile(fresh_host_s=0.009), long)
    assert predicted is not None and predicted.fresh_s == pytest.approx(5000 * 0.009 / 1000, rel=0.02)


def test_the_bottleneck() -> None:
    assert bottleneck(profile(), Times(compute_s=1, wait_s=2, host_s=0)) == "disk"
    assert bottleneck(profile(), Times(compute_s=1, wait_s=0, host_s=2)) == "Python"
    assert bottleneck(profile(), Times(compute_s=1, wait_s=0, host_s=2, fresh_s=3)) == "fresh memory"
    assert bottleneck(profile(), Times(compute_s=2, wait_s=1, host_s=1)) == "arithmetic"  # 0.5 of 20 GB/s
    slow_memory = profile(ram_bytes_per_s=0.6e9)
    assert bottleneck(slow_memory, Times(compute_s=2, wait_s=1, host_s=1)) == "memory"


def test_what_would_help() -> None:
    waiting = remedies(profile(load_b_s=0.1), absences(2))
    assert waiting["a disk twice as fast"] > 1.8
    order = ["memory for all experts", "a disk twice as fast", "arithmetic twice as fast"]
    assert sorted(waiting, key=lambda name: -waiting[name]) == order and min(waiting.values()) >= 1
    empty = remedies(profile(fresh_host_s=0.09), filling(2, 1000))
    assert max(empty, key=lambda name: empty[name]) == "memory for all experts"
    assert empty["memory for all experts"] > empty["memory touched before"] > 5 > empty["a disk twice as fast"]
    computing = remedies(profile(demand=StepCost(1.0, 1.0, 0.0)), absences(0))
    assert computing == {
        "a disk twice as fast": 1.0, "arithmetic twice as fast": pytest.approx(2.0), "memory for all experts": 1.0,
    }  # fmt: skip


def test_the_assumed_hit_rate_is_the_papers_and_nothing_below_one_token() -> None:
    assumed = AssumedWorkload(moe_layers=48, n_expert=128, top_k=8, prompt_tokens=32, prompt_experts=3000)
    assert assumed.hit_rate(round(PAPER_SHARE * 48 * 128)) == pytest.approx(PAPER_HITS, abs=1e-3)
    assert assumed.hit_rate(48 * 128) == 1
    assert assumed.hit_rate(48 * 8 - 1) == 0
    rates = [assumed.hit_rate(slots) for slots in range(384, 6144, 200)]
    assert rates == sorted(rates)
    for slots in (100, 823, 3000, 6144):
        drawn = assumed.absences(slots)
        assert drawn.decode.hit_rate == pytest.approx(assumed.hit_rate(slots), abs=0.01)
        assert not drawn.decode.fresh.any() and not drawn.prefill.fresh.any()
        assert drawn.prefill.absent.sum() == pytest.approx(3000 * (1 - slots / 6144))
    assert "assumed" in assumed.label and "--trace" in assumed.label
