"""Recall of foretold experts: against a plain count, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from train.toys import toy_model, toy_texts

from sluice.errors import InputError
from sluice.train.heads import Heads
from sluice.train.opening import router_weights
from sluice.train.recall import mean_recall, overlap, recall
from sluice.train.routes import record

torch.set_num_threads(1)


def test_overlap_counts_the_ids_that_two_rows_share() -> None:
    truth = torch.tensor([[0, 1], [2, 3], [4, 5]])
    assert overlap(truth, torch.tensor([[1, 0], [2, 7], [6, 7]])) == 3
    assert overlap(truth, torch.tensor([[1, 5, 0], [9, 8, 7], [5, 4, 3]])) == 4


def test_recall_is_what_counting_token_by_token_gives() -> None:
    model = toy_model()
    heads = Heads.untrained(model, seed=1)
    with torch.no_grad():
        for owner in heads.info.predicts:
            heads.head(owner).fc2.weight.normal_()  # so that it says something else than its skip path
    routers = router_weights(model)
    texts = toy_texts([("a", 21), ("b", 34)])
    found = recall(model, heads, texts)
    assert [(one.owner, one.layer) for one in found] == [(0, 1), (1, 2)]
    for one in found:
        hits = dict.fromkeys(("head", "untrained", "previous"), 0)
        used = np.zeros(8, int)
        tokens = 0
        for text in texts:
            with torch.no_grad(), record(model) as routes:
                model(torch.from_numpy(text.ids)[None], use_cache=False)
            ids = {layer: each.ids.tolist() for layer, each in routes.items()}
            for t in range(len(text.ids) - 1):
                h = routes[one.owner].hidden[t]
                ones = torch.zeros(2, 8)
                ones[0, ids[one.owner][t]] = 1
                if one.owner:
                    ones[1, ids[one.owner - 1][t]] = 1
                head = heads.head(one.owner)
                before = torch.zeros_like(head.here) if head.before is None else head.before
                x = head.fc1(h) + ones[0] @ head.here + ones[1] @ before
                said = head.fc2(torch.nn.functional.gelu(x)) + head.skip(h)
                router = routers[one.layer] @ h
                truth = set(ids[one.layer][t + 1])
                hits["head"] += len(truth & set(said.topk(2).indices.tolist()))
                hits["untrained"] += len(truth & set(router.topk(2).indices.tolist()))
                hits["previous"] += len(truth & set(ids[one.layer][t]))
                used[list(truth)] += 1
                tokens += 1
        assert one.tokens == tokens == 20 + 33
        for name, n in hits.items():
            assert getattr(one, name) == pytest.approx(n / (2 * tokens)), name
        assert one.popularity == pytest.approx(np.sort(used)[-2:].sum() / (2 * tokens))
        assert one.chance == 0.25
    assert mean_recall(found)["previous"] == pytest.approx(sum(one.previous for one in found) / 2)


def test_a_head_that_was_not_trained_foretells_what_its_skip_path_does() -> None:
    model = toy_model()
    for one in recall(model, Heads.untrained(model, seed=3), toy_texts([("a", 30)])):
        assert one.head == one.untrained


def test_refusals() -> None:
    model = toy_model()
    heads = Heads.untrained(model)
    with pytest.raises(InputError, match="no text has two tokens"):
        recall(model, heads, toy_texts([("a", 1)]))
    with pytest.raises(InputError, match="another model"):
        recall(toy_model(seed=1), heads, toy_texts([("a", 20)]))
