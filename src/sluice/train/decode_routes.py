"""Routes that a torch model takes through texts, as if it decoded them, in memory and as a trace. Knows no cache.

A causal model routes a token the same whether the rest of the text is computed with it or later, so one pass over a
text gives the routes of decoding it token by token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sluice.errors import InputError
from sluice.trace import TraceInfo, TraceWriter
from sluice.train.families import Family, config_of, family_of
from sluice.train.passages import Passage
from sluice.train.routes import Routes, record

Array = np.ndarray[Any, Any]
SOURCE = "routes of a torch model, as in decoding"


@dataclass(frozen=True)
class Decoded:
    """One text's routes; layers are those with experts, ascending."""

    domain: str
    experts: Array  # [T, layers, k] int16, best first
    weights: Array  # [T, layers, k] float32
    scores: Array | None  # [T, layers, E] float32, what weights are taken from


def info_of(model: nn.Module, name: str) -> TraceInfo:
    """What a trace of `model` says of it. Raises InputError for a model of no known family."""
    family, config = family_of(model), config_of(model)
    routers = family.routers(model)
    n_expert = int(next(iter(routers.values())).weight.shape[0])  # type: ignore[union-attr]
    return TraceInfo(
        fingerprint="",  # a GGUF file's; which of them this model becomes isn't known here
        architecture=family.architecture,
        name=name,
        n_layers=int(config.num_hidden_layers),
        moe_layers=tuple(routers),
        n_expert=n_expert,
        top_k=family.top_k(config),
        expert_bytes=(0,) * len(routers),
        source=SOURCE,
    )


def decoded(domain: str, routes: Routes, family: Family, config: Any, *, scores: bool = False) -> Decoded:
    """What a pass over one text recorded, taken to arrays."""
    layers = list(routes.values())
    scored = [family.scores(config, one.logits).float().cpu().numpy() for one in layers] if scores else None
    return Decoded(
        domain,
        np.stack([one.ids.cpu().numpy().astype(np.int16) for one in layers], 1),
        np.stack([one.weights.detach().float().cpu().numpy() for one in layers], 1),
        None if scored is None else np.stack(scored, 1),
    )


@torch.no_grad()
def decode_routes(model: nn.Module, texts: Sequence[Passage], *, scores: bool = False) -> Iterator[Decoded]:
    """The routes of each text, in turn. Raises InputError for a model of no known family."""
    family, config = family_of(model), config_of(model)
    device = next(model.parameters()).device
    for text in texts:
        with record(model) as routes:
            model(torch.from_numpy(text.ids)[None].to(device), use_cache=False)
        yield decoded(text.domain, routes, family, config, scores=scores)


def write_trace(path: Path, info: TraceInfo, decoded: Iterable[Decoded], *, force: bool = False) -> int:
    """Write texts' routes as a trace, a decode step a token, a sequence a text; returns its steps.

    Scores are written if the first text has them. Raises InputError for a path that can't be written, for no texts, and
    where `path` exists and not `force`.
    """
    texts = iter(decoded)
    if (first := next(texts, None)) is None:
        raise InputError(f"{path}: there are no texts to trace: give some")
    step = 0
    keep = first.scores is not None
    with TraceWriter(path, info, scores=keep, force=force) as writer:
        for sequence, one in enumerate(_chain(first, texts)):
            assert (one.scores is not None) == keep
            writer.domains[sequence] = one.domain
            number = np.array([sequence])
            for position in range(len(one.experts)):
                writer.begin_step(step, "decode", number, np.array([position]))
                for i, layer in enumerate(info.moe_layers):
                    scored = None if one.scores is None else one.scores[position, i][None]
                    writer.chose(layer, one.experts[position, i][None], scored)
                    writer.weighed(one.weights[position, i][None])
                step += 1
    return step


def _chain(first: Decoded, rest: Iterator[Decoded]) -> Iterator[Decoded]:
    yield first
    yield from rest
