"""The student path: parallel against token by token, against the native model, and what its heads are told."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tiny_moe import EXPERTS, FAMILY_NAMES, VOCAB, random_ids, tiny_model
from torch import Tensor, nn

from sluice.errors import InputError
from sluice.train.families import family_of
from sluice.train.heads import Head, Heads
from sluice.train.routes import impose, record
from sluice.train.student import Student

torch.set_num_threads(1)


def noisy(model: nn.Module, *, weights: str = "head", scale: float = 0.3, seed: int = 5) -> Heads:
    """Heads whose every part matters."""
    heads = Heads.untrained(model, hidden=8, weights=weights)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return heads


def token_by_token(model: nn.Module, heads: Heads, ids: Tensor, native: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits [T, V] and executed ids [T, k] by layer, from the definition of the path: one position after another,
    each as the last of a pass over all before it with their routes imposed."""
    family = family_of(model)
    layers = tuple(family.routers(model))
    decided: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    said: dict[int, Tensor] = {}
    rows = []
    for t in range(len(ids)):
        foretold, said = said, {}
        executed: dict[int, Tensor] = {}

        def choose(layer: int, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
            own, known = logits[-1:], foretold.get(layer)  # noqa: B023  (called within the turn)
            if known is None or t < 2 or bool(native[t]):  # noqa: B023
                route = family.route(model.config, own)
            elif heads.info.weights == "head":
                route = family.route(model.config, known)
            else:
                chosen = family.choose(model.config, known)
                route = family.weights(model.config, own, chosen), chosen
            decided[layer].append(route)
            executed[layer] = route[1]  # noqa: B023
            if layer in heads.info.predicts:
                hot = [torch.zeros(1, EXPERTS).scatter(1, executed[layer], 1.0)]  # noqa: B023
                if layer - 1 in executed:  # noqa: B023
                    hot.append(torch.zeros(1, EXPERTS).scatter(1, executed[layer - 1], 1.0))  # noqa: B023
                said[heads.info.predicts[layer]] = by_definition(heads.head(layer), hidden[-1:], hot)  # noqa: B023
            weights, chosen = (torch.cat(parts) for parts in zip(*decided[layer], strict=True))
            return weights, chosen

        with torch.no_grad(), impose(model, choose):
            rows.append(model(input_ids=ids[None, : t + 1]).logits[0, -1])
    return torch.stack(rows), {layer: torch.cat([ids for _, ids in routes]) for layer, routes in decided.items()}


def by_definition(head: Head, h: Tensor, hot: list[Tensor]) -> Tensor:
    """Logits of one head with its sets of experts as ones and zeros."""
    x = h @ head.fc1.weight.T + head.fc1.bias + hot[0] @ head.here
    if head.before is not None:
        x = x + hot[1] @ head.before
    return head.fc2(torch.nn.functional.gelu(x)) + h @ head.skip.weight.T


@pytest.mark.parametrize("weights", ["head", "router"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_all_positions_at_once_are_as_one_after_another(name: str, weights: str) -> None:
    model, ids = tiny_model(name), random_ids(1, 12)
    heads = noisy(model, weights=weights)
    native = torch.zeros(12, dtype=torch.bool)
    native[:4] = native[7] = True
    with torch.no_grad():
        out = Student(model, heads)(ids, native[None])
    logits, executed = token_by_token(model, heads, ids[0], native)
    torch.testing.assert_close(out.logits[0], logits, rtol=1e-4, atol=1e-4)
    for layer, chosen in executed.items():
        assert torch.equal(out.routes[layer].ids, chosen)
    assert torch.equal(out.predicted[0], ~native)
    with torch.no_grad():  # the case is one that tells predicted routes from the routers'
        assert not torch.allclose(model(input_ids=ids).logits, out.logits, atol=1e-2)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_generation_with_a_cache_is_the_parallel_pass(name: str) -> None:
    model = tiny_model(name)
    student = Student(model, noisy(model))
    prompts = [random_ids(4, seed=1), random_ids(2, seed=2), random_ids(4, seed=3)]
    grown = student.generate(prompts, 9, temperature=0)
    assert [len(row) for row in grown] == [13, 11, 13]
    assert len({tuple(row[-9:].tolist()) for row in grown}) == 3
    for prompt, row in zip(prompts, grown, strict=True):
        assert torch.equal(row[: len(prompt)], prompt)
        native = torch.arange(len(row)) <= len(prompt)
        with torch.no_grad():
            out = student(row[None], native[None])
            likeliest = out.logits[0].argmax(-1)
        assert torch.equal(likeliest[len(prompt) - 1 : -1], row[len(prompt) :])
        assert int(out.predicted.sum()) == 9 - 1


def test_drawn_tokens_follow_their_seed_and_end_where_they_are_told() -> None:
    student = Student(model := tiny_model(), noisy(model))
    prompts = [random_ids(3, seed=s) for s in range(8)]
    one, same, other = (student.generate(prompts, 10, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    stop = int(one[0][6])
    ended = student.generate(prompts, 10, seed=1, stop=[stop])
    for full, row in zip(one, ended, strict=True):
        grown = full[3:].tolist()
        assert row.tolist() == full.tolist()[: 3 + (grown.index(stop) + 1 if stop in grown else 10)]
    assert len(ended[0]) < 13
    for wrong in ([], [torch.empty(0, dtype=torch.long)]):
        with pytest.raises(InputError, match="nothing to continue"):
            student.generate(wrong, 3)


def test_a_likely_token_is_drawn_more_often() -> None:
    student = Student(model := tiny_model(), noisy(model))
    prompt = random_ids(3)
    with torch.no_grad():
        shares = torch.softmax(model(input_ids=prompt[None]).logits[0, -1] / 2, -1)
    drawn = torch.stack(student.generate([prompt] * 4000, 1, temperature=2.0))[:, 3]
    counts = torch.bincount(drawn, minlength=VOCAB) / 4000
    assert float((counts - shares).abs().max()) < 5 * float((shares * (1 - shares) / 4000).sqrt().max())


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_native_positions_are_the_models_own_bit_for_bit(name: str) -> None:
    model, ids = tiny_model(name), random_ids(2, 8)
    student = Student(model, noisy(model))
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        all_native = student(ids, torch.ones(2, 8, dtype=torch.bool))
        some = student(ids, torch.arange(8).expand(2, 8) <= 4)
    assert torch.equal(all_native.logits, plain) and not all_native.predicted.any()
    torch.testing.assert_close(some.logits[:, :5], plain[:, :5], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(some.logits[:, 5:], plain[:, 5:], atol=1e-2)


@pytest.mark.parametrize("weights", ["head", "router"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_heads_that_say_the_true_routes_give_the_native_model(
    name: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model(name), random_ids(2, 8)
    heads = Heads.untrained(model, hidden=8, weights=weights)
    with torch.no_grad(), record(model) as routes:
        plain = model(input_ids=ids).logits
        true = {layer: routed.logits.view(2, 8, EXPERTS) for layer, routed in routes.items()}
    for owner, layer in heads.info.predicts.items():
        told = torch.roll(true[layer], -1, dims=1).reshape(16, EXPERTS)  # of t + 1, said at t
        monkeypatch.setattr(heads.head(owner), "forward", lambda h, here, before, told=told: told)
    student = Student(model, heads)
    with torch.no_grad():
        out = student(ids)
    assert torch.equal(out.logits, plain) and int(out.predicted.sum()) == 12
    for layer in heads.info.predicts.values():
        assert torch.equal(out.said[layer][:, 1:], true[layer][:, 1:])


def test_heads_are_told_the_experts_that_were_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(), random_ids(1, 9)
    heads = noisy(model)
    told: dict[int, tuple[Tensor, Tensor | None]] = {}
    for owner in heads.info.owners:
        head = heads.head(owner)

        def spy(h: Tensor, here: Tensor, before: Tensor | None, owner: int = owner, head: Head = head) -> Tensor:
            told[owner] = here, before
            return Head.forward(head, h, here, before)

        monkeypatch.setattr(head, "forward", spy)
    with torch.no_grad():
        out = Student(model, heads)(ids)
    assert told[0][1] is None
    for owner, (here, _) in told.items():
        assert torch.equal(here, out.routes[owner].ids)
    for before, owner in pairwise(told):
        assert torch.equal(told[owner][1], out.routes[before].ids)  # type: ignore[arg-type]
    own = family_of(model).choose(model.config, out.routes[2].logits)
    assert not torch.equal(out.routes[2].ids, own)  # what was executed is not what routers would have chosen


def test_gradients_reach_heads_through_weights_and_only_theirs() -> None:
    model, ids = tiny_model(), random_ids(2, 8)
    for weights, reached in (("head", True), ("router", False)):
        heads = noisy(model, weights=weights)
        student = Student(model, heads)
        student.zero_grad()
        student(ids).logits.square().mean().backward()
        got = {name: p.grad is not None and bool((p.grad != 0).any()) for name, p in heads.named_parameters()}
        assert set(got.values()) == {reached}, weights
        student.zero_grad()
        student(ids, torch.ones(2, 8, dtype=torch.bool)).logits.square().mean().backward()
        assert all(p.grad is None or not p.grad.any() for p in heads.parameters())


def test_layers_without_experts_lie_between() -> None:
    model, ids = tiny_model(mlp_only_layers=[1], intermediate_size=16), random_ids(1, 8)
    heads = noisy(model)
    assert heads.info.predicts == {0: 2, 2: 3} and heads.head(2).before is None
    with torch.no_grad():
        out = Student(model, heads)(ids)
    logits, _ = token_by_token(model, heads, ids[0], torch.zeros(8, dtype=torch.bool))
    torch.testing.assert_close(out.logits[0], logits, rtol=1e-4, atol=1e-4)


def test_heads_of_some_layers_leave_the_others_to_their_routers() -> None:
    model, ids = tiny_model(), random_ids(1, 8)
    heads = noisy(model)
    heads.info = replace(heads.info, first_predicted=3)
    student = Student(model, heads)
    with torch.no_grad():
        out = student(ids)
        assert list(out.said) == [3] and list(heads.info.predicts.values()) == [3]
        for layer in (0, 1, 2):
            assert torch.equal(out.routes[layer].ids, family_of(model).choose(model.config, out.routes[layer].logits))


def test_heads_of_another_model_are_refused_and_masks_of_another_shape() -> None:
    model = tiny_model()
    with pytest.raises(InputError, match="heads for another model"):
        Student(tiny_model(seed=1), Heads.untrained(model))
    with pytest.raises(ValueError, match="native is"):
        Student(model, Heads.untrained(model))(random_ids(1, 4), torch.ones(1, 3, dtype=torch.bool))
