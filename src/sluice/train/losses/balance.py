"""Losses and rules that keep a layer's experts in use; know no locality."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def shares(ids: Tensor, n_expert: int) -> Tensor:
    """[E] float32: the share of a layer's demand that each expert takes; they sum to 1."""
    flat = ids.reshape(-1)
    return torch.bincount(flat, minlength=n_expert).to(torch.float32) / flat.numel()


def load_balance(logits: Tensor, ids: Tensor, average: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """E · Σ_e f_e P_e: f_e the share of the demand that expert e takes, P_e its mean probability. 1 where all are even.

    `average` takes f to its mean over processes, so that the mean of the processes' losses is that of all their tokens.
    Source: Switch Transformer, equation 4 (https://arxiv.org/abs/2101.03961), f over the k choices of a token
    together; transformers' `load_balancing_loss_func` is k times this.
    """
    n_expert = logits.shape[-1]
    with torch.no_grad():
        f = shares(ids, n_expert)
        f = f if average is None else average(f)
    return n_expert * (f * logits.float().softmax(-1).reshape(-1, n_expert).mean(0)).sum()


def router_z(logits: Tensor) -> Tensor:
    """The mean of (log Σ_e exp z_e)²: keeps logits small. Source: ST-MoE, equation 5 (arxiv.org/abs/2202.08906)."""
    return logits.float().logsumexp(-1).square().mean()


def evenness(share: Tensor, top_k: int) -> float:
    """How evenly a layer's demand is spread, of its `shares`: 0 if all tokens take the same k experts, 1 if all alike.

    (H − log k) ÷ (log E − log k), H the entropy of the shares in nats.
    """
    entropy = float(-(share * share.clamp_min(1e-12).log()).sum())
    return (entropy - math.log(top_k)) / max(1e-9, math.log(share.numel()) - math.log(top_k))


class BiasBalance:
    """A bias per layer and expert, added to logits where experts are chosen and not where they are weighted.

    After each step an expert that took less than its even share gets `rate` more, one that took more `rate` less.
    No gradient has a part in it. Source: auxiliary-loss-free balancing, https://arxiv.org/abs/2408.15664.
    """

    def __init__(self, layers: list[int], n_expert: int, rate: float) -> None:
        self.layers, self.rate = layers, rate
        self.bias = torch.zeros(len(layers), n_expert)

    def of(self, layer: int) -> Tensor:
        """[E] of a layer."""
        return self.bias[self.layers.index(layer)]

    def update(self, share: Tensor) -> None:
        """After a step in which experts took `share` [layers, E] of their layer's demand."""
        self.bias += self.rate * torch.sign(1 / share.shape[-1] - share.to(self.bias))
