"""Experts divided over the domains of text: which are whose, and a loss that keeps tokens to theirs; know no cache."""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.errors import InputError


def partition(n_expert: int, n_domains: int) -> Tensor:
    """[domains, E] bool: each domain's experts, the same in every layer, even shares in the order of ids.

    Raises InputError for more domains than experts.
    """
    if not 1 <= n_domains <= n_expert:
        raise InputError(f"{n_expert} experts can't be divided over {n_domains} domains: give fewer domains")
    owner = torch.arange(n_expert) * n_domains // n_expert
    return owner == torch.arange(n_domains)[:, None]


def outside(logits: Tensor, own: Tensor) -> Tensor:
    """−mean_t log Σ_{e own} p_t(e), in nats: how surprised a router is by its text's domain. `own` is [B, E] bool."""
    log_p = logits.float().log_softmax(-1)
    return -log_p.masked_fill(~own[:, None], -torch.inf).logsumexp(-1).mean()
