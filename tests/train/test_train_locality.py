"""Terms on routes: what they do to a model that is trained with them, their schedules, their refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import two_processes
from safetensors.torch import load_file
from toys import MODEL, toy_data, toy_model

from sluice.cli.train_fit import locality as command
from sluice.errors import InputError
from sluice.train.anneal import rising, strength
from sluice.train.language import LanguageModel, Pass, use
from sluice.train.locality import Neighbours, OwnExperts, Teacher, terms
from sluice.train.loop import Stopped
from sluice.train.losses.domain import divided, hottest, partition
from sluice.train.losses.locality import Choice, weight_aware
from sluice.train.pretrain import pretrain
from sluice.train.recipe import Balance, Distill, Domain, Locality, Recipe, parse_recipe

torch.set_num_threads(1)

TRAIN = {"steps": 60, "batch": 4, "length": 32, "lr": 1e-2, "warmup": 2}
USED = {"weight": 0.3, "begin": 0.55, "full": 0.75, "experts": "used", "enough": 0.95}


def recipe(**sections: Any) -> Recipe:
    train = {**TRAIN, **sections.pop("train", {})}
    return parse_recipe({"train": train, "data": {"valid_rows": 8}, "model": MODEL} | sections)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_data(tmp_path_factory.mktemp("text"), valid_share=0.2, seed=0)


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return pretrain(data, tmp_path_factory.mktemp("runs") / "base", recipe())["valid"]


@pytest.mark.parametrize(
    "asked",
    [
        {"loss": "margin", "weight": 3.0, "slots": 2},
        {"loss": "set", "weight": 1.0},
        {"loss": "mass", "weight": 1.0, "slots": 3, "anneal": "rise"},
    ],
)
def test_a_local_model_misses_less(
    data: Path, base: dict[str, Any], tmp_path: Path, asked: dict[str, Any]
) -> None:  # fmt: skip
    local = pretrain(data, tmp_path / "run", recipe(locality=asked))["valid"]
    assert local["lru_miss"] < 0.7 * base["lru_miss"] and local["reuse"] > base["reuse"]


def test_domains_keep_to_their_experts_without_the_prior(data: Path, base: dict[str, Any], tmp_path: Path) -> None:
    asked = recipe(domain={"weight": 1.0, "prior": 4.0, "until": 0.5})
    local = pretrain(data, tmp_path / "run", asked)["valid"]
    assert min(local["own.code"], local["own.prose"]) > 0.95 > min(base["own.code"], base["own.prose"])


def test_domains_keep_to_the_experts_that_they_used(data: Path, base: dict[str, Any], tmp_path: Path) -> None:
    asked = recipe(domain={**USED, "weight": 1.0, "begin": 0.3, "full": 0.4, "enough": 0.98}, train={"log_every": 1})
    local = pretrain(data, tmp_path / "run", asked)["valid"]
    assert min(local["own.code"], local["own.prose"]) > 0.95 > min(base["own.code"], base["own.prose"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "domain_hit" in line] == list(range(19, 61))  # from the 18 done on


def test_a_teacher_is_learned_from(data: Path, tmp_path: Path) -> None:
    taught = pretrain(data, tmp_path / "base", recipe(train={"steps": 40}))
    run = tmp_path / "run"
    asked = recipe(distill={"weight": 1.0}, train={"steps": 40, "log_every": 1, "seed": 5})
    pretrain(data, run, asked, teacher=Path(taught["model"]))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kl = [line["kl"] for line in lines if "kl" in line]
    assert kl[-1] < 0.3 * kl[0]


def test_a_teacher_and_its_weight_go_together() -> None:
    with pytest.raises(InputError, match="give --teacher"):
        terms(recipe(distill={"weight": 0.5}), 8, 2, None)
    with pytest.raises(InputError, match=r"distill\.weight is 0"):
        terms(recipe(), 8, 2, toy_model())
    with pytest.raises(InputError, match="choose from overlap, kl, mass, set, margin"):
        terms(recipe(locality={"loss": "sticky"}), 8, 2, None)


def test_only_what_has_a_weight_is_a_term() -> None:
    assert terms(recipe(), 8, 2, None) == []
    found = terms(recipe(locality={"weight": 1.0}, domain={"prior": 1.0}, distill={"weight": 1.0}), 8, 2, toy_model())
    assert [type(one) for one in found] == [Neighbours, OwnExperts, Teacher]


@pytest.mark.parametrize(
    ("anneal", "strengths"),
    [
        ("constant", (1, 1, 1, 1, 1)),
        ("rise", (0, 0.5, 1, 1, 1)),
        ("fall", (1, 1, 1, 0.5, 0)),
        ("late", (0, 0, 0, 0.5, 1)),
        ("hump", (0, 0, 0, 1, 0)),
    ],
)
def test_strengths(anneal: str, strengths: tuple[float, ...]) -> None:
    assert tuple(strength(anneal, done) for done in (0, 0.25, 0.5, 0.75, 1)) == strengths


@pytest.mark.parametrize(
    ("begin", "full", "strengths"),
    [
        (0, 0, (1, 1, 1, 1, 1)),
        (0, 1, (0, 0.25, 0.5, 0.75, 1)),
        (0.5, 0.5, (0, 0, 1, 1, 1)),
        (0.5, 1, (0, 0, 0, 0.5, 1)),
    ],
)
def test_strengths_between_two_places(begin: float, full: float, strengths: tuple[float, ...]) -> None:
    assert tuple(rising(begin, full, done) for done in (0, 0.25, 0.5, 0.75, 1)) == strengths


def a_pass(done: float) -> Pass:
    z = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.zeros(2, 10, dtype=torch.long)
    return Pass(ids, torch.tensor([0, 1]), torch.zeros(2, 9, 5), {0: (z, z.detach().topk(2, -1).indices)}, done)


def test_a_longer_run_that_is_branched_off_divides_anew() -> None:
    """Its beginning lies later than that of the run whose checkpoint it has."""
    asked = Domain(weight=1.0, begin=0.55, full=0.75, experts="used")
    counted, later = OwnExperts(asked, 8, 2), OwnExperts(asked, 8, 2)
    for done in (0.52, 0.6):
        counted.loss(a_pass(done))
        counted.end_step()
    assert counted.sets is not None
    later.restore(counted.state())
    loss, figures = later.loss(a_pass(0.3))
    assert not figures and not loss.item() and later.used is None and later.sets is None
    later.loss(a_pass(0.52))
    later.end_step()
    later.loss(a_pass(0.56))
    torch.testing.assert_close(later.used, counted.used)
    torch.testing.assert_close(later.sets, counted.sets)


def test_a_terms_weight_follows_its_schedule() -> None:
    term = Neighbours(Locality(loss="mass", weight=2.0, anneal="rise"))
    loss, figures = term.loss(a_pass(0.25))
    assert float(loss.detach()) == pytest.approx(2.0 * 0.5 * figures["locality"])


def test_the_prior_is_for_a_domains_experts_and_ends() -> None:
    term = OwnExperts(Domain(prior=3.0, until=0.5), 8, 2)
    prior = term.prior(torch.tensor([1, 0]), 0.25)
    assert prior is not None and torch.equal(prior, 1.5 * partition(8, 2)[[1, 0]].float())
    assert term.prior(torch.tensor([1, 0]), 0.5) is None
    _, figures = term.loss(a_pass(0.25))
    assert 0 <= figures["domain_hit"] <= 1


def test_experts_are_divided_by_what_was_counted() -> None:
    term = OwnExperts(Domain(weight=2.0, begin=0.55, full=0.75, experts="used"), 8, 2)
    ids = a_pass(0.0).routes[0][1]
    for done in (0.49, 0.5, 0.53):
        loss, figures = term.loss(a_pass(done))
        term.end_step()
        assert (float(loss), figures) == (0, {})
    used = torch.stack([torch.bincount(row.flatten(), minlength=8) for row in ids])
    state = term.state()
    assert torch.equal(state["domain.used"], 2 * used[None].double()) and term.sets is None
    loss, figures = term.loss(a_pass(0.65))
    term.end_step()
    assert float(loss.detach()) == pytest.approx(2.0 * 0.5 * figures["domain"]) and 0.5 < figures["domain_hit"] <= 1
    assert term.sets is not None and torch.equal(term.sets, divided(used)[None])
    assert torch.equal(term.state()["domain.used"], state["domain.used"])


def test_sets_are_taken_from_a_run_that_begins_at_the_same_place_alone() -> None:
    def begun(begin: float) -> OwnExperts:
        return OwnExperts(Domain(weight=1.0, begin=begin, full=1.0, experts="used"), 8, 2)

    term, same, other = begun(0.55), begun(0.55), begun(0.6)
    term.loss(a_pass(0.5))
    term.end_step()
    term.loss(a_pass(0.55))
    for one in (same, other):
        one.restore(term.state())
    same.loss(a_pass(0.7))
    assert term.sets is not None and same.sets is not None and torch.equal(same.sets, term.sets)
    with pytest.raises(InputError, match=r"nothing was counted before 0\.6 of the run: branch off an earlier"):
        other.loss(a_pass(0.7))


def test_domains_may_share_their_hottest_experts() -> None:
    term = OwnExperts(Domain(weight=1.0, begin=0.55, full=0.75, experts="hottest"), 8, 2)
    ids = a_pass(0.0).routes[0][1]
    term.loss(a_pass(0.52))
    term.end_step()
    term.loss(a_pass(0.6))
    used = torch.stack([torch.bincount(row.flatten(), minlength=8) for row in ids])
    assert term.sets is not None and torch.equal(term.sets, hottest(used)[None])
    assert not torch.equal(hottest(used), divided(used))  # else this shows nothing


def test_a_domain_without_text_has_no_hottest_experts() -> None:
    term = OwnExperts(Domain(weight=1.0, begin=0.55, full=0.75, experts="hottest"), 8, 3)  # two domains are seen
    term.loss(a_pass(0.52))
    term.end_step()
    with pytest.raises(InputError, match=r"a domain had no text in the steps that are counted, before 0\.55"):
        term.loss(a_pass(0.6))


def test_swaps_that_matter_little_are_asked_for_until_enough_are_made() -> None:
    def term(enough: float) -> OwnExperts:
        return OwnExperts(Domain(weight=2.0, experts="even", loss="weight", tau=0.2, enough=enough), 8, 2)

    seen = a_pass(0.6)
    logits, ids = seen.routes[0]
    own = partition(8, 2)[:, None].expand(2, 9, 8)
    loss, figures = term(0.0).loss(seen)
    assert float(loss.detach()) == pytest.approx(2.0 * float(weight_aware(Choice(logits, ids, own, 0.2)).detach()))
    hit = figures["domain_hit"]
    assert hit == pytest.approx(float(own.gather(-1, ids).float().mean())) and 0 < hit < 1
    assert float(term(hit + 0.01).loss(seen)[0].detach()) == pytest.approx(float(loss.detach()))
    loss, figures = term(hit).loss(seen)
    assert float(loss.detach()) == 0 and figures["domain"] > 0


def test_a_prior_moves_choices_and_not_weights() -> None:
    model = toy_model()
    own = OwnExperts(Domain(prior=1e3), 8, 2)
    objective = LanguageModel(model, Balance(), [], ["a", "b"], lambda m, p: None, [own])
    ids, domain = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1])
    objective.done = 0.1
    for logits, taken in objective.run(ids, domain, prior=True).routes.values():
        allowed = partition(8, 2)[domain][:, None].expand_as(logits)
        assert bool(allowed.gather(-1, taken).all())
        best = logits.masked_fill(~allowed, -torch.inf).topk(2, -1).indices
        assert torch.equal(best, taken)
    free = objective.run(ids, domain)
    plain = model(input_ids=ids[:, :-1]).logits
    torch.testing.assert_close(free.logits, plain)


@pytest.mark.parametrize("learns", ["all", "routers"])
def test_locality_teaches_the_routers_alone_where_asked(learns: str) -> None:
    model = toy_model()
    term = Neighbours(Locality(loss="mass", weight=1.0, slots=3, learns=learns))
    objective = LanguageModel(model, Balance(), [], ["a"], lambda m, p: None, [term])
    ids = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    loss, figures = term.loss(objective.run(ids, torch.tensor([0, 0])))
    loss.backward()
    reached = {name for name, one in model.named_parameters() if one.grad is not None and bool(one.grad.any())}
    routers = {name for name, _ in model.named_parameters() if name.endswith("mlp.gate.weight")}
    assert len(routers) == 3 and routers <= reached and (reached == routers) == (learns == "routers")
    same, _ = Neighbours(Locality(loss="mass", weight=1.0, slots=3)).loss(objective.run(ids, torch.tensor([0, 0])))
    assert float(loss.detach()) == pytest.approx(float(same.detach()), rel=1e-6) and figures["locality"] > 0


def test_distilling_at_weight_1_is_the_divergence_alone() -> None:
    seen, teacher = a_pass(0.0), toy_model()
    seen = Pass(seen.ids, seen.domain, torch.randn(2, 9, 300), seen.routes, 0.0)
    loss, figures = Teacher(Distill(weight=1.0), teacher).loss(seen)
    entropy = torch.nn.functional.cross_entropy(seen.logits.flatten(0, 1), seen.ids[:, 1:].flatten())
    assert float(loss + entropy) == pytest.approx(figures["kl"], rel=1e-4)


def test_a_late_term_can_branch_off_a_run_without_it(data: Path, tmp_path: Path) -> None:
    """Interrupted on the way too: the weights, bit for bit, of the run that had the terms from its first step."""
    more = {"steps": 40, "keep": 9, "save_every": 10}
    asked = recipe(train=more, locality={"weight": 2.0, "slots": 2, "anneal": "late"},
                   distill={"weight": 0.5, "anneal": "late"})  # fmt: skip
    plain = pretrain(data, tmp_path / "plain", recipe(train=more))
    teacher, half = Path(plain["model"]), tmp_path / "plain" / "checkpoints" / "step-000020"
    whole = pretrain(data, tmp_path / "whole", asked, teacher=teacher)
    done: list[float] = []
    with pytest.raises(Stopped, match="step-000030"):
        pretrain(data, tmp_path / "part", asked, teacher=teacher, branch=half,
                 progress=lambda step, _: done.append(step), stop=lambda: done[-1:] == [29])  # fmt: skip
    part = pretrain(data, tmp_path / "part", asked, teacher=teacher, branch=half)
    assert done[0] == 21
    names = [tmp_path / run / "model" / "model.safetensors" for run in ("whole", "part", "plain")]
    of_whole, of_part, of_plain = (load_file(name) for name in names)
    assert all(torch.equal(of_whole[name], of_part[name]) for name in of_whole)
    assert not all(torch.equal(of_whole[name], of_plain[name]) for name in of_whole)
    assert (part["valid"], part["best"]["step"]) == (whole["valid"], 40)


def test_domains_that_begin_late_can_branch_off_a_run_without_them(data: Path, tmp_path: Path) -> None:
    """Interrupted while use is counted, and after: the weights and sets, bit for bit, of the run that wasn't."""
    more = {"steps": 40, "keep": 9, "save_every": 10}
    asked = recipe(train=more, domain=USED)
    pretrain(data, tmp_path / "plain", recipe(train=more))
    half = tmp_path / "plain" / "checkpoints" / "step-000020"
    whole = pretrain(data, tmp_path / "whole", asked)
    found = {"branched": pretrain(data, tmp_path / "branched", asked, branch=half)}
    counts: list[int] = []
    for name, branch, first in (("part", None, 21), ("part of the branch", half, 1)):
        for steps, at in ((first, 21), (9, 30)):  # steps 20 and 21, from 0, are counted
            with pytest.raises(Stopped, match=f"step-0000{at}"):
                pretrain(data, tmp_path / name, asked, branch=branch, stop=_after(steps))
            counts.append(int(_kept(tmp_path / name, at)["domain.used"].sum()))
        found[name] = pretrain(data, tmp_path / name, asked, branch=branch)
    wanted, sets = _weights(tmp_path / "whole"), _kept(tmp_path / "whole", 40)
    assert sets["domain.used"].shape == (2, 2, 8)
    for name, result in found.items():
        same, kept = _weights(tmp_path / name), _kept(tmp_path / name, 40)
        assert all(torch.equal(wanted[key], same[key]) for key in wanted), name
        assert all(torch.equal(sets[key], kept[key]) for key in sets), name
        assert result["valid"] == whole["valid"]
    step = 4 * 32 * 2 * 2  # tokens, layers, experts
    assert counts == [step, 2 * step] * 2
    plain = _weights(tmp_path / "plain")
    assert not all(torch.equal(wanted[key], plain[key]) for key in wanted)
    late = tmp_path / "plain" / "checkpoints" / "step-000030"
    with pytest.raises(InputError, match=r"nothing was counted before 0\.55 of the run: branch off an earlier"):
        pretrain(data, tmp_path / "late", asked, branch=late)


