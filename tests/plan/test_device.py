"""Predictions of a model that is divided over a device: between what was measured, and never better for less."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from profiles import profile

from sluice.cli.plan_device import BAR, bar, pictures
from sluice.lab.tiers import TierSlots
from sluice.plan.bandwidth import prompt_cost
from sluice.plan.device import DeviceCosts, Split, predict_split, predict_split_prompts
from sluice.plan.device_prompts import PromptCosts, PromptRun, costs_at, prompt_costs
from sluice.plan.workload import Absences, AssumedWorkload, TierLoad, TierPrompts

# A step of 91 ms on the processor (profiles.py); 80 ms with one layer there, 44 with all ten, 14 with their experts too
COSTS = DeviceCosts("GPU0", layers=10, first_layers=1, first_s=0.080, all_s=0.044, saved_s=0.030 / 40, copy_s=0.001)
# A prompt of 100 tokens on all 160 experts: 4 s with one layer there, 3.1 with all, a second less with their experts;
# of experts that are not there half are uploaded, which saves 5 ms each
PROMPT = PromptCosts(100, first_s=4.0, all_s=3.1, saved_s=1 / 160, upload_s=-0.005, uploaded=0.5)
NO_PROMPTS = TierPrompts(Absences(np.zeros((0, 10)), np.zeros((0, 10)), 0.0), (), [], [], [])


def load(*, above: float = 0.0, absent: float = 0.0, copies: float = 0.0) -> TierLoad:
    needed = np.full((3, 10), 4.0)
    return TierLoad(Absences(needed, np.full((3, 10), absent), 0.5), above, copies, 10 * absent, NO_PROMPTS)


def prompt(
    layers: int,
    *,
    tokens: int = 100,
    above: float = 0.0,
    below: float = 160.0,
    absent: float = 0.0,
    copies: float = 0.0,
) -> dict[str, float] | None:  # fmt: skip
    """Predicted for one prompt step."""
    absences = Absences(np.full((1, 10), 16.0), np.full((1, 10), absent), 0.5)
    found = load()._replace(prompts=TierPrompts(absences, (tokens,), [above], [below], [copies]))
    return predict_split_prompts(profile(), replace(COSTS, prompts=(PROMPT,)), Split(layers, found), prefetch=False)


def seconds(layers: int, **what: float) -> float:
    """Of that step."""
    found = prompt(layers, **what)  # type: ignore[arg-type]
    assert found is not None
    return what.get("tokens", 100) / found["tok_per_s"]


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


def test_a_prompt_that_was_measured_comes_out_again() -> None:
    host = prompt_cost(profile(), 100)
    assert seconds(0, below=0) == pytest.approx(host.compute_s + host.host_s)
    assert seconds(1, below=0) == pytest.approx(4.0)
    assert seconds(10, below=0) == pytest.approx(3.1)
    assert seconds(10, above=160, below=0) == pytest.approx(2.1)
    assert seconds(10, below=160) == pytest.approx(3.1 - 80 * 0.005)
    assert seconds(10, tokens=1, below=0) == pytest.approx(0.044)
    assert seconds(10, above=16000, below=0) == pytest.approx(0.044), "no prompt takes less than a token"


def test_a_prompts_reads_and_copies_cost() -> None:
    assert seconds(10, below=0, copies=100) == pytest.approx(3.1 + 100 * 0.5 * 0.001), "half would be uploaded anyway"
    assert seconds(10, absent=16) > seconds(10, absent=4) >= seconds(10)
    assert predict_split_prompts(profile(), COSTS, Split(10, load()), prefetch=False) is None


def test_what_runs_showed_is_taken_apart() -> None:
    whole = PromptRun(3.0, met=0, below=80, uploads=0, copies=0)
    near = PromptRun(2.0, met=50, below=0, uploads=0, copies=0)  # 20 ms saved each
    # 10 were met, which saved 0.2 s; 5 copies took 0.5 s; 20 uploads saved 0.4 s
    empty = PromptRun(2.9, met=10, below=70, uploads=20, copies=5)
    found = prompt_costs(64, PromptRun(3.5, 0, 80, 0, 0), whole, empty, near, copy_s=0.1)
    assert found == PromptCosts(64, 3.5, 3.0, pytest.approx(0.02), pytest.approx(-0.02), pytest.approx(20 / 70))  # type: ignore[arg-type]
    # a device that holds half of them: 30 met, 40 uploaded
    half = PromptRun(3.0 - 30 * 0.02 - 40 * 0.02, met=30, below=50, uploads=40, copies=0)
    again = prompt_costs(64, PromptRun(3.5, 0, 80, 0, 0), whole, empty._replace(uploads=60, seconds=2.1), half, 0.1)
    assert (again.saved_s, again.upload_s) == (pytest.approx(0.02), pytest.approx(-0.02))
    none_stay = empty._replace(met=0, copies=0, seconds=2.6)
    assert prompt_costs(64, whole, whole, none_stay, none_stay, 0.1).upload_s == pytest.approx(-0.02)
    nothing = prompt_costs(64, whole, whole, whole, whole, copy_s=0.1)
    assert nothing == PromptCosts(64, 3.0, 3.0, 0.0, 0.0, 0.0)


def test_between_widths_costs_lie_on_a_line() -> None:
    points = [PromptCosts(1, 0.1, 0.1, 0.0, 0.0, 0.0), PromptCosts(11, 1.1, 0.6, 0.2, -0.1, 0.8)]
    half = costs_at(points, 6)
    assert (half.first_s, half.all_s, half.saved_s, half.upload_s, half.uploaded) == pytest.approx(
        (0.6, 0.35, 0.1, -0.05, 0.4)
    )
    assert costs_at(points, 21).first_s == pytest.approx(2.1) and costs_at(points, 21).uploaded == 0.8
    falling = [points[0], replace(points[1], all_s=0.05)]
    assert costs_at(falling, 100).all_s == pytest.approx(0.05), "no prompt is faster for being longer"


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
    assert found.prompts.above == [40] and found.prompts.below == [120], "a prompt meets what lies there"
    assert assumed.tiers([], 40).prompts.below == [0], "without slots nothing can be uploaded"
    assert assumed.tiers([TierSlots(range(2), 4)], 40).prompts.below == [28]
    everything = assumed.tiers([TierSlots(range(10), 160)], 4)
    assert everything.above == pytest.approx(40) and everything.read == 0
    assert everything.prompts.below == [0] and not everything.prompts.absences.absent.any()


def test_what_the_budget_leaves_is_called_free() -> None:
    there = {"name": "GPU0", "weights_bytes": 1 << 30, "kv_bytes": 1 << 29, "slots_bytes": 1 << 31, "bytes": 1 << 31,
             "budget_bytes": 5 << 30}  # fmt: skip
    ram = {"dense": 0, "kv": 0, "slots": 1 << 30, "other": 0}
    (name, text), _ = pictures({"device": there, "ram": ram})
    assert name == "GPU0"
    for part in ("weights 1.00G", "KV 512.0M", "experts 2.00G", "graphs 512.0M", "free 1.00G"):
        assert part in text


def test_a_bar_has_its_parts_in_proportion() -> None:
    text = bar({"weights": 1 << 30, "KV": 0, "experts": 3 << 30, "graphs": 0})
    assert text.count("▓") == BAR // 4 + 1 and text.count("░") == BAR * 3 // 4 + 1  # the legend has one of each
    assert "experts 3.00G" in text
