"""Rerouting as a pure function: its rule, written down a second time, and what must hold of any outcome."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.experts.rerouting import Rerouting, divergence, reroute, reroute_together

SCORES = [0.30, 0.25, 0.20, 0.12, 0.08, 0.05]


def test_the_best_with_a_slot_stands_in_at_the_rank_of_the_one_it_replaces() -> None:
    with_slot = {0, 3, 4}.__contains__
    assert reroute(Rerouting(0.15, 1), [0, 1, 2], SCORES, with_slot) == ([0, 3, 4], 2)
    assert reroute(Rerouting(0.12, 1), [0, 1, 2], SCORES, with_slot) == ([0, 1, 3], 1)  # 0.13 apart is too far
    assert reroute(Rerouting(0.07, 1), [0, 1, 2], SCORES, with_slot) == ([0, 1, 2], 0)
    assert reroute(Rerouting(1.0, 3), [0, 1, 2], SCORES, with_slot) == ([0, 1, 2], 0)


def test_the_best_experts_are_kept() -> None:
    with_slot = {3, 4, 5}.__contains__
    assert reroute(Rerouting(1.0, 0), [0, 1, 2], SCORES, with_slot) == ([3, 4, 5], 3)
    assert reroute(Rerouting(1.0, 1), [0, 1, 2], SCORES, with_slot) == ([0, 3, 4], 2)
    assert reroute(Rerouting(1.0, 2), [0, 1, 2], SCORES, with_slot) == ([0, 1, 3], 1)


def test_of_equals_the_lower_id() -> None:
    assert reroute(Rerouting(1.0, 0), [3], [0.1, 0.2, 0.2, 0.5], {1, 2}.__contains__) == ([1], 1)


def test_a_better_score_that_was_not_chosen_is_near_enough() -> None:
    """Families that choose by another number than the score: a bias, groups."""
    assert reroute(Rerouting(1e-9, 0), [2], [0.5, 0.4, 0.1], {1}.__contains__) == ([1], 1)


def test_what_an_earlier_token_must_read_has_a_slot_for_later_ones() -> None:
    rule, scores = Rerouting(1.0, 1), [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]
    found = reroute_together(rule, [[0, 1], [3, 2]], scores, {9}.__contains__, logits=False)
    assert found.ids == [[0, 1], [3, 1]]  # nobody had a slot at first; 0 and 1 are being read, and 1 scores more
    assert found.substituted == 1
    assert found.divergence == divergence(scores[1], [3, 2], [3, 1], logits=False)
    alone = reroute_together(rule, [[3, 2]], scores[1:], {9}.__contains__, logits=False)
    assert (alone.ids, alone.substituted, alone.divergence) == ([[3, 2]], 0, 0.0)


def test_divergence_by_hand() -> None:
    assert divergence(SCORES, [0, 1], [0, 1], logits=False) == 0.0
    p, q = (0.30 / 0.50, 0.20 / 0.50), (0.30 / 0.38, 0.08 / 0.38)
    by_hand = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert divergence(SCORES, [0, 2], [0, 4], logits=False) == pytest.approx(by_hand)
    logits = [2.0, -1.0, 0.0]
    p, q = (1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))), (1 / (1 + math.exp(-3)), 1 / (1 + math.exp(3)))
    by_hand = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert divergence(logits, [0, 2], [0, 1], logits=True) == pytest.approx(by_hand)


@pytest.mark.parametrize("logits", [False, True])
def test_a_weight_that_vanishes_leaves_a_number(logits: bool) -> None:
    scores = [1.0, 0.0, 5e-45] if not logits else [0.0, -2000.0, 1.0]
    assert math.isfinite(divergence(scores, [0, 2], [0, 1], logits=logits))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Rerouting, list[int], list[float], set[int]]:
    n = draw(st.integers(1, 12))
    scores = draw(st.lists(st.sampled_from([i / 16 for i in range(17)]), min_size=n, max_size=n))  # ties are common
    chosen = draw(st.permutations(range(n)))[: draw(st.integers(1, n))]  # best first by some number, not by the score
    rule = Rerouting(draw(st.sampled_from([0.0, 0.05, 0.125, 0.5, 1.0])), draw(st.integers(0, 4)))
    return rule, list(chosen), scores, draw(st.sets(st.integers(0, n - 1)))


@given(cases())
def test_the_rule(case: tuple[Rerouting, list[int], list[float], set[int]]) -> None:
    rule, chosen, scores, slots = case
    final, substituted = reroute(rule, chosen, scores, slots.__contains__)
    free = {e for e in slots if e not in chosen}
    expected = list(chosen)
    for rank, expert in enumerate(chosen):
        if rank < rule.keep or expert in slots or not free or rule.margin == 0:
            continue
        best = min(free, key=lambda e: (-scores[e], e))
        if scores[expert] - scores[best] <= rule.margin:
            expected[rank] = best
            free.remove(best)
    assert final == expected
    assert substituted == sum(a != b for a, b in zip(final, chosen, strict=True))
    assert len(set(final)) == len(final)
    assert len(slots.intersection(final)) >= len(slots.intersection(chosen))  # never more to read


@given(cases(), st.booleans())
def test_a_wider_margin_replaces_no_less(
    case: tuple[Rerouting, list[int], list[float], set[int]], logits: bool
) -> None:
    rule, chosen, scores, slots = case
    final, substituted = reroute(rule, chosen, scores, slots.__contains__)
    wider = reroute(rule._replace(margin=rule.margin + 0.25), chosen, scores, slots.__contains__)
    assert wider[1] >= substituted
    assert divergence(scores, chosen, final, logits=logits) >= 0.0
    assert divergence(scores, chosen, chosen, logits=logits) == 0.0