def test_two_processes_divide_experts_as_one(data: Path, tmp_path: Path) -> None:
    train = {**TRAIN, "steps": 20, "save_every": 5, "keep": 9}
    domain = {**USED, "weight": 1.0, "begin": 0.3, "full": 0.4}
    pretrain(data, tmp_path / "one", recipe(train=train, domain=domain))
    asked = tmp_path / "recipe.toml"
    sections = {"train": train, "data": {"valid_rows": 8}, "model": MODEL, "domain": domain}
    lines = [f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in one.items())
             for name, one in sections.items()]  # fmt: skip
    asked.write_text("\n".join(lines), encoding="utf-8")
    two_processes("locality", data, tmp_path / "two", "--recipe", asked, split=False)
    one, two = _kept(tmp_path / "one", 10), _kept(tmp_path / "two", 10)
    torch.testing.assert_close(one["domain.used"].sum(), two["domain.used"].sum())
    for mine, other in zip(one["domain.used"], two["domain.used"], strict=True):
        assert torch.equal(divided(mine), divided(other))
    a, b = _weights(tmp_path / "one"), _weights(tmp_path / "two")
    for name in a:  # were the sets of the second process others, gradients would be too
        torch.testing.assert_close(b[name], a[name], rtol=1e-3, atol=1e-3, msg=name)


