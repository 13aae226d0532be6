"""Stage 1: heads that imitate routers, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from stage_runs import Rows, imitating, settings
from tiny_moe import FAMILY_NAMES, random_ids, tiny_model

from sluice.errors import InputError
from sluice.routing import open_prerouter
from sluice.train.heads import Heads
from sluice.train.loop import Stopped, fit
from sluice.train.opening import check_routers, router_weights
from sluice.train.prerouter import ImitateRouters, kl
from sluice.train.routes import record
from sluice.train.stages import HEADS, check_order

torch.set_num_threads(1)


def test_divergence_is_what_torch_says_and_nothing_of_itself() -> None:
    p, q = torch.randn(7, 5), torch.randn(7, 5)
    wanted = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="batchmean")
    torch.testing.assert_close(kl(p, q), wanted)
    assert float(kl(p, p + 3)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_loss_and_recall_are_of_the_next_layer_at_the_next_token(name: str) -> None:
    model, ids = tiny_model(name), random_ids(2, 7)
    heads = Heads.untrained(model, hidden=4)
    with torch.no_grad():
        loss, figures = ImitateRouters(model, heads, []).loss((ids, None))
        with record(model) as routes:
            model(input_ids=ids)
        losses, hits = [], []
        for owner, layer in heads.info.predicts.items():
            for b in range(2):
                for t in range(6):
                    here, there = b * 7 + t, b * 7 + t + 1
                    row = slice(here, here + 1)
                    before = routes[owner - 1].ids[row] if owner else None
                    said = heads.head(owner)(routes[owner].hidden[row], routes[owner].ids[row], before)[0]
                    losses.append(kl(routes[layer].logits[there][None], said[None]))
                    hits.append(len(set(said.topk(2).indices.tolist()) & set(routes[layer].ids[there].tolist())))
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    assert figures["recall"] == pytest.approx(sum(hits) / (2 * len(hits)))
    assert 0 <= figures["recall_least"] <= figures["recall"]


def test_heads_learn_what_routers_will_say_and_the_model_stays(tmp_path: Path) -> None:
    model = tiny_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    heads = Heads.untrained(model, hidden=16)
    held_out = Rows(8)
    objective = ImitateRouters(model, heads, [held_out.next(), held_out.next()], {"data": "rows"})
    first = objective.validate()
    result = fit(objective, Rows(), settings(steps=60), tmp_path / "run", recipe={"stage": "prerouter"})
    assert set(first) == {"loss", "recall", "recall.1", "recall.2", "recall.3"} == set(result["valid"])
    assert result["valid"]["loss"] < 0.7 * first["loss"] and result["valid"]["recall"] > first["recall"]
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    written = Heads.open(tmp_path / "run" / HEADS)
    assert written.stages == ("prerouter",)
    assert open_prerouter(tmp_path / "run" / HEADS).info.training["prerouter"] == {"data": "rows"}
    written.check_model(model)
    for mine, theirs in zip(heads.parameters(), written.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("recall" in line for line in lines)


def test_heads_and_checkpoints_of_another_model_are_refused(tmp_path: Path) -> None:
    model = tiny_model()
    with pytest.raises(InputError, match="heads for another model"):
        ImitateRouters(tiny_model(seed=2), Heads.untrained(model), [])
    stopped = settings(steps=20, save_every=5)
    recipe = {"stage": "prerouter"}
    with pytest.raises(Stopped):
        fit(ImitateRouters(model, Heads.untrained(model, hidden=8), []), Rows(), stopped, tmp_path / "run",
            recipe=recipe, stop=lambda: True)  # fmt: skip
    with pytest.raises(InputError, match="is a checkpoint of another model"):
        fit(ImitateRouters(model, Heads.untrained(model, hidden=9), []), Rows(), stopped, tmp_path / "run",
            recipe=recipe)  # fmt: skip


def test_the_order_of_stages_is_kept_unless_forced() -> None:
    model = tiny_model()
    fresh, imitated = Heads.untrained(model), imitating(model)
    check_order("prerouter", fresh, "h")
    check_order("recover", imitated, "h")
    for stage, before in (("recover", "prerouter"), ("onpolicy", "recover")):
        with pytest.raises(InputError, match=rf"h: .* not been through {before}, .*sluice train {before}.*--force"):
            check_order(stage, fresh, "h")
        check_order(stage, fresh, "h", force=True)
    with pytest.raises(InputError, match="not been through recover"):
        check_order("onpolicy", imitated, "h")
    imitated.info.training["stages"].append("recover")  # type: ignore[union-attr]
    check_order("onpolicy", imitated, "h")
    with pytest.raises(InputError, match="been through recover, which prerouter would undo"):
        check_order("prerouter", imitated, "h")


def test_weights_with_other_routers_are_refused() -> None:
    model = tiny_model()
    before = router_weights(model)
    check_routers(model, before, "w")
    with torch.no_grad():
        model.model.layers[2].mlp.gate.weight.copy_(before[2].bfloat16().float())  # type: ignore[union-attr]
        check_routers(model, before, "w")
        model.model.layers[2].mlp.gate.weight.mul_(1.01)  # type: ignore[union-attr]
    with pytest.raises(InputError, match="w: holds another model of the same shape: layer 2's router"):
        check_routers(model, before, "w")
