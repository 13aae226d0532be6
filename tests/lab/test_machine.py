"""The simulated disk and clock against schedules worked out by hand."""

from __future__ import annotations

import math

import pytest

from sluice.lab.machine import SimulatedMachine, Speeds
from sluice.types import ExpertKey, Read


def machine(**speeds: float) -> SimulatedMachine:
    """Experts of 100 bytes, 100 bytes a second unless told otherwise: a read takes 1 s."""
    given = {"read_rate": 100.0, "layer_s": 0.0, "expert_s": 0.0, "depth": 1} | speeds
    return SimulatedMachine(Speeds(**given), {0: 100})  # type: ignore[arg-type]  # depth


def read(serial: int, deadline: int = 0) -> Read:
    return Read(ExpertKey(0, serial), serial, deadline, serial)


def ends(of: SimulatedMachine) -> list[tuple[int, float]]:
    """(serial, time) of all reads that are outstanding."""
    found = []
    while ended := of.ended(block=True):
        found += [(each.serial, of.now) for each in ended]
    return found


def test_reads_begin_by_deadline_then_in_the_order_of_submission() -> None:
    m = machine()
    for serial, deadline in ((1, 9), (2, 7), (3, 5), (4, 5)):
        m.submit(read(serial, deadline))
    assert ends(m) == [(1, 1), (3, 2), (4, 3), (2, 4)]  # the first found the disk idle
    assert m.wait_s == m.now == 4 and m.bytes_asked == 400


def test_a_promoted_read_comes_sooner_unless_it_has_begun() -> None:
    m = machine()
    reads = [read(serial, deadline) for serial, deadline in ((1, 9), (2, 7), (3, 8))]
    for each in reads:
        m.submit(each)
    m.promote(reads[2], 3)
    m.promote(reads[0], 3)
    m.promote(reads[1], 9)  # later: no promotion
    assert ends(m) == [(1, 1), (3, 2), (2, 3)]


def test_only_what_has_not_begun_can_be_cancelled() -> None:
    m = machine()
    reads = [read(1), read(2), read(3)]
    for each in reads:
        m.submit(each)
    assert [m.cancel(each) for each in reads[:2]] == [False, True]
    assert not m.cancel(reads[1])
    assert m.bytes_asked == 200
    assert ends(m) == [(1, 1), (3, 2)]
    assert not m.cancel(reads[0])


@pytest.mark.parametrize(("depth", "expected"), [(1, [1.5, 3, 4.5]), (2, [1.5, 2.5, 3.5]), (9, [1.5, 2.5, 3.5])])
def test_latencies_of_reads_under_way_pass_at_once_and_bytes_come_one_after_the_other(
    depth: int, expected: list[float]
) -> None:
    m = machine(latency_s=0.5, depth=depth)
    for serial in range(3):
        m.submit(read(serial))
    assert [time for _, time in ends(m)] == expected


def test_idle_time_earns_nothing() -> None:
    m = machine()
    m.compute(50)
    m.submit(read(1))
    assert ends(m) == [(1, 51)]
    assert (m.compute_s, m.wait_s, m.host_s) == (50, 1, 0)


def test_reads_run_under_arithmetic_and_other_work() -> None:
    m = machine(read_host_s=0.25)
    m.submit(read(1))
    m.submit(read(2))
    assert m.host_s == m.now == 0.5
    m.compute(1)
    assert [each.serial for each in m.ended()] == [1]
    m.compute(0.25)
    assert m.ended() == []
    assert ends(m) == [(2, 2)]
    assert (m.compute_s, m.wait_s, m.host_s) == (1.25, 0.25, 0.5)


def test_beside_each_other_reading_and_arithmetic_are_slower() -> None:
    m = machine(compute_beside=0.5, read_beside=0.8)
    m.submit(read(1))
    m.compute(2)  # 1.25 s for the read, in which 0.625 s of the arithmetic are done
    assert m.now == m.compute_s == pytest.approx(1.25 + 2 - 0.625)
    assert [each.serial for each in m.ended()] == [1]
    m.submit(read(2))
    m.compute(0.25)  # 0.5 s, in which 0.4 s of the read are done
    began = m.now
    assert [serial for serial, _ in ends(m)] == [2]
    assert m.now - began == pytest.approx(0.6)


def test_a_disk_of_no_limit_takes_no_time() -> None:
    m = machine(read_rate=math.inf)
    m.submit(read(1))
    assert [each.serial for each in m.ended(block=True)] == [1]
    assert m.now == 0


def test_settling_costs_the_thread_nothing() -> None:
    m = machine()
    for serial in range(3):
        m.submit(read(serial))
    assert [each.serial for each in m.settle()] == [0, 1, 2]
    assert (m.now, m.wait_s, m.ended(block=True)) == (0, 0, [])
