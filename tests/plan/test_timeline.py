"""A step's time against cases worked out by hand, and its direction in every cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.plan.timeline import Costs, step_times

# seconds as small whole numbers, so that a case can be followed
PLAIN = Costs(segment_s=10, expert_s=2, layer_s=1, read_s=0, step_s=5, load_s=3)


def test_nothing_absent_is_arithmetic_and_python() -> None:
    times = step_times([4, 4], [0, 0], PLAIN)
    assert times.compute_s == 3 * 10 + 2 * 4 * 2
    assert times.host_s == 2 * 1 + 5
    assert times.wait_s == 0 == times.reads


@pytest.mark.parametrize(
    ("k", "m", "load_s", "layer_s"),
    [
        (4, 1, 3, 8),  # the read ends within the resident experts' 6 seconds: 4 × 2
        (4, 1, 7, 9),  # it ends after 7, then the expert's 2
        (4, 4, 1, 9),  # nothing to do until the first is there: 1 + 4 × 2
        (4, 4, 3, 14),  # the disk sets the pace: 4 × 3 + 2
        (4, 3, 2, 8),  # arrivals at 2, 4, 6 are just in time after the resident one
    ],
)
def test_reads_run_under_the_resident_experts(k: int, m: int, load_s: float, layer_s: float) -> None:
    times = step_times([k], [m], replace(PLAIN, load_s=load_s))
    experts_s = times.wall_s - (2 * 10 + 1 + 5)
    assert experts_s == pytest.approx(layer_s)
    assert experts_s == pytest.approx(max(k * 2, load_s + m * 2, m * load_s + 2))  # the docstring's formula
    assert times.reads == m


def test_with_perfect_prediction_reads_run_under_the_layer_before() -> None:
    costs = replace(PLAIN, load_s=3)
    on_demand = step_times([4] * 3, [0, 4, 4], costs)
    ahead = step_times([4] * 3, [0, 4, 4], costs, recall=1.0)
    assert on_demand.wait_s == pytest.approx(2 * (4 * 3 + 2 - 4 * 2))
    # the second layer's 12 seconds of reads, and half of the third's, begin before the first one's experts
    assert ahead.wait_s == 0
    assert ahead.compute_s == on_demand.compute_s and ahead.reads == on_demand.reads


def test_what_is_not_predicted_is_read_on_demand() -> None:
    none = step_times([4, 4], [2, 2], PLAIN, recall=0.0)
    assert none.wait_s == pytest.approx(step_times([4, 4], [2, 2], PLAIN).wait_s)


def test_wrong_predictions_cost_reads_that_nobody_waits_for() -> None:
    right = step_times([4, 4], [0, 0], PLAIN, recall=0.5)
    wrong = step_times([4, 4], [0, 0], PLAIN, recall=0.5, needless=[0, 1])
    assert wrong.reads == 1
    assert wrong.wait_s == right.wait_s == 0


def test_both_slow_down_while_both_are_busy() -> None:
    costs = Costs(segment_s=0, expert_s=2, layer_s=0, read_s=0, step_s=0, load_s=4, compute_beside=0.5, read_beside=0.5)
    times = step_times([2], [1], costs)
    # the resident expert takes 4 seconds instead of 2, in which half of the read comes; 2 more seconds for the rest
    assert times.compute_s == pytest.approx(4 + 2)
    assert times.wait_s == pytest.approx(2)


def test_a_read_costs_python() -> None:
    assert step_times([4], [3], replace(PLAIN, read_s=0.5)).host_s == pytest.approx(1 + 5 + 3 * 0.5)


def test_fresh_memory_costs_the_main_thread_and_reads_go_on_meanwhile() -> None:
    costs = replace(PLAIN, fresh_host_s=9)
    used, half = step_times([4], [4], costs), step_times([4], [4], costs, fresh=[0.5])
    assert used.fresh_s == 0
    assert half.fresh_s == 4 * 0.5 * 9
    assert (half.compute_s, half.host_s, half.reads) == (used.compute_s, used.host_s, used.reads)
    # in those 18 seconds the disk reads all that the step waited for before: 3 until the first came, 1 for each other
    assert used.wait_s == pytest.approx(3 + 3 * 1)
    assert half.wait_s == 0
    assert half.wall_s == pytest.approx(used.wall_s + 18 - 6)


def test_fresh_memory_in_the_load_is_waited_for() -> None:
    costs = replace(PLAIN, fresh_load_s=6)
    used, fresh = step_times([4], [4], costs), step_times([4], [4], costs, fresh=[1])
    assert fresh.wall_s == pytest.approx(used.wall_s + 4 * 6)  # the disk set the pace already
    assert fresh.wait_s + fresh.fresh_s == pytest.approx(used.wait_s + 4 * 6)
    assert fresh.fresh_s == pytest.approx((fresh.wait_s + fresh.fresh_s) * 6 / 9)
    hidden = step_times([4], [1], replace(costs, fresh_load_s=2), fresh=[1])
    assert hidden.wait_s == hidden.fresh_s == 0  # 5 seconds under 6 of the resident experts


def test_needless_reads_touch_fresh_memory_too() -> None:
    costs = replace(PLAIN, fresh_host_s=9)
    times = step_times([4, 4], [0, 0], costs, recall=0.5, needless=[0, 2], fresh=[0, 0.5])
    assert times.fresh_s == 9 and times.wait_s == 0


shares = st.floats(0.2, 1)
seconds = st.floats(0.001, 1)
layers = st.lists(st.integers(0, 4), min_size=1, max_size=6)
recalls = st.none() | st.floats(0, 1)
costs = st.builds(Costs, seconds, seconds, seconds, seconds, seconds, seconds, shares, shares, seconds, seconds)


@given(costs, layers, recalls)
def test_a_step_takes_no_less_than_its_arithmetic_and_its_reads(costs: Costs, absent: list[int], recall: float) -> None:
    times = step_times([4] * len(absent), absent, costs, recall=recall)
    arithmetic = costs.segment_s * (len(absent) + 1) + 4 * len(absent) * costs.expert_s
    assert times.compute_s >= arithmetic * (1 - 1e-9)
    assert times.wall_s >= sum(absent) * costs.load_s * (1 - 1e-9)
    assert times.reads == pytest.approx(sum(absent))


@given(costs, layers, recalls)
def test_fresh_memory_never_helps_nor_costs_more_than_its_touches(
    costs: Costs, absent: list[int], recall: float
) -> None:
    needed, n = [4] * len(absent), sum(absent)
    fresh = step_times(needed, absent, costs, recall=recall, fresh=[1] * len(absent))
    most = n * (costs.fresh_host_s + costs.fresh_load_s)
    assert n * costs.fresh_host_s * (1 - 1e-9) <= fresh.fresh_s <= most * (1 + 1e-9)
    # where reading slows arithmetic down, a touch that holds arithmetic up until the read is over may even help
    apart = replace(costs, compute_beside=1.0, read_beside=1.0)
    used = step_times(needed, absent, apart, recall=recall)
    fresh = step_times(needed, absent, apart, recall=recall, fresh=[1] * len(absent))
    assert used.wall_s * (1 - 1e-9) <= fresh.wall_s


@given(costs, layers, recalls)
def test_a_faster_disk_and_fewer_absences_never_take_longer(costs: Costs, absent: list[int], recall: float) -> None:
    def wall_s(costs: Costs, absent: list[int]) -> float:
        return step_times([4] * len(absent), absent, costs, recall=recall).wall_s

    now = wall_s(costs, absent)
    assert wall_s(replace(costs, load_s=costs.load_s / 2), absent) <= now * (1 + 1e-9)
    assert wall_s(replace(costs, expert_s=costs.expert_s / 2), absent) <= now * (1 + 1e-9)
    if recall is None:
        assert wall_s(costs, [max(0, m - 1) for m in absent]) <= now * (1 + 1e-9)
