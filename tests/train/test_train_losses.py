"""Losses on routes: gradients by finite differences, values by loops that follow definitions, what they move."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sluice.errors import InputError
from sluice.train.losses.balance import BiasBalance, evenness, load_balance, router_z, shares
from sluice.train.losses.domain import divided, hottest, outside, partition
from sluice.train.losses.locality import (
    LOSSES,
    Choice,
    chosen,
    held_before,
    held_mass,
    kl_neighbours,
    loss_named,
    margin_aware,
    missed,
    overlap,
    topk_set,
    weight_aware,
)

torch.set_num_threads(1)
B, T, E, K = 2, 7, 6, 2


def drawn(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits in float64, and the experts they choose."""
    logits = torch.randn(B, T, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return logits, logits.topk(K, -1).indices


def double(loss: Tensor) -> Tensor:
    return loss.double()


# --- gradients


@pytest.mark.parametrize("name", ["overlap", "mass"])
def test_gradients_of_smooth_losses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # or differences would drown in float32
    logits, ids = drawn()
    held = held_before(ids, E, 3)
    assert torch.autograd.gradcheck(lambda z: LOSSES[name](Choice(z, ids, held)), (logits.requires_grad_(),))


def test_gradients_of_balance_and_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    logits, ids = drawn()
    own = partition(E, 2)[torch.tensor([0, 1])]
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: load_balance(z, ids), (logits,))
    assert torch.autograd.gradcheck(router_z, (logits,))
    assert torch.autograd.gradcheck(lambda z: outside(z, own), (logits,))


def test_gradient_where_some_tokens_are_inside_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    logits, _ = drawn()
    own = partition(E, 2)[torch.tensor([0, 1])]
    mass = (logits.softmax(-1) * own[:, None]).sum(-1)
    assert 0 < int((mass > 0.5).sum()) < B * T and float((mass - 0.5).abs().min()) > 1e-3  # none at the bend
    assert torch.autograd.gradcheck(lambda z: outside(z, own, 0.5), (logits.requires_grad_(),))
    (mine,) = torch.autograd.grad(outside(logits, own, 0.5), logits)
    assert torch.equal(mine.any(-1), mass < 0.5)


def test_gradient_of_kl_is_that_of_a_fixed_token_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    logits, ids = drawn()
    fixed = logits.log_softmax(-1)[:, :-1]

    def same(z: Tensor) -> Tensor:
        return (fixed.exp() * (fixed - z.log_softmax(-1)[:, 1:])).sum(-1).mean()

    z = logits.clone().requires_grad_()
    held = held_before(ids, E, K)
    (mine,) = torch.autograd.grad(kl_neighbours(Choice(z, ids, held)), z)
    assert torch.autograd.gradcheck(same, (z,))
    torch.testing.assert_close(mine, torch.autograd.grad(same(z), z)[0])


def test_gradient_of_margin_is_that_of_a_fixed_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    logits, ids = drawn(3)
    held = held_before(ids, E, 3)
    z = logits.clone().requires_grad_()
    (mine,) = torch.autograd.grad(margin_aware(Choice(z, ids, held, tau=0.7)), z)
    expected = torch.zeros_like(logits)
    for b, t, c, h, m in pairs(logits, ids, held):
        share = math.exp(-m / 0.7) / (K * B * (T - 1))
        expected[b, t, c] += share
        expected[b, t, h] -= share
    torch.testing.assert_close(mine, expected)


def test_gradient_of_the_set_is_the_sigmoids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    logits, ids = drawn(4)
    held = held_before(ids, E, 3)
    z = logits.clone().requires_grad_()
    (mine,) = torch.autograd.grad(topk_set(Choice(z, ids, held, tau=0.5)), z)
    top = logits.topk(K + 1, -1).values
    s = torch.sigmoid((logits - top[..., K - 1 :].mean(-1, keepdim=True)) / 0.5)
    expected = s * (1 - s) / 0.5 * ~held / (K * B * (T - 1))
    expected[:, 0] = 0
    torch.testing.assert_close(mine, expected)


# --- values


def lru(ids: Tensor, slots: int) -> list[list[set[int]]]:
    """What an LRU of `slots` holds as each token comes; of a token's experts the best-ranked is the most recent."""
    found: list[list[set[int]]] = []
    for row in ids.tolist():
        order: list[int] = []
        found.append([])
        for token in row:
            found[-1].append(set(order[-slots:]))
            for e in reversed(token):
                if e in order:
                    order.remove(e)
                order.append(e)
    return found


@pytest.mark.parametrize("slots", [2, 3, 4, 6, 9])
def test_what_is_held_is_what_an_lru_holds(slots: int) -> None:
    _, ids = drawn(5)
    held = held_before(ids, E, slots)
    assert [[set(token.nonzero().flatten().tolist()) for token in row] for row in held] == lru(ids, slots)


