"""Measures a model on held-out text: losses, cache misses, domains, divergence from a teacher, repetition, recall.

It knows models by what one pass over a text gives, and neither trains nor reads a file of weights. Misses are those of
the laboratory's simulator on the routes of decoding the texts one after the other.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sluice.errors import InputError
from sluice.lab.replay import Demands
from sluice.lab.simulate import Result, result, simulate
from sluice.lab.stack_distance import LruStack
from sluice.trace import TraceInfo, TraceReader
from sluice.train.decode_routes import Decoded, decode_routes, decoded, info_of, write_trace
from sluice.train.domain_sets import domain_counts, hottest_sets, pinned_hit_rates, switching
from sluice.train.families import config_of, family_of
from sluice.train.heads import Heads
from sluice.train.passages import Passage
from sluice.train.recall import mean_recall, recall
from sluice.train.repetition import repetition
from sluice.train.routes import Routes, record
from sluice.train.scores import Tally, balanced, pooled
from sluice.train.student import Student

Progress = Callable[[float, float], None]
Run = Callable[[Tensor], tuple[Tensor, Routes]]  # ids [1, T] -> logits [T, V], routes of T positions

SHARE = 0.134  # of all experts in slots: the paper's cache
CURVE = tuple(i / 100 for i in (5, 7.5, 10, 13.4, 15, 20, 25, 30, 40, 50, 60, 80))
PROMPT = 32  # ids of a passage that are continued where repetition is measured


@dataclass
class Scored:
    """What passes over all texts gave: a tally a text, and its routes."""

    texts: list[Passage] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    routes: list[Decoded] = field(default_factory=list)

    def by_domain(self) -> dict[str, Tally]:
        """The tallies pooled, domains in the order of their first text."""
        domains = dict.fromkeys(text.domain for text in self.texts)
        pairs = list(zip(self.texts, self.tallies, strict=True))
        return {domain: pooled(tally for text, tally in pairs if text.domain == domain) for domain in domains}


def plain(model: nn.Module) -> Run:
    """Passes of a model by its own routes."""

    def run(ids: Tensor) -> tuple[Tensor, Routes]:
        with record(model) as routes:
            logits = model(ids, use_cache=False).logits
        return logits[0], routes

    return run


def prerouted(student: Student) -> Run:
    """Passes by predicted routes: positions 0 and 1 have their routers', later ones what was said at the one before."""

    def run(ids: Tensor) -> tuple[Tensor, Routes]:
        out = student(ids)
        return out.logits[0], out.routes

    return run


@torch.no_grad()
def score(
    model: nn.Module, run: Run, texts: Sequence[Passage], *, teacher: nn.Module | None = None, scores: bool = False,
    progress: Progress | None = None,
) -> Scored:  # fmt: skip
    """One pass over each text. Every token but a text's first is scored, `teacher`'s logits beside it.

    Raises InputError where logits are no numbers, or the teacher has another vocabulary.
    """
    family, config = family_of(model), config_of(model)
    device = next(model.parameters()).device
    found = Scored()
    for i, text in enumerate(texts):
        if progress is not None:
            progress(i, len(texts))
        ids = torch.from_numpy(text.ids)[None].to(device)
        logits, routes = run(ids)
        wanted = None if teacher is None else teacher(ids.to(_device(teacher)), use_cache=False).logits[0].to(device)
        if wanted is not None and wanted.shape != logits.shape:
            raise InputError(
                f"the teacher's vocabulary has {wanted.shape[-1]} tokens, the model's {logits.shape[-1]}: give a "
                "teacher of the same tokenizer"
            )
        tally = Tally()
        tally.add(logits[:-1], ids[0, 1:], None if wanted is None else wanted[:-1])
        if not math.isfinite(tally.loss):
            raise InputError("the model computes what is no number: its training diverged, give an earlier checkpoint")
        found.texts.append(text)
        found.tallies.append(tally)
        found.routes.append(decoded(text.domain, routes, family, config, scores=scores))
    return found


def losses(scored: Scored) -> dict[str, Any]:
    """Perplexities: of all domains alike, of each, and each text's sum of losses, for pairing."""
    domains = scored.by_domain()
    return {
        "balanced": balanced(domains.values()),
        "per_domain": {domain: tally.as_dict() for domain, tally in domains.items()},
        "per_text": [
            {"domain": text.domain, "tokens": tally.tokens, "loss": tally.loss}
            for text, tally in zip(scored.texts, scored.tallies, strict=True)
        ],
    }