def _after(steps: int) -> Callable[[], bool]:
    """Stops a run after so many steps of this call."""
    asked = count(1)
    return lambda: next(asked) == steps


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def _kept(run: Path, step: int) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps beside weights."""
    state = torch.load(run / "checkpoints" / f"step-{step:06d}" / "state.pt", weights_only=False)
    return state["objective"]


def test_a_branch_begins_at_another_runs_checkpoint_or_not_at_all(data: Path, tmp_path: Path) -> None:
    more = {"steps": 4, "save_every": 2}
    pretrain(data, tmp_path / "plain", recipe(train=more))
    half = tmp_path / "plain" / "checkpoints" / "step-000002"

    def refused(words: str, asked: Recipe, branch: Path) -> None:
        with pytest.raises(InputError, match=words):
            pretrain(data, tmp_path / f"run-{hash(words)}", asked, branch=branch)

    refused("is no checkpoint", recipe(train=more), tmp_path)
    refused("is no checkpoint", recipe(train=more), half.with_name("step-000003"))
    refused("has 2 steps done and the run 2 in all", recipe(train={"steps": 2}), half)
    with pytest.raises(InputError, match="leave out one of them"):
        pretrain(data, tmp_path / "both", recipe(train=more, model={}), start=tmp_path / "plain" / "model", branch=half)
    refused("batches differ in length", recipe(train={"steps": 4, "length": 16}), half)
    refused("another model", recipe(train=more, model={**MODEL, "num_experts": 4}), half)
    refused("no state of this run.*name another checkpoint", recipe(train=more, balance={"bias": 0.1}), half)
    (half / "state.pt").write_bytes(b"")
    refused("no whole checkpoint.*name another checkpoint", recipe(train=more), half)
    (half / "model.safetensors").unlink()
    refused("is no checkpoint", recipe(train=more), half)


@pytest.mark.parametrize(("done", "times"), [(0.0, 1.0), (0.5, 1.0), (0.75, 0.6), (1.0, 0.2)])
def test_the_balance_loss_may_fade_over_the_second_half(done: float, times: float) -> None:
    model, ids = toy_model(), torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    losses: list[float] = []
    for balance in (Balance(loss=0.5, z=0.0, final=0.2), Balance(loss=0.5 * times, z=0.0)):
        objective = LanguageModel(model, balance, [], ["a"], lambda m, p: None)
        objective.done = done
        losses.append(float(objective.loss((ids, torch.tensor([0, 0])))[0].detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_use_counts_experts_that_nothing_goes_to() -> None:
    load = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]])
    found = use(load, 1)
    assert found["dead_share"] == 0.25 and found["load_entropy"] == pytest.approx(0.5)


def test_the_command_wants_something_local(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[train]\nsteps = 2\nbatch = 4\nlength = 16\n", encoding="utf-8")
    with pytest.raises(InputError, match="nothing local is asked for"):
        command(data, tmp_path / "run", path)