def test_the_last_k_distinct_experts_are_the_token_befores() -> None:
    _, ids = drawn(6)
    assert torch.equal(held_before(ids, E, K)[:, 1:], chosen(ids, E)[:, :-1])


def test_misses_are_counted() -> None:
    ids = torch.tensor([[[0, 1], [1, 2], [3, 4], [4, 3]]])
    assert float(missed(ids, held_before(ids, 5, 2))) == pytest.approx(3 / 6)


def test_the_sets_value_is_the_share_of_misses() -> None:
    logits, ids = drawn(7)
    held = held_before(ids, E, 3)
    assert float(topk_set(Choice(logits, ids, held))) == pytest.approx(float(missed(ids, held)), abs=1e-6)


def pairs(logits: Tensor, ids: Tensor, held: Tensor) -> list[tuple[int, int, int, int, float]]:
    """(sequence, position, expert that leaves, expert that stays, margin), by the definition."""
    found = []
    for b in range(B):
        for t in range(1, T):
            z = logits[b, t].tolist()
            taken = set(ids[b, t].tolist())
            there = {e for e in range(E) if held[b, t, e]}
            leaves = sorted(taken - there, key=lambda e: z[e])
            stays = sorted(there - taken, key=lambda e: -z[e])
            found += [(b, t, c, h, z[c] - z[h]) for c, h in zip(leaves, stays, strict=False)]
    return found


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_the_margins_value_is_that_of_its_pairs(slots: int) -> None:
    logits, ids = drawn(8)
    held = held_before(ids, E, slots)
    expected = sum(math.exp(-m / 0.5) * m for *_, m in pairs(logits, ids, held)) / (K * B * (T - 1))
    assert float(margin_aware(Choice(logits, ids, held, tau=0.5))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_weights_say_how_near_a_pair_is(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    logits, ids = drawn(8)
    held = held_before(ids, E, slots)
    z = logits.clone().requires_grad_()
    value = weight_aware(Choice(z, ids, held, tau=0.2))
    (mine,) = torch.autograd.grad(value, z)
    expected, expected_grad = 0.0, torch.zeros_like(logits)
    for b, t, c, h, m in pairs(logits, ids, held):
        total = sum(math.exp(float(logits[b, t, e])) for e in ids[b, t])
        moved = (math.exp(float(logits[b, t, c])) - math.exp(float(logits[b, t, h]))) / total
        share = math.exp(-moved / 0.2) / (K * B * (T - 1))
        expected += share * m
        expected_grad[b, t, c] += share
        expected_grad[b, t, h] -= share
    assert float(value.detach()) == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(mine, expected_grad)


def test_masses_and_overlaps_follow_their_definitions() -> None:
    logits, ids = drawn(9)
    held = held_before(ids, E, 3)
    p = logits.softmax(-1)
    mass = [1 - sum(float(p[b, t, e]) for e in range(E) if held[b, t, e]) for b in range(B) for t in range(1, T)]
    assert float(held_mass(Choice(logits, ids, held))) == pytest.approx(sum(mass) / len(mass), rel=1e-5)
    agree = [float((p[b, t] * p[b, t - 1]).sum()) for b in range(B) for t in range(1, T)]
    assert float(overlap(Choice(logits, ids, held))) == pytest.approx(-sum(agree) / len(agree), rel=1e-5)
    kl = [float((p[b, t - 1] * (p[b, t - 1] / p[b, t]).log()).sum()) for b in range(B) for t in range(1, T)]
    assert float(kl_neighbours(Choice(logits, ids, held))) == pytest.approx(sum(kl) / len(kl), rel=1e-5)


def test_an_unknown_loss_lists_the_choices() -> None:
    with pytest.raises(InputError, match="overlap, kl, mass, set, margin, weight"):
        loss_named("sticky")


# --- what they do to routes


@pytest.mark.parametrize("name", list(LOSSES))
def test_descent_makes_neighbours_share(name: str) -> None:
    logits = torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    before, optimizer = None, torch.optim.Adam([logits], lr=0.05)
    for _ in range(60):
        ids = logits.detach().topk(K, -1).indices
        held = held_before(ids, 16, K)
        before = float(missed(ids, held)) if before is None else before
        optimizer.zero_grad()
        LOSSES[name](Choice(logits, ids, held)).backward()
        optimizer.step()
    ids = logits.detach().topk(K, -1).indices
    assert before is not None and float(missed(ids, held_before(ids, 16, K))) < 0.75 * before


def test_the_margin_leaves_what_is_far_from_a_tie() -> None:
    z = torch.tensor([[[5.0, 0.0, -1.0], [0.0, 0.1, -1.0], [0.0, -1.0, 6.0]]]).requires_grad_()
    ids = z.detach().topk(1, -1).indices  # 0, then 1 by a hair, then 2 by far
    (grad,) = torch.autograd.grad(margin_aware(Choice(z, ids, held_before(ids, 3, 1), tau=0.5)), z)
    assert float(grad[0, 1].abs().max()) > 1e3 * float(grad[0, 2].abs().max())


# --- balance


def test_even_load_costs_one_and_collapse_more() -> None:
    ids = torch.arange(12).view(1, 6, 2) % 6
    assert float(load_balance(torch.zeros(1, 6, 6), ids)) == pytest.approx(1.0)
    z = torch.zeros(1, 6, 6)
    z[..., :2] = 9.0
    assert float(load_balance(z, z.topk(2, -1).indices)) > 2.5


def test_evenness_is_0_at_collapse_and_1_at_even_load() -> None:
    _, ids = drawn()
    assert evenness(torch.full((E,), 1 / E), K) == pytest.approx(1.0)
    assert evenness(torch.tensor([0.5, 0.5, 0, 0, 0, 0]), K) == pytest.approx(0.0, abs=1e-6)
    assert 0 < evenness(shares(ids, E), K) < 1


def test_bias_balance_evens_a_skewed_router() -> None:
    skew = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0])
    logits = torch.randn(4000, E, generator=torch.Generator().manual_seed(2)) + skew
    balance = BiasBalance([3], E, rate=0.02)
    share = shares(logits.topk(K, -1).indices, E)
    before = evenness(share, K)
    for _ in range(150):
        share = shares((logits + balance.of(3)).topk(K, -1).indices, E)
        balance.update(share[None])
    assert before < 0.8 and evenness(share, K) > 0.99