def cached(
    info: TraceInfo, routes: Sequence[Decoded], shares: Sequence[float], *, trace: Path | None = None,
    force: bool = False,
) -> tuple[Demands, dict[str, Any]]:  # fmt: skip
    """The texts' demands, and what LRU comes to on them: `results` for each of `shares`, and a `curve` of misses.

    The trace is kept as `trace` if that is given. Raises InputError where it can't be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "routes.parquet" if trace is None else trace
        write_trace(path, info, routes, force=force)
        with TraceReader(path) as reader:
            demands = Demands.of(reader)
    least = int(demands.counts.max())
    stack, n = LruStack(demands), demands.tokens()
    results = [lru(demands, stack, slots_of(share, demands.n_experts)).as_dict() for share in shares]
    slots = sorted({slots_of(share, demands.n_experts) for share in CURVE})
    curve = [
        {"slots": each, "share": each / demands.n_experts, "misses_per_token": int(stack.misses(each).sum()) / n}
        for each in slots if each >= least
    ]  # fmt: skip
    per_token = int(demands.counts.sum()) / n
    return demands, {"results": results, "tokens": n, "demands_per_token": per_token, "curve": curve}


def lru(demands: Demands, stack: LruStack, n_slots: int) -> Result:
    """LRU with `n_slots` slots, by stack distances where they are exact, as `sluice simulate` does it."""
    if stack.covers(demands, n_slots):
        return result(demands, "lru", n_slots, stack.misses(n_slots))
    return simulate(demands, "lru", n_slots)


def slots_of(share: float, n_experts: int) -> int:
    """A share of all experts in whole slots, as `sluice simulate --capacity` rounds it. Raises InputError for none."""
    slots = math.floor(share * n_experts + 0.5)
    if not 1 <= slots <= n_experts:
        raise InputError(f"a cache of {share:.3%} is {slots} of {n_experts} experts: give 1 to {n_experts} of them")
    return slots


def domain_use(
    info: TraceInfo, routes: Sequence[Decoded], counted: Sequence[Decoded], demands: Demands, shares: Sequence[float]
) -> dict[str, Any]:  # fmt: skip
    """Each domain's set of experts, an even share of each layer's, picked on `counted` and measured on `routes`.

    For each of `shares`, caches' sizes, what loading a domain's experts at a switch comes to.
    """
    counts = domain_counts(counted, info.n_expert)
    size = max(1, info.n_expert // max(1, len(counts)))
    hits = pinned_hit_rates(routes, hottest_sets(counts, size))
    switched = [
        switching(demands, routes, counts, slots, loaded).as_dict()
        for share in shares
        for slots in [slots_of(share, demands.n_experts)]
        for loaded in sorted({max(1, slots // 2), slots})
    ]
    return {
        "set_size": size,
        "pinned_hit_rate": hits,
        "mean_pinned_hit_rate": sum(hits.values()) / len(hits),
        "switching": switched,
    }


def load(routes: Sequence[Decoded], n_expert: int) -> dict[str, Any]:
    """How evenly layers use their experts: the least even one's entropy ÷ log E, and the share never used."""
    used = sum(domain_counts(routes, n_expert).values(), start=np.zeros((1, 1), np.int64))
    share = used / used.sum(1, keepdims=True)
    entropy = -(share * np.log(share, out=np.zeros_like(share), where=share > 0)).sum(1) / math.log(n_expert)
    return {"load_entropy": float(entropy.min()), "dead_share": float((used == 0).mean())}


@torch.no_grad()
def greedy(model: nn.Module, student: Student | None, texts: Sequence[Passage], n: int, end: int) -> list[list[int]]:
    """Continue the first PROMPT ids of each text by `n` tokens or up to `end`, always the likeliest.

    Texts of fewer ids are left out. By the student's path where there is one.
    """
    device = _device(model)
    prompts = [torch.from_numpy(text.ids[:PROMPT]).to(device) for text in texts if len(text.ids) >= PROMPT]
    if not prompts:
        raise InputError(f"no text has the {PROMPT} tokens that are continued: give longer passages")
    if student is not None:
        out = student.generate(prompts, n, temperature=0.0, stop=[end])
        return [row[PROMPT:].tolist() for row in out]
    ids, cache = torch.stack(prompts), None
    said: list[Tensor] = []
    for _ in range(n):
        out = model(ids, use_cache=True, **({} if cache is None else {"cache": cache}))
        cache, ids = out.cache, out.logits[:, -1:].argmax(-1)
        said.append(ids[:, 0])
    rows = torch.stack(said, 1).tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@dataclass(frozen=True)
class Wanted:
    """What to measure beside losses and misses, and at which sizes of the cache (shares of all experts)."""

    shares: tuple[float, ...] = (SHARE,)
    trace: Path | None = None
    force: bool = False
    scores: bool = False  # in the trace
    switching: bool = False  # caches that load a domain's experts at a switch
    generate: int = 0  # tokens after each prompt; 0: repetition isn't measured


def evaluate(
    model: nn.Module, texts: Sequence[Passage], counted: Sequence[Passage], end: int, *, heads: Heads | None = None,
    student: Student | None = None, teacher: nn.Module | None = None, wanted: Wanted | None = None, name: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All of it as one JSON object; what was not asked for is null.

    `counted` is other text, by which domains' experts are picked. With `student`, whose model `model` is, the text is
    scored, routed and continued by predicted routes; `heads` alone are only held against the model's own routes.
    `progress` is of the passes over `texts`.
    """
    wanted = Wanted() if wanted is None else wanted
    model.eval()
    run = plain(model) if student is None else prerouted(student)
    scored = score(model, run, texts, teacher=teacher, scores=wanted.scores, progress=progress)
    info = info_of(model, name)
    demands, cache = cached(info, scored.routes, wanted.shares, trace=wanted.trace, force=wanted.force)
    layers = None if heads is None else recall(model, heads, texts)
    continued = greedy(model, student, texts, wanted.generate, end) if wanted.generate else None
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "experts": {"layers": len(info.moe_layers), "each": info.n_expert, "top_k": info.top_k},
        "texts": len(texts),
        **losses(scored),
        "load": load(scored.routes, info.n_expert),
        "cache": cache,
        "domains": domain_use(
            info, scored.routes, list(decode_routes(model, counted)), demands, wanted.shares if wanted.switching else ()
        ),
        "recall": None if layers is None else _recall(layers),
        "repetition": None if continued is None else repetition(continued).as_dict(),
        "samples": None if continued is None else continued[:4],
    }


def _recall(layers: Any) -> Mapping[str, Any]:
    return {"mean": mean_recall(layers), "layers": [one.as_dict() for one in layers]}


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
