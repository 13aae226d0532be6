"""What a run may ask of routes beside even load: neighbours that share experts, domains that keep to theirs.

Terms of `language.LanguageModel`; they know losses and schedules, no files.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.errors import InputError
from sluice.train import processes
from sluice.train.anneal import rising, strength
from sluice.train.language import Pass, Term
from sluice.train.losses.domain import divided, hottest, outside, partition
from sluice.train.losses.locality import Choice, held_before, loss_named, weight_aware
from sluice.train.objective import Metrics
from sluice.train.recipe import COUNTS, Distill, Domain, Locality, Recipe
from sluice.train.rerouted import rerouted


class Neighbours(Term):
    """Rewards tokens for taking the experts that a cache holds, or the token before took.

    Where training is rerouted, the cache is that of the final routes, and what is rewarded is the router's own choice.
    """

    def __init__(self, asked: Locality) -> None:
        self.asked, self._loss = asked, loss_named(asked.loss)

    def loss(self, seen: Pass) -> tuple[Tensor, Metrics]:
        if seen.logits.shape[1] < 2:
            return seen.logits.new_zeros(()), {}
        parts: list[Tensor] = []
        alone = seen.of_routers() if self.asked.learns == "routers" else {}
        for layer, (logits, ids) in seen.routes.items():
            logits = alone.get(layer, logits)
            held = held_before(ids, logits.shape[-1], self.asked.slots or ids.shape[-1])
            own = logits.detach().topk(ids.shape[-1], -1).indices if self.asked.reroute else ids
            parts.append(self._loss(Choice(logits, own, held, self.asked.tau)))
        value = torch.stack(parts).mean()
        weight = self.asked.weight * strength(self.asked.anneal, seen.done)
        return weight * value, {"locality": float(value.detach())}


class Rerouted(Term):
    """Takes the routes that cache-aware rerouting would, so that a model learns to be served so."""

    def __init__(self, asked: Locality) -> None:
        self.asked = asked

    def moved(self, layer: int, logits: Tensor, ids: Tensor, done: float) -> Tensor:
        margin = self.asked.reroute * strength(self.asked.anneal, done)
        if margin <= 0:
            return ids
        scores = logits.float().softmax(-1).cpu().numpy()
        slots = self.asked.slots or ids.shape[-1]
        final = rerouted(ids.cpu().numpy(), scores, slots, margin, self.asked.keep)
        return torch.from_numpy(final).to(ids.device)


class OwnExperts(Term):
    """Keeps each domain's tokens to its experts: an even part of them, or what they were seen to use."""

    def __init__(self, asked: Domain, n_expert: int, n_domains: int) -> None:
        self.asked, self.parts = asked, partition(n_expert, n_domains)
        self.sets = self.parts[None] if asked.experts == "even" else None  # [layers, or 1 for all, domains, E]
        self.used: Tensor | None = None  # [layers, domains, E] float64: tokens that took each expert, while they count
        self._counted: Tensor | None = None  # the same of the step at hand, in this process

    def loss(self, seen: Pass) -> tuple[Tensor, Metrics]:
        if self.asked.experts in COUNTS and seen.done < self.asked.begin:
            self.sets = None  # a longer run may have been branched off one that had begun
            self.used = self.used if self.asked.counts(seen.done) else None
        if self.asked.counts(seen.done):
            self._counted = torch.stack([self._count(seen.domain, ids) for _, ids in seen.routes.values()])
        if self.sets is None and seen.done >= self.asked.begin:
            self.sets = self._divided()
        if self.sets is None:
            return seen.logits.new_zeros(()), {}
        sets = self.sets.to(seen.domain.device).expand(len(seen.routes), -1, -1)[:, seen.domain]  # [layers, B, E]
        routes = list(zip(sets, seen.routes.values(), strict=True))
        inside = float(torch.stack([_inside(own, ids) for own, (_, ids) in routes]).mean())
        inside = processes.averages({"inside": inside})["inside"]  # the same in all processes
        value = torch.stack([self._strayed(own, *route) for own, route in routes]).mean()
        weight = self.asked.weight * rising(self.asked.begin, self.asked.full, seen.done)
        if self.asked.loss == "weight" and 0 < self.asked.enough <= inside:
            weight = 0.0
        return weight * value, {"domain": float(value.detach()), "domain_hit": inside}

    def _strayed(self, own: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
        """The loss of a layer's tokens, whose domains' experts are `own` [B, E]; by swaps, of all but the first."""
        if self.asked.loss == "mass":
            return outside(logits, own, self.asked.enough)
        if logits.shape[1] < 2:
            return logits.new_zeros(())
        return weight_aware(Choice(logits, ids, own[:, None].expand_as(logits), self.asked.tau))

    def _count(self, domain: Tensor, ids: Tensor) -> Tensor:
        """[domains, E]: of ids [B, T, k], how many of each domain's are each expert."""
        pairs = domain[:, None, None] * self.parts.shape[1] + ids
        return torch.bincount(pairs.flatten(), minlength=self.parts.numel()).view(self.parts.shape).float()

    def _divided(self) -> Tensor:
        """Each domain's experts [layers, domains, E], the same in all processes.

        Raises InputError where nothing was counted, or nothing of a domain that is to have its hottest.
        """
        if self.used is None:
            raise InputError(f'domain.experts is "{self.asked.experts}" and nothing was counted before '
                             f"{self.asked.begin:g} of the run: branch off an earlier checkpoint")  # fmt: skip
        if self.asked.experts == "used":
            return torch.stack([divided(one) for one in self.used])
        if not self.used.sum(-1).all():
            raise InputError('domain.experts is "hottest" and a domain had no text in the steps that are counted, '
                             f'before {self.asked.begin:g} of the run: begin later, or give "used"')  # fmt: skip
        return torch.stack([hottest(one) for one in self.used])

    def end_step(self) -> None:
        if self._counted is None:
            return
        processes.average([self._counted])  # every process has the same counts then, and so the same sets
        counted = self._counted.cpu().double() * processes.place().world
        self.used = counted if self.used is None else self.used + counted
        self._counted = None

    def state(self) -> dict[str, Tensor]:
        if self.asked.experts == "even" or self.used is None:
            return {}
        return {"domain.begin": torch.tensor(self.asked.begin, dtype=torch.float64), "domain.used": self.used}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Counts, but for those of a run that begins elsewhere: they are of other steps than it asks for."""
        begun = state.get("domain.begin")
        if self.asked.experts in COUNTS and begun is not None and float(begun) == self.asked.begin:
            self.used, self.sets = state["domain.used"], None  # what is divided follows from what was counted

    def prior(self, domain: Tensor, done: float) -> Tensor | None:
        left = max(0.0, 1 - done / self.asked.until) if self.asked.until else 0.0
        if not self.asked.prior or not left:
            return None
        return self.asked.prior * left * self.parts.to(domain.device)[domain].float()


class Teacher(Term):
    """Takes the teacher's next-token distribution for a part of what is to be learned."""

    def __init__(self, asked: Distill, teacher: nn.Module) -> None:
        self.asked, self.teacher = asked, teacher.eval().requires_grad_(False)

    def loss(self, seen: Pass) -> tuple[Tensor, Metrics]:
        weight = self.asked.weight * strength(self.asked.anneal, seen.done)
        if not weight:
            return seen.logits.new_zeros(()), {}
        with torch.no_grad():
            wanted = self.teacher(input_ids=seen.ids[:, :-1], use_cache=False).logits.float().log_softmax(-1)
        log_p = seen.logits.float().log_softmax(-1)
        kl = (wanted.exp() * (wanted - log_p)).sum(-1).mean()
        entropy = F.nll_loss(log_p.flatten(0, 1), seen.ids[:, 1:].flatten())
        return weight * (kl - entropy), {"kl": float(kl.detach())}


def terms(recipe: Recipe, n_expert: int, n_domains: int, teacher: nn.Module | None) -> list[Term]:
    """What `recipe` asks for beside cross entropy and balance. Raises InputError."""
    found: list[Term] = []
    loss_named(recipe.locality.loss)
    if recipe.locality.weight:
        found.append(Neighbours(recipe.locality))
    if recipe.locality.reroute:
        found.append(Rerouted(recipe.locality))
    if recipe.domain.weight or recipe.domain.prior:
        found.append(OwnExperts(recipe.domain, n_expert, n_domains))
    if recipe.distill.weight and teacher is not None:
        found.append(Teacher(recipe.distill, teacher))
    elif recipe.distill.weight:
        raise InputError("distill.weight asks for a teacher: give --teacher MODEL, or leave it out")
    elif teacher is not None:
        raise InputError("a teacher is given and distill.weight is 0: give it a weight, or leave the teacher out")
    return found


def _inside(own: Tensor, ids: Tensor) -> Tensor:
    """The share of choices [B, T, k] within `own` [B, E]."""
    return own.gather(1, ids.flatten(1)).float().mean()
