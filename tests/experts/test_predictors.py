from __future__ import annotations

from sluice.experts.predictors import Predictor, PreviousToken, Recall, top_experts


def test_previous_token_remembers_each_layer() -> None:
    predictor: Predictor = PreviousToken()
    assert predictor.predict(1) == []
    predictor.observe(0, [4, 2])
    predictor.observe(1, (7,))
    predictor.observe(0, [3, 1])
    assert (predictor.predict(0), predictor.predict(1)) == ([3, 1], [7])


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