# --- domains


def test_every_expert_has_one_domain() -> None:
    parts = partition(32, 4)
    assert parts.sum(0).eq(1).all() and parts.sum(1).tolist() == [8, 8, 8, 8]
    assert partition(7, 3).sum(1).tolist() == [3, 2, 2]
    with pytest.raises(InputError, match="2 experts can't be divided over 3"):
        partition(2, 3)


def test_outside_is_the_surprise_at_the_domain() -> None:
    logits, _ = drawn(2)
    own = partition(E, 2)[torch.tensor([1, 0])]
    p = logits.softmax(-1)
    expected = -torch.stack([p[0, :, 3:].sum(-1).log(), p[1, :, :3].sum(-1).log()]).mean()
    assert float(outside(logits, own)) == pytest.approx(float(expected), rel=1e-5)


def test_outside_ends_where_the_domain_has_enough() -> None:
    logits, _ = drawn(2)
    own = partition(E, 2)[torch.tensor([1, 0])]
    mass = (logits.softmax(-1) * own[:, None]).sum(-1).flatten().tolist()
    expected = sum(max(0.0, -math.log(m) + math.log(0.6)) for m in mass) / len(mass)
    assert float(outside(logits, own, 0.6)) == pytest.approx(expected, rel=1e-5)
    assert float(outside(logits, own, 1.0)) == pytest.approx(float(outside(logits, own)), rel=1e-6)


def test_domains_keep_the_experts_that_they_use_most() -> None:
    used = torch.tensor([[50, 30, 20, 0, 0], [2, 16, 0, 2, 0], [60, 0, 0, 30, 10]])
    # by share: 1 to domain 1 (0.8), 0 to domain 2 (0.6), which is full then; 2 to domain 0 (0.2), others have its first
    # two; 3 to domain 1 (0.1), though domain 2 uses it more; 4 to domain 0, the only one with room
    assert [one.nonzero().flatten().tolist() for one in divided(used)] == [[2, 4], [1, 3], [0]]
    assert torch.equal(divided(torch.zeros(3, 7)), partition(7, 3))


def test_the_hottest_experts_may_be_several_domains() -> None:
    used = torch.tensor([[5, 9, 5, 0, 1], [0, 3, 3, 3, 1]])
    assert [one.nonzero().flatten().tolist() for one in hottest(used)] == [[0, 1], [1, 2]]


def test_a_token_that_takes_all_experts_has_nothing_to_learn_from_the_set() -> None:
    z = torch.randn(B, T, K, generator=torch.Generator().manual_seed(1), requires_grad=True)
    ids = z.detach().topk(K, -1).indices
    held = torch.zeros(B, T, K, dtype=torch.bool)
    held[..., 0] = True
    loss = topk_set(Choice(z, ids, held))
    (gradient,) = torch.autograd.grad(loss, z)
    assert float(loss.detach()) == pytest.approx(1 / K) and not gradient.any()
