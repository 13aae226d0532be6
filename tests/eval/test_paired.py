"""Intervals, tests and power of paired scores: against published figures, brute force, and samples drawn anew."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sluice.eval import paired


def test_the_interval_of_proportions_is_tangos() -> None:
    # where a published table gives them to four digits (Newcombe 1998, Statistics in Medicine 17:2635, its example)
    low, high = paired.tango(12, 2, 50)
    assert 0.05 < low < 0.07 and 0.33 < high < 0.35
    # with nothing that differs it is ± z² ÷ (n + z²), and never a point
    low, high = paired.tango(0, 0, 100)
    edge = paired.Z**2 / (100 + paired.Z**2)
    assert (low, high) == (pytest.approx(-edge), pytest.approx(edge))


@pytest.mark.parametrize("counts", [(12, 2, 50), (0, 3, 20), (7, 0, 7), (1, 1, 2), (40, 10, 1000)], ids=str)
def test_the_score_test_is_at_its_limit_where_the_interval_ends(counts: tuple[int, int, int]) -> None:
    worse, better, n = counts
    for sign, delta in zip((1, -1), paired.tango(*counts), strict=True):
        if abs(delta) == 1:
            continue
        # the likelihood's peak under that difference, by looking everywhere
        rare = np.linspace(max(0.0, -delta), (1 - delta) / 2, 400_001)[1:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = (
                worse * np.log(rare + delta)
                + better * np.log(rare)
                + (n - worse - better) * np.log(1 - 2 * rare - delta)
            )
        best = rare[np.nanargmax(logs)]
        z = (worse - better - n * delta) / math.sqrt(n * (2 * best + delta - delta**2))
        assert z == pytest.approx(sign * paired.Z, rel=2e-3)


def test_mcnemar_counts_coin_tosses() -> None:
    assert paired.mcnemar(0, 0) == 1.0
    assert paired.mcnemar(5, 0) == pytest.approx(2 / 32)
    assert paired.mcnemar(1, 4) == paired.mcnemar(4, 1) == pytest.approx(2 * 6 / 32)
    assert paired.mcnemar(3, 3) == 1.0


def test_right_and_wrong_items() -> None:
    first, second = [1] * 60 + [0] * 40, [1] * 50 + [0] * 45 + [1] * 5
    found = paired.compare(first, second)
    assert (found.worse, found.better, found.items) == (10, 5, 100)
    assert found.lost == pytest.approx(0.05) and found.low < found.lost < found.high
    assert (found.interval, found.test) == ("Tango score", "McNemar exact")
    assert found.p == pytest.approx(paired.mcnemar(10, 5))
    mirrored = paired.compare(second, first)
    assert (mirrored.lost, mirrored.low, mirrored.high) == pytest.approx((-found.lost, -found.high, -found.low))
    assert mirrored.p == found.p and mirrored.detectable == found.detectable


def test_what_a_sample_shows_is_shown_in_eight_of_ten() -> None:
    n, share = 800, 0.1
    delta = paired._least(lambda d: paired._pairs_needed(d, share), n)
    assert delta is not None and paired._pairs_needed(delta, share) == pytest.approx(n, rel=1e-6)
    rng = np.random.default_rng(3)
    drawn = rng.multinomial(n, ((share + delta) / 2, (share - delta) / 2, 1 - share), size=2000)
    found = np.mean([paired.mcnemar(worse, better) < 0.05 for worse, better, _ in drawn.tolist()])
    assert 0.74 < found < 0.84  # the exact test is a little shy
    same = paired.compare([1, 0] * 50, [1, 0] * 50)
    assert (same.lost, same.p, same.items_needed) == (0.0, 1.0, None)
    assert same.detectable is not None and 0.05 < same.detectable < 0.1  # as if no more differed than must
    assert paired.compare([1], [1]).detectable is None


def test_scores_that_are_no_proportions() -> None:
    rng = np.random.default_rng(5)
    first = rng.normal(0, 1, 200)
    found = paired.compare(list(first), list(first - 0.1 + rng.normal(0, 0.2, 200)))
    assert found.interval == "bootstrap over items" and found.low < 0.1 < found.high
    assert found.high - found.low == pytest.approx(2 * paired.Z * 0.2 / math.sqrt(200), rel=0.2)
    assert found.p < 0.01 and found.test.startswith("sign-flip")
    assert found.detectable == pytest.approx(2.8016 * 0.2 / math.sqrt(200), rel=0.2)
    few = paired.compare([3.0, 2.0, 5.0], [1.0, 1.0, 1.0])
    assert (few.p, few.test) == (2 / 8, "sign-flip exact")
    assert paired.compare([2.0, 2.0], [2.0, 2.0]).p == 1.0


def test_intervals_of_one_way() -> None:
    assert paired.mean_interval([0] * 10) == pytest.approx((0.0, 0.2775), abs=1e-4)  # Wilson's, as tables have it
    low, high = paired.mean_interval([1, 0] * 50)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert paired.mean_interval([2.0, 2.0]) == (2.0, 2.0)


def test_several_tasks_together() -> None:
    one = paired.compare([1] * 60 + [0] * 40, [1] * 50 + [0] * 45 + [1] * 5)
    none = paired.compare([1, 0] * 50, [1, 0] * 50)
    lost, low, high = paired.mean_of([one, none])
    assert lost == pytest.approx(one.lost / 2)
    assert high - lost == pytest.approx(math.hypot(one.high - one.lost, none.high) / 2)
    assert lost - low == pytest.approx(math.hypot(one.lost - one.low, none.low) / 2)
    assert paired.mean_of([one]) == pytest.approx((one.lost, one.low, one.high))


def test_what_is_no_pair_is_refused() -> None:
    for first, second in (([], []), ([1], [1, 0])):
        with pytest.raises(ValueError, match="no pairs"):
            paired.compare(first, second)
