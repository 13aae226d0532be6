"""Training on the routes that cache-aware rerouting takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toys import toy_model

from sluice.experts.rerouting import Rerouting, reroute
from sluice.train.language import LanguageModel
from sluice.train.locality import Neighbours
from sluice.train.losses.locality import held_before
from sluice.train.recipe import Balance, Locality
from sluice.train.rerouted import rerouted

torch.set_num_threads(1)


@pytest.mark.parametrize(("slots", "margin", "keep"), [(4, 0.1, 1), (3, 0.3, 0), (9, 0.05, 0), (2, 1.0, 2)])
def test_every_token_is_rerouted_as_the_engine_does_it(slots: int, margin: float, keep: int) -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(3, 40, 8)).round(1)  # some are equal
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :3]
    final = rerouted(ids, scores, slots, margin, keep)
    held = held_before(torch.from_numpy(final), 8, slots).numpy()
    changed = 0
    for row in range(3):
        for t in range(40):
            slot = held[row, t]
            chosen, mine = ids[row, t].tolist(), scores[row, t].tolist()
            wanted, n = reroute(Rerouting(margin, keep), chosen, mine, slot.__getitem__)
            assert final[row, t].tolist() == wanted
            changed += n
    assert changed
    assert np.array_equal(rerouted(ids, scores, slots, margin, keep=3), ids)


def test_training_takes_the_routes_that_are_found_and_evaluation_the_routers() -> None:
    model = toy_model()
    term = Neighbours(Locality(reroute=0.2, keep=0, slots=3, anneal="rise"))
    objective = LanguageModel(model, Balance(), [], ["a"], lambda m, p: None, [term])
    batch = torch.randint(0, 300, (2, 30), generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0])
    native = objective.run(*batch)
    began = objective.run(*batch, prior=True)
    for (_, ids), (_, own) in zip(began.routes.values(), native.routes.values(), strict=True):
        assert torch.equal(ids, own)  # nothing at the beginning of the run
    objective.done = 0.25
    seen = objective.run(*batch, prior=True)
    moved = 0
    for logits, ids in seen.routes.values():
        own = logits.topk(2, -1).indices
        scores = logits.detach().softmax(-1).numpy()
        assert np.array_equal(ids.numpy(), rerouted(own.numpy(), scores, 3, 0.1, 0))
        moved += int((ids != own).sum())
    assert moved and not torch.equal(seen.logits, native.logits)
    loss, _ = objective.loss(batch)
    loss.backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())
    torch.testing.assert_close(objective.run(*batch).logits, native.logits)
