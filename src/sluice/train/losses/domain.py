"""The experts of the domains of text: which are whose, and a loss that keeps tokens to theirs; know no cache."""

from __future__ import annotations

import math

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


def divided(used: Tensor) -> Tensor:
    """[domains, E] bool: a layer's experts, divided so that domains keep what they use most, by `used` [domains, E].

    Each expert has one domain, and domains have as many as by `partition`. The largest share of a domain's use that is
    left goes first, unless the domain has all of its experts; of equal ones the lower domain's, the lower id.
    """
    n_domains, n_expert = used.shape
    room = partition(n_expert, n_domains).sum(1).tolist()
    share = used.double() / used.double().sum(1, keepdim=True).clamp_min(1e-300)
    own = torch.zeros(n_domains, n_expert, dtype=torch.bool)
    free = set(range(n_expert))
    for i in share.flatten().sort(descending=True, stable=True).indices.tolist():
        domain, expert = divmod(i, n_expert)
        if expert in free and room[domain]:
            own[domain, expert] = True
            free.remove(expert)
            room[domain] -= 1
    return own


def hottest(used: Tensor) -> Tensor:
    """[domains, E] bool: a layer's experts that each domain uses most, by `used` [domains, E], an even share of all.

    Domains may have some in common, and some experts may be nobody's. Of equals the lower id.
    """
    n_domains, n_expert = used.shape
    most = used.sort(dim=-1, descending=True, stable=True).indices[:, : n_expert // n_domains]
    return torch.zeros(n_domains, n_expert, dtype=torch.bool).scatter_(1, most, True)


def outside(logits: Tensor, own: Tensor, enough: float = 0.0) -> Tensor:
    """−mean_t log Σ_{e own} p_t(e), in nats: how surprised a router is by its text's domain. `own` is [B, E] bool.

    With `enough` > 0, mean_t max(0, log enough − log Σ): a token whose experts have so much is not pushed any more.
    """
    log_p = logits.float().log_softmax(-1)
    surprise = -log_p.masked_fill(~own[:, None], -torch.inf).logsumexp(-1)
    return ((surprise + math.log(enough)).clamp_min(0) if enough else surprise).mean()
