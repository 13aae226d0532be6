"""Training on the routes that cache-aware rerouting takes."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toys import MODEL, toy_data, toy_model

from sluice.errors import InputError
from sluice.experts.rerouting import Rerouting, reroute
from sluice.train.language import LanguageModel
from sluice.train.locality import terms
from sluice.train.loop import Stopped
from sluice.train.losses.locality import Choice, held_before, weight_aware
from sluice.train.pretrain import pretrain
from sluice.train.recipe import Balance, Recipe, parse_recipe
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
    asked = recipe(reroute=0.2, keep=0, slots=3, anneal="rise")
    (term,) = terms(asked, 8, 1, None)
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


def test_what_is_rewarded_is_the_routers_own_choice_beside_the_final_routes_cache() -> None:
    asked = recipe(loss="weight", weight=2.0, tau=0.2, reroute=0.3, keep=0, slots=3)
    objective = LanguageModel(toy_model(), Balance(), [], ["a"], lambda m, p: None, terms(asked, 8, 1, None))
    batch = torch.randint(0, 300, (2, 30), generator=torch.Generator().manual_seed(1)), torch.tensor([0, 0])
    objective.done = 0.5
    seen = objective.run(*batch, prior=True)
    expected = []
    for logits, ids in seen.routes.values():
        own = logits.topk(2, -1).indices
        expected.append(float(weight_aware(Choice(logits, own, held_before(ids, 8, 3), 0.2)).detach()))
    (loss, figures) = objective.terms[0].loss(seen)
    assert figures["locality"] == pytest.approx(sum(expected) / len(expected)) and figures["locality"] > 0
    assert float(loss.detach()) == pytest.approx(2 * figures["locality"])


def test_rerouting_alone_is_trained_branches_off_and_goes_on(tmp_path: Path) -> None:
    data = toy_data(tmp_path)
    train = {"steps": 12, "batch": 4, "length": 24, "lr": 1e-2, "warmup": 2, "save_every": 6, "keep": 9}
    late = {"reroute": 0.2, "keep": 0, "anneal": "late", "slots": 3}
    sections = {"train": train, "data": {"valid_rows": 2}, "model": MODEL}
    pretrain(data, tmp_path / "plain", parse_recipe(sections))
    asked = parse_recipe({**sections, "locality": late})
    pretrain(data, tmp_path / "whole", asked)
    half = tmp_path / "plain" / "checkpoints" / "step-000006"
    pretrain(data, tmp_path / "off", asked, branch=half)
    steps = count(1)
    with pytest.raises(Stopped):
        pretrain(data, tmp_path / "cut", asked, branch=half, stop=lambda: next(steps) == 3)
    pretrain(data, tmp_path / "cut", asked, branch=half)
    plain, whole, off, cut = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("plain", "whole", "off", "cut")
    )
    for name in whole:
        assert torch.equal(whole[name], off[name]) and torch.equal(whole[name], cut[name]), name
    assert not all(torch.equal(whole[name], plain[name]) for name in whole)


def test_rerouting_that_would_move_nothing_is_refused(tmp_path: Path) -> None:
    train = {"steps": 2, "batch": 2, "length": 8, "lr": 1e-2}
    asked = parse_recipe({"train": train, "model": MODEL, "locality": {"reroute": 0.2, "keep": 2}})
    with pytest.raises(InputError, match="keep is 2 and a token takes 2 experts, so nothing would be rerouted"):
        pretrain(toy_data(tmp_path), tmp_path / "run", asked)


def recipe(**locality: Any) -> Recipe:
    return parse_recipe({"train": {"steps": 8, "batch": 2, "length": 29, "lr": 1e-3}, "locality": locality})
