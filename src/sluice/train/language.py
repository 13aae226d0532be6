"""The objective of a language model with experts: cross entropy, even loads, and terms on its routes.

Knows a model by its family's routers and a pass over text, and nothing of steps, files of text or recipes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.train import processes
from sluice.train.anneal import strength
from sluice.train.families import config_of, family_of
from sluice.train.losses.balance import BiasBalance, evenness, load_balance, router_z, shares
from sluice.train.losses.locality import held_before, missed
from sluice.train.objective import Metrics, Objective, to_device
from sluice.train.recipe import Balance
from sluice.train.routes import Choose, impose, record

CACHE_SHARE = 0.134  # of a layer's experts: the cache whose misses are reported
BIAS_GONE = 0.95  # of the run


@dataclass(frozen=True)
class Pass:
    """What a pass over a batch came to. `routes` by layer: logits [B, T, E], ids [B, T, k]. `done`: of the run.

    `of_routers` gives the same logits by layer, through which gradients reach the routers alone.
    """

    ids: Tensor  # [B, T + 1]
    domain: Tensor  # [B]
    logits: Tensor  # [B, T, V]
    routes: Mapping[int, tuple[Tensor, Tensor]]
    done: float
    of_routers: Callable[[], Mapping[int, Tensor]] = dict


class Term:
    """Something beside cross entropy and balance that a run is after. This one asks for nothing."""

    def loss(self, seen: Pass) -> tuple[Tensor, Metrics]:
        """Its part of the loss, weighted, and figures to report."""
        return seen.logits.new_zeros(()), {}

    def prior(self, domain: Tensor, done: float) -> Tensor | None:
        """[B, E] added to routers' logits where experts are chosen, in training alone; None for nothing."""
        return None

    def moved(self, layer: int, logits: Tensor, ids: Tensor, done: float) -> Tensor:
        """The experts [B, T, k] that a layer is to take in training, where that isn't `ids`, the choice so far.

        `logits` [B, T, E] have no gradients. To leave the choice alone, give the very `ids` back.
        """
        return ids

    def end_step(self) -> None:
        """Called when a step has changed the weights, on all processes: for what isn't learned by gradients."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint has to keep of it, by names that no other term's has."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take what is its own of a checkpoint's, which may be of a run without this term."""


