"""How many of a layer's next experts are foretold, by heads and by guesses that need no training. Knows no losses.

recall@k of a layer: of the k experts that its router chooses at token t + 1, the share in a guess of k made at t.
Routes are the routers' own throughout, so that every guess is held against the same truth:

    head        of the layer before, on its hidden state and routes at t
    untrained   the layer's own router on that hidden state: the skip path a head begins with
    previous    the experts that the layer itself ran at t
    popularity  the k experts that the layer uses most on the very text that is scored: no fixed set does better
    chance      k of E drawn blindly
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sluice.errors import InputError
from sluice.train.families import config_of, family_of
from sluice.train.heads import Heads
from sluice.train.passages import Passage
from sluice.train.routes import record

GUESSES = ("head", "untrained", "previous", "popularity", "chance")


@dataclass(frozen=True)
class LayerRecall:
    """recall@k of a predicted layer over `tokens` tokens."""

    layer: int
    owner: int
    tokens: int
    head: float
    untrained: float
    previous: float
    popularity: float
    chance: float

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


class _Sums:
    """What one layer has come to so far."""

    def __init__(self, n_expert: int) -> None:
        self.tokens = 0
        self.hits: dict[str, int] = dict.fromkeys(GUESSES[:3], 0)
        self.used = torch.zeros(n_expert, dtype=torch.long)

    def add(self, truth: Tensor, guesses: dict[str, Tensor]) -> None:
        self.tokens += len(truth)
        self.used += torch.bincount(truth.flatten().cpu(), minlength=len(self.used))
        for name, guess in guesses.items():
            self.hits[name] += overlap(truth, guess)


def overlap(truth: Tensor, guess: Tensor) -> int:
    """How many of the ids in `truth` [n, k] are in the same row of `guess` [n, m]; a row's ids are distinct."""
    return int((truth[:, :, None] == guess[:, None, :]).sum())


@torch.no_grad()
def recall(model: nn.Module, heads: Heads, texts: Sequence[Passage]) -> list[LayerRecall]:
    """The recall of each predicted layer on `texts`, each on its own.

    Raises InputError where the heads are for another model, or no text has two tokens.
    """
    heads.check_model(model)
    family, config = family_of(model), config_of(model)
    device = next(model.parameters()).device
    untrained = Heads.untrained(model).to(device)
    sums = {layer: _Sums(heads.info.n_expert) for layer in heads.info.predicts.values()}
    with record(model) as routes:
        for text in texts:
            if len(text.ids) < 2:
                continue
            model(torch.from_numpy(text.ids)[None].to(device), use_cache=False)
            for owner, layer in heads.info.predicts.items():
                here = routes[owner]
                before = routes[owner - 1].ids if heads.info.reads_before(owner) else None
                hidden = here.hidden.float()
                own = routes[layer].ids
                guesses = {
                    "head": family.choose(config, heads.head(owner)(hidden, here.ids, before))[:-1],
                    "untrained": family.choose(config, untrained.head(owner)(hidden, here.ids, before))[:-1],
                    "previous": own[:-1],
                }
                sums[layer].add(own[1:], guesses)
    if not any(one.tokens for one in sums.values()):
        raise InputError("no text has two tokens, nothing to foretell: give longer text")
    return [_recall(layer, owner, sums[layer], heads.info.top_k) for owner, layer in heads.info.predicts.items()]


def _recall(layer: int, owner: int, sums: _Sums, k: int) -> LayerRecall:
    n = sums.tokens * k
    return LayerRecall(
        layer=layer,
        owner=owner,
        tokens=sums.tokens,
        **{name: hits / n for name, hits in sums.hits.items()},
        popularity=int(sums.used.topk(k).values.sum()) / n,
        chance=k / len(sums.used),
    )


def mean_recall(layers: Sequence[LayerRecall]) -> dict[str, float]:
    """The mean over layers of each guess."""
    return {name: sum(getattr(one, name) for one in layers) / len(layers) for name in GUESSES}
