from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from sluice.errors import InputError
from sluice.experts.predictors import (
    PREDICTORS,
    NextLayer,
    Popularity,
    PreviousToken,
    Recall,
    make_predictor,
    top_experts,
)


def test_previous_token_remembers_each_layer() -> None:
    predictor = PreviousToken()
    assert predictor.predict(1, [5, 6], 1) == []
    predictor.observe(0, [4, 2])
    predictor.observe(1, (7,))
    predictor.observe(0, [3, 1])
    assert (predictor.predict(0, [8, 9], 1), predictor.predict(1, [8, 9], 1)) == ([3, 1], [7])
    assert predictor.predict(0, [8], 1) == [3]


def test_popularity_ranks_what_was_chosen_most_often_in_that_layer() -> None:
    predictor = Popularity(6)
    assert predictor.predict(0, [5], 1) == []
    for chosen in ([1, 4], [4, 5], [4, 5], [0, 4]):
        predictor.observe(0, chosen)
    predictor.observe(1, [2])
    assert predictor.predict(0, [2, 3], 1) == [4, 5]
    assert predictor.predict(1, [4], 1) == [2]


def test_draws_go_with_popularity_and_leave_out_the_excluded() -> None:
    predictor = Popularity(5)
    for _ in range(99):
        predictor.observe(0, [1, 3])
    predictor.observe(0, [2])
    rng = Random(1)
    first = Counter(predictor.draw(0, 1, [3], rng)[0] for _ in range(500))
    assert 3 not in first and first[1] > 0.9 * 500  # 100 of 104
    assert sorted(predictor.draw(0, 9, [3, 0], rng)) == [1, 2, 4]
    assert predictor.draw(0, 2, range(5), rng) == []


@pytest.mark.parametrize(("distance", "expected"), [(1, 0.8), (2, 0.64)])
def test_next_layer_guesses_with_the_recall_it_was_given(distance: int, expected: float) -> None:
    predictor, rng, recall = NextLayer(32, 0.8, seed=3), Random(2), Recall()
    for _ in range(2000):
        coming = sorted(rng.sample(range(32), 4))
        guess = predictor.predict(7, coming, distance)
        assert len(guess) == len(set(guess)) == 4
        assert [expert in coming for expert in guess] == sorted((e in coming for e in guess), reverse=True)
        recall.observe(guess, coming)
        predictor.observe(7, coming)
    assert recall.recall_at_k == pytest.approx(expected, abs=0.02)  # 8000 draws: 4 standard deviations or more


def test_next_layer_depends_on_its_seed_alone() -> None:
    def guesses(seed: int) -> list[list[int]]:
        predictor = NextLayer(16, 0.5, seed)
        return [predictor.predict(0, [1, 2, 3], 1) for _ in range(20)]

    assert guesses(1) == guesses(1) != guesses(2)


def test_next_layer_with_no_wrong_expert_to_guess_guesses_fewer() -> None:
    predictor = NextLayer(2, 0.0, seed=0)
    assert predictor.predict(0, [0, 1], 1) == []
    assert predictor.predict(0, [1], 1) == [0]
    assert NextLayer(2, 1.0, seed=0).predict(0, [0, 1], 2) == [0, 1]


@pytest.mark.parametrize("name", PREDICTORS)
def test_every_predictor_keeps_to_the_contract(name: str) -> None:
    predictor, rng = make_predictor(name, n_layers=3, n_experts=8), Random(5)
    assert all(distance >= 1 and 0 < share <= 1 for distance, share in predictor.ahead.items())
    for _ in range(50):
        for layer in range(3):
            for distance in predictor.ahead:
                coming = sorted(rng.sample(range(8), 3))
                guess = predictor.predict(layer, coming, distance)
                assert len(set(guess)) == len(guess) <= 3 and set(guess) <= set(range(8))
            predictor.observe(layer, sorted(rng.sample(range(8), 3)))


def test_perfect_predictors_know_what_comes_at_their_distance() -> None:
    near, far = (make_predictor(name, n_layers=5, n_experts=8) for name in ("perfect", "perfect-token"))
    assert (list(near.ahead), list(far.ahead)) == ([1], [5])
    assert near.predict(2, [1, 7], 1) == far.predict(2, [1, 7], 5) == [1, 7]


def test_refusals_name_the_choices() -> None:
    with pytest.raises(InputError, match="unknown predictor 'oracle'; choose from none, previous-token"):
        make_predictor("oracle", n_layers=1, n_experts=1)
    with pytest.raises(InputError, match=r"recall of 1.5 can't be: give 0 to 1"):
        make_predictor("next-layer", n_layers=1, n_experts=1, recall=1.5)


def test_top_experts_ranks_best_first_and_breaks_ties_by_id() -> None:
    assert top_experts([0.1, 0.9, 0.5, 0.9], 3) == [1, 3, 2]
    assert top_experts([0.1, 0.9], 5) == [1, 0]
    assert top_experts([0.1, 0.9], 0) == []


def test_recall_counts_distinct_demands() -> None:
    recall = Recall()
    assert recall.recall_at_k is None
    recall.observe([1, 2, 3], [2, 3, 4, 5])
    assert recall.recall_at_k == 0.5
    recall.observe([], [6, 6])
    assert recall.recall_at_k == 0.4