class LanguageModel(Objective):
    """Trains all of `model`, which transformers made, on rows of text.

    `held_out` are batches to measure on, `domains` the names that their domain numbers stand for. `save` writes the
    model. Raises InputError for a model of no known family.
    """

    def __init__(
        self, model: nn.Module, balance: Balance, held_out: Sequence[tuple[Any, Any]], domains: Sequence[str],
        save: Callable[[nn.Module, Path], None], terms: Sequence[Term] = (),
    ) -> None:  # fmt: skip
        self.model, self.balance, self.held_out, self.domains = model, balance, held_out, domains
        self.terms, self._save = terms, save
        self.family, self.config = family_of(model), config_of(model)
        self.layers = list(self.family.routers(model))
        self.n_expert = n_experts(model)
        self.top_k = self.family.top_k(self.config)
        self.bias = BiasBalance(self.layers, self.n_expert, balance.bias) if balance.bias else None
        self.done = 0.0
        self._load: Tensor | None = None  # [layers, E], of the step at hand

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: one for name, one in self.model.named_parameters() if one.requires_grad}

    # --- steps

    def begin_step(self, step: int, steps: int) -> None:
        self.done = step / steps
        self.model.train()

    def loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Metrics]:
        seen = self.run(*batch, prior=True)
        entropy = F.cross_entropy(seen.logits.float().flatten(0, 1), seen.ids[:, 1:].flatten())
        figures: Metrics = {"cross_entropy": float(entropy.detach())}
        total = entropy
        if self.balance.loss or self.balance.z:
            even = torch.stack([load_balance(*route, _mean) for route in seen.routes.values()]).mean()
            z = torch.stack([router_z(logits) for logits, _ in seen.routes.values()]).mean()
            moved = strength("late", self.done) * (self.balance.final - 1)
            total = total + self.balance.loss * (1 + moved) * even + self.balance.z * z
            figures |= {"balance": float(even.detach()), "router_z": float(z.detach())}
        for term in self.terms:
            more, named = term.loss(seen)
            total, figures = total + more, figures | named
        self._load = torch.stack([shares(ids, self.n_expert) for _, ids in seen.routes.values()])
        return total, figures | use(self._load, self.top_k) | self._cache(seen)

    def end_step(self) -> None:
        if self.bias is not None and self._load is not None:
            self.bias.update(_mean(self._load))
        for term in self.terms:
            term.end_step()

    def run(self, ids: Tensor, domain: Tensor, *, prior: bool = False) -> Pass:
        """A pass over ids [B, T + 1], all but the last of which the model reads; `prior`: routed as training is."""
        with ExitStack() as stack:
            if prior:
                stack.enter_context(impose(self.model, self._choose(self._added(domain), ids.shape[1] - 1)))
            routes = stack.enter_context(record(self.model))
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        shape = (ids.shape[0], ids.shape[1] - 1, -1)
        found = {layer: (one.logits.view(shape), one.ids.view(shape)) for layer, one in routes.items()}

        def of_routers() -> dict[int, Tensor]:
            routers = self.family.routers(self.model)
            return {layer: routers[layer](one.hidden.detach())[0].view(shape) for layer, one in routes.items()}

        return Pass(ids, domain, logits, found, self.done, of_routers)

    def _added(self, domain: Tensor) -> dict[int, Tensor] | None:
        """By layer what is added to logits [B, E]; None for nothing."""
        priors = [term.prior(domain, self.done) for term in self.terms]
        left = min(1.0, max(0.0, (BIAS_GONE - self.done) / max(1e-9, BIAS_GONE - self.balance.fade)))
        parts: list[Tensor] = [one for one in priors if one is not None]
        if self.bias is None or not left:
            return {layer: sum(parts[1:], parts[0]) for layer in self.layers} if parts else None
        return {layer: sum(parts, (left * self.bias.of(layer)).to(domain.device)) for layer in self.layers}

    def _choose(self, added: Mapping[int, Tensor] | None, length: int) -> Choose:
        """How training routes: by logits and what is `added` to them, and then as terms move it."""

        def choose(layer: int, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor] | None:
            seen = logits.detach()
            if added is None:
                native = self.family.choose(self.config, seen)
            else:
                more = added[layer]
                more = more.repeat_interleave(length, 0) if more.ndim == 2 else more
                native = (seen + more).topk(self.top_k, -1).indices
            rows = native.view(-1, length, self.top_k)
            ids = rows
            for term in self.terms:
                ids = term.moved(layer, seen.view(*rows.shape[:2], -1), ids, self.done)
            if added is None and ids is rows:
                return None
            ids = ids.reshape(native.shape)
            return self.family.weights(self.config, logits, ids), ids

        return choose

    def _cache(self, seen: Pass) -> Metrics:
        """How often a choice would miss an LRU of its layer's own, and how often it is not the token before's."""
        return reuse([ids for _, ids in seen.routes.values()], self.n_expert)

    # --- held-out text

    def validate(self) -> Metrics:
        """Losses of each domain and of all alike; misses; the share of a domain's demand that its top experts serve."""
        self.model.eval()
        losses = torch.zeros(len(self.domains), dtype=torch.float64)
        rows = torch.zeros(len(self.domains), dtype=torch.float64)
        used = torch.zeros(len(self.domains), len(self.layers), self.n_expert)
        figures: list[Metrics] = []
        device = next(self.model.parameters()).device
        for batch in self.held_out:
            seen = self.run(*to_device(batch, device))
            entropy = F.cross_entropy(seen.logits.float().transpose(1, 2), seen.ids[:, 1:], reduction="none").mean(1)
            domain = seen.domain.cpu()
            losses.index_add_(0, domain, entropy.cpu().double())
            rows.index_add_(0, domain, torch.ones(len(domain), dtype=torch.float64))
            for i, (_, ids) in enumerate(seen.routes.values()):
                for row, d in zip(ids.cpu(), domain.tolist(), strict=True):
                    used[d, i] += torch.bincount(row.flatten(), minlength=self.n_expert)
            figures.append(self._cache(seen))
        present = rows > 0
        means = losses[present] / rows[present]
        found: Metrics = {"loss": float(means.mean()), "perplexity": math.exp(min(700.0, float(means.mean())))}
        names = [name for name, there in zip(self.domains, present.tolist(), strict=True) if there]
        found |= {f"loss.{name}": value for name, value in zip(names, means.tolist(), strict=True)}
        found |= {name: sum(one[name] for one in figures) / len(figures) for name in figures[0]}
        found |= use(used.sum(0) / used.sum((0, 2)).clamp_min(1)[:, None], self.top_k)
        return found | domain_hits(used[present], names)

    # --- files

    def save_final(self, folder: Path) -> None:
        self._save(self.model.eval(), folder / "model")

    def state(self) -> dict[str, Tensor]:
        found = {} if self.bias is None else {"bias": self.bias.bias}
        for term in self.terms:
            found |= term.state()
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if self.bias is not None:
            self.bias.bias = state["bias"].clone()
        for term in self.terms:
            term.restore(state)


def use(load: Tensor, top_k: int) -> Metrics:
    """Of `load` [layers, E], shares of each layer's demand: the least even layer's evenness, and experts unused."""
    return {
        "load_entropy": min(evenness(one, top_k) for one in load),
        "dead_share": float((load == 0).float().mean()),
    }


def reuse(ids: Sequence[Tensor], n_expert: int) -> Metrics:
    """Of each layer's ids [B, T, k]: the share that the token before took too, and that an LRU would miss.

    The LRU is a layer's own, of CACHE_SHARE of its experts and at least of one token's.
    """
    if ids[0].shape[1] < 2:
        return {}
    k = ids[0].shape[-1]
    slots = max(k, round(CACHE_SHARE * n_expert))
    kept = [1 - float(missed(one, held_before(one, n_expert, k))) for one in ids]
    misses = [float(missed(one, held_before(one, n_expert, slots))) for one in ids]
    return {"reuse": sum(kept) / len(kept), "lru_miss": sum(misses) / len(misses)}


def domain_hits(used: Tensor, names: Sequence[str]) -> Metrics:
    """Of `used` [domains, layers, E]: the share of a domain's demand on its most used even share of each layer."""
    size = max(1, used.shape[-1] // max(1, len(names)))
    top = used.topk(size, -1).values.sum((1, 2)) / used.sum((1, 2)).clamp_min(1)
    return {f"own.{name}": value for name, value in zip(names, top.tolist(), strict=True)}


def _mean(value: Tensor) -> Tensor:
    processes.average([value])
    return value


def n_experts(model: nn.Module) -> int:
    """Experts of a layer of `model`."""
    routers = family_of(model).routers(model)
    return int(next(iter(routers.values())).weight.shape[0])  # type: ignore[union-attr]
