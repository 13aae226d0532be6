"""Stage 1: heads learn to say what the next layer's router will say of the next token. The model is frozen.

Loss: KL(p ‖ q) in nats over all experts, the mean over predicted layers and tokens; p the shares that the layer's own
router gives at t + 1, q those of the head of the layer before at t. Everything is routed natively.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sluice.train import processes
from sluice.train.families import config_of, family_of
from sluice.train.heads import Heads
from sluice.train.objective import Metrics, Objective
from sluice.train.routes import Routes, record
from sluice.train.stages import HEADS, trained

STAGE = "prerouter"


class ImitateRouters(Objective):
    """Heads that learn from batches (ids [B, T], …) of text. `held_out` are batches of text that isn't learnt from."""

    def __init__(
        self, model: nn.Module, heads: Heads, held_out: Sequence[Any], facts: Mapping[str, Any] | None = None
    ) -> None:
        """Freezes `model`. `facts` go into the heads' file. Raises InputError where the heads are for another model."""
        heads.check_model(model)
        self.model, self.heads = model.requires_grad_(False).eval(), heads
        self.family, self.config = family_of(model), config_of(model)
        self.held_out, self.facts = list(held_out), dict(facts or {})

    def trainable(self) -> dict[str, nn.Parameter]:
        return {f"heads.{name}": parameter for name, parameter in self.heads.named_parameters()}

    def loss(self, batch: Any) -> tuple[Tensor, Metrics]:
        losses, recalls = self._layers(batch)
        k = self.family.top_k(self.config)
        shares = {layer: float(hits) / (n * k) for layer, (hits, n) in recalls.items()}
        loss = torch.stack(list(losses.values())).mean()
        return loss, {"recall": sum(shares.values()) / len(shares), "recall_least": min(shares.values())}

    @torch.no_grad()
    def validate(self) -> Metrics:
        """`loss`, `recall` (mean of layers), and `recall.N` of each predicted layer N."""
        if not self.held_out:
            return {}
        losses: list[float] = []
        hits: dict[int, float] = {}
        seen = 0
        for batch in self.held_out:
            found, recalls = self._layers(batch)
            n = next(iter(recalls.values()))[1]
            losses.append(n * float(torch.stack(list(found.values())).mean()))
            seen += n
            for layer, (right, _) in recalls.items():
                hits[layer] = hits.get(layer, 0.0) + float(right)
        k = self.family.top_k(self.config)
        recall = {f"recall.{layer}": right / (seen * k) for layer, right in hits.items()}
        return {"loss": sum(losses) / seen, "recall": sum(recall.values()) / len(recall), **recall}

    def save_final(self, folder: Path) -> None:
        if processes.place().first:
            self.heads.save(folder / HEADS, trained(STAGE, self.heads, self.facts), force=True)

    def _layers(self, batch: Any) -> tuple[dict[int, Tensor], dict[int, tuple[Tensor, int]]]:
        """Of each predicted layer its loss, and of how many tokens how many experts were named rightly."""
        device = next(self.model.parameters()).device
        ids = torch.as_tensor(batch[0] if isinstance(batch, (tuple, list)) else batch).to(device)
        with torch.no_grad(), record(self.model) as routes:
            self.model(input_ids=ids, use_cache=False, logits_to_keep=1)  # all logits were a quarter of the work
        losses: dict[int, Tensor] = {}
        recalls: dict[int, tuple[Tensor, int]] = {}
        for owner, layer in self.heads.info.predicts.items():
            said = self._said(routes, owner, ids.shape)[:, :-1].flatten(0, 1)
            own = routes[layer].logits.view(*ids.shape, -1)[:, 1:].flatten(0, 1).float()
            true = routes[layer].ids.view(*ids.shape, -1)[:, 1:].flatten(0, 1)
            losses[layer] = kl(own, said)
            named = self.family.choose(self.config, said.detach())
            recalls[layer] = (named[:, :, None] == true[:, None, :]).sum(), len(true)
        return losses, recalls

    def _said(self, routes: Routes, owner: int, shape: torch.Size) -> Tensor:
        """Logits [B, T, E] that the owner's head says of the token after each."""
        here = routes[owner]
        before = routes[owner - 1].ids if self.heads.info.reads_before(owner) else None
        return self.heads.head(owner)(here.hidden, here.ids, before).view(*shape, -1).float()


def kl(p: Tensor, q: Tensor) -> Tensor:
    """The mean of KL(p ‖ q), in nats, over rows of logits [n, m]."""
    log_p, log_q = torch.log_softmax(p, -1), torch.log_softmax(q, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
