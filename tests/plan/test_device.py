"""Predictions of a model that is divided over a device: between what was measured, and never better for less."""

from __future__ import annotations

import numpy as np
import pytest
from profiles import profile

from sluice.cli.plan_device import BAR, bar
from sluice.lab.tiers import TierSlots
from sluice.plan.device import DeviceCosts, Split, predict_split
from sluice.plan.workload import Absences, AssumedWorkload, TierLoad

# A step of 91 ms on the processor (profiles.py); 80 ms with one layer there, 44 with all ten, 14 with their experts too
COSTS = DeviceCosts("GPU0", layers=10, first_layers=1, first_s=0.080, all_s=0.044, saved_s=0.030 / 40, copy_s=0.001)


def load(*, above: float = 0.0, absent: float = 0.0, copies: float = 0.0) -> TierLoad:
    needed = np.full((3, 10), 4.0)
    return TierLoad(Absences(needed, np.full((3, 10), absent), 0.5), above, copies, 10 * absent)


def speed(layers: int, **what: float) -> float:
    found = predict_split(profile(), COSTS, Split(layers, load(**what)), prefetch=False)
    assert found is not None
    return found["tok_per_s"]


def test_what_was_measured_comes_out_again() -> None:
    assert speed(0) == pytest.approx(1 / 0.091)
    assert speed(1) == pytest.approx(1 / 0.080)
    assert speed(10) == pytest.approx(1 / 0.044)
    assert speed(10, above=40) == pytest.approx(1 / 0.014)


def test_in_between_it_is_in_between() -> None:
    assert speed(1) < speed(4) < speed(10) < speed(10, above=10) < speed(10, above=40)
    assert 1 / speed(4) == pytest.approx(0.080 - 0.036 * 3 / 9)


def test_reads_and_copies_cost() -> None:
    assert 1 / speed(10, copies=5) == pytest.approx(0.044 + 0.005)
    # three reads of 1 ms are hidden by arithmetic of 1 ms an expert, the fourth is not
    assert speed(10, absent=4) < speed(10, absent=3) <= speed(10)
    found = predict_split(profile(), COSTS, Split(10, load(absent=4)), prefetch=False)
    assert found is not None and found["bytes_per_step"] == pytest.approx(40e6) and found["reads_s"] > 0


def test_the_bottleneck_is_what_takes_longest() -> None:
    def bottleneck(disk: float = 1.0, **what: float) -> str:
        found = predict_split(profile(), COSTS, Split(10, load(**what)), prefetch=False, disk=disk)
        assert found is not None
        return found["bottleneck"]

    assert bottleneck() == "arithmetic"
    assert bottleneck(above=40, copies=60) == "copies"
    assert bottleneck(0.2, above=40, absent=4) == "disk"


def test_the_assumed_hits_of_both_memories_are_those_of_one_as_large() -> None:
    assumed = AssumedWorkload(10, 16, 4, 128, 160)
    found = assumed.tiers([TierSlots(range(10), 40)], 40)
    assert found.absences.absent.mean() == pytest.approx(assumed.absences(80).decode.absent.mean())
    assert 0 < found.above < 40 and found.copies == 0
    everything = assumed.tiers([TierSlots(range(10), 160)], 4)
    assert everything.above == pytest.approx(40) and everything.read == 0


def test_a_bar_has_its_parts_in_proportion() -> None:
    text = bar({"weights": 1 << 30, "KV": 0, "experts": 3 << 30, "graphs": 0})
    assert text.count("▓") == BAR // 4 + 1 and text.count("░") == BAR * 3 // 4 + 1  # the legend has one of each
    assert "experts 3.00G" in text
