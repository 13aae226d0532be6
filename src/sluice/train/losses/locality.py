"""Losses that reward a token for taking experts that a cache holds, or the token before took; know no balance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.errors import InputError


def held_before(ids: Tensor, n_expert: int, slots: int) -> Tensor:
    """[B, T, E] bool: the experts of a layer that an LRU of `slots` of its own holds when a token comes.

    These are the last `slots` distinct ones that earlier tokens took; of one token's the better-ranked went in later
    and stay longer. With `slots` = k they are those of the token before. Nothing is held at position 0.
    """
    B, T, k = ids.shape
    used_at = torch.full((B, T, n_expert), -1, device=ids.device)
    order = torch.arange(T, device=ids.device).view(1, T, 1) * k + torch.arange(k - 1, -1, -1, device=ids.device)
    used_at.scatter_(2, ids, order.expand(B, T, k))
    last = used_at.cummax(1).values  # when each was last taken, up to and with this token
    last = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], 1)
    oldest = last.topk(min(slots, n_expert), -1).values[..., -1:]
    return (last >= oldest.clamp_min(0)) & (last >= 0)


def chosen(ids: Tensor, n_expert: int) -> Tensor:
    """[B, T, E] bool of ids."""
    return torch.zeros(*ids.shape[:-1], n_expert, dtype=torch.bool, device=ids.device).scatter_(-1, ids, True)


def missed(ids: Tensor, held: Tensor) -> Tensor:
    """The share of choices whose expert isn't held, over positions but the first."""
    return 1 - held.gather(-1, ids)[:, 1:].float().mean()


@dataclass(frozen=True)
class Choice:
    """What a locality loss sees of a layer. `tau`: how far from a tie is far, in logits, or shares of a weight."""

    logits: Tensor
    ids: Tensor
    held: Tensor
    tau: float = 1.0


def overlap(choice: Choice) -> Tensor:
    """−mean_t Σ_e p_t(e) p_{t−1}(e): the probability that two draws agree, with gradients at both tokens."""
    p = choice.logits.float().softmax(-1)
    return -(p[:, 1:] * p[:, :-1]).sum(-1).mean()


def kl_neighbours(choice: Choice) -> Tensor:
    """mean_t KL(p_{t−1} ‖ p_t) in nats; the token before is taken as it is, gradients flow at t alone."""
    log_p = choice.logits.float().log_softmax(-1)
    before = log_p[:, :-1].detach()
    return (before.exp() * (before - log_p[:, 1:])).sum(-1).mean()


def held_mass(choice: Choice) -> Tensor:
    """mean_t (1 − Σ_{e held} p_t(e)): the probability that a draw misses the cache."""
    p = choice.logits.float().softmax(-1)
    return 1 - (p * choice.held)[:, 1:].sum(-1).mean()


def topk_set(choice: Choice) -> Tensor:
    """mean_t |S_t ∖ held_t| ÷ k, exactly, with a straight-through estimate of the gradient.

    Backwards, expert e is in S_t by σ((z_e − θ_t) ÷ τ), θ_t half-way between the k-th and the next logit, held fixed;
    what is held is as it is. Where a token takes all experts there is no next one, and no gradient.
    """
    z, k = choice.logits.float(), choice.ids.shape[-1]
    top = F.pad(z.detach(), (0, 1), value=-torch.inf).topk(k + 1, -1).values
    soft = torch.sigmoid((z - top[..., -2:].mean(-1, keepdim=True)) / choice.tau)
    hard = chosen(choice.ids, z.shape[-1]).float()
    member = hard + soft - soft.detach()
    return (member * ~choice.held)[:, 1:].sum(-1).mean() / k


@dataclass(frozen=True)
class Swaps:
    """Pairs of an expert that a token takes and isn't held, and one that is held and not taken: [B, T − 1, ≤ k] each.

    The weakest taken come first, paired with the best held. `margin` is how far apart their logits are, with gradients:
    at least 0, but where something beside logits moved the choice. `paired` says where there is a pair; elsewhere all
    is 0.
    """

    margin: Tensor
    paired: Tensor
    taken: Tensor  # the logit of who is taken, without gradients


def swaps(choice: Choice) -> Swaps:
    """All pairs of tokens but the first."""
    z, k = choice.logits.float()[:, 1:], choice.ids.shape[-1]
    held, taken = choice.held[:, 1:], chosen(choice.ids, choice.logits.shape[-1])[:, 1:]
    absent, spare = taken & ~held, held & ~taken
    weakest = z.masked_fill(~absent, torch.inf).topk(k, -1, largest=False).values
    best = z.masked_fill(~spare, -torch.inf).topk(k, -1).values
    paired = weakest.isfinite() & best.isfinite()
    weakest = torch.where(paired, weakest, 0)
    return Swaps(weakest - torch.where(paired, best, 0), paired, weakest.detach())


def margin_aware(choice: Choice) -> Tensor:
    """Moves a token to what is held only where its router is nearly indifferent.

    Of each pair's margin m (see Swaps) the loss is exp(−m ÷ τ) m, the factor held fixed, summed over pairs, divided by
    k, and averaged over tokens. So a pair far from a tie feels next to nothing.
    """
    pairs = swaps(choice)
    return _pulled(pairs, pairs.margin.detach(), choice)


def weight_aware(choice: Choice) -> Tensor:
    """As margin_aware, where what is near is a pair whose swap would move little of what the token's experts add.

    That is (p_taken − p_held) ÷ Σ_{e taken} p(e), in place of m in the factor: an expert that hardly counts is given up
    for one that is far behind it in logits, and one that counts for most of the output only at a tie.
    """
    pairs = swaps(choice)
    with torch.no_grad():
        z = choice.logits.float()[:, 1:]
        mass = z.gather(-1, choice.ids[:, 1:]).logsumexp(-1, keepdim=True)
        moved = torch.exp(pairs.taken - mass) * -torch.expm1(-pairs.margin)
    return _pulled(pairs, moved, choice)


def _pulled(pairs: Swaps, far: Tensor, choice: Choice) -> Tensor:
    """The margins' mean, each weighted by how near its pair is. What is held and ahead already isn't pulled further."""
    weight = torch.where(pairs.paired, torch.exp(-far.clamp_min(0) / choice.tau), 0)
    return (weight * pairs.margin.clamp_min(0)).sum(-1).mean() / choice.ids.shape[-1]


LOSSES: dict[str, Callable[[Choice], Tensor]] = {
    "overlap": overlap,
    "kl": kl_neighbours,
    "mass": held_mass,
    "set": topk_set,
    "margin": margin_aware,
    "weight": weight_aware,
}


def loss_named(name: str) -> Callable[[Choice], Tensor]:
    """A locality loss. Raises InputError listing the choices."""
    if name not in LOSSES:
        raise InputError(f"locality loss {name!r} is unknown: choose from {', '.join(LOSSES)}")
    return LOSSES[name]
