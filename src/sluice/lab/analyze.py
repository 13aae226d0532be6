"""All measures of traces of one model, taken in one pass over their layers. Knows neither figures nor formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from sluice.lab.curves import Curves, curves
from sluice.lab.locality import Reuse, ReuseCounter, working_set
from sluice.lab.popularity import (
    MAX_COACTIVATION,
    TOP_PAIRS,
    Concentration,
    DomainCounts,
    Domains,
    Pair,
    coactivation,
    concentration,
    counts,
    entropy_bits,
    joint_counts,
    strongest_pairs,
)
from sluice.lab.routes import Joined, LayerRows, Routes, load
from sluice.lab.segments import CACHE_RATIOS, SEGMENTS, Segments, sch, segments, srp
from sluice.trace import TraceReader

Array = np.ndarray[Any, Any]

WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # tokens

Progress = Callable[[float, float], None]


@dataclass(frozen=True)
class Consistency:
    """SRP and SCH (sluice.lab.segments). NaN where no run of tokens is long enough.

    `srp`, `size_ratio` [SEGMENTS]: of all layers as one group. `layer_srp` [SEGMENTS, layers]. `layer_sch`
    [CACHE_RATIOS, layers]: each layer has a cache of its own.
    """

    srp: Array
    size_ratio: Array
    layer_srp: Array
    layer_sch: Array


@dataclass(frozen=True)
class Coactivation:
    """`pairs`: the most correlated of all layers. `phi` [experts, experts]: of `layer`, which has the first of them."""

    pairs: tuple[Pair, ...]
    layer: int
    phi: Array


@dataclass(frozen=True)
class Analysis:
    """What a report says. `used` [layers, experts]: choices by tokens; `working_set` [WINDOWS, layers]."""

    traces: tuple[str, ...]
    routes: Routes
    used: Array
    reuse: Reuse
    concentration: Concentration
    layer_95: Array  # [layers] share of a layer's experts that carries 95 % of its traffic
    entropy: Array  # [layers], bits
    working_set: Array
    consistency: Consistency
    coactivation: Coactivation | None  # None: too many experts, or no two ever go together
    domains: Domains | None
    curves: Curves

    @property
    def layers(self) -> tuple[int, ...]:
        return self.routes.layers

    @property
    def entropy_share(self) -> Array:
        """[layers]: entropy ÷ that of even use; 1 for a single expert."""
        n = self.routes.info.n_expert
        return self.entropy / np.log2(n) if n > 1 else np.ones(len(self.entropy))


class _Pass:
    """Visits each layer once, then yields what it has gathered."""

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self.used: list[Array] = []
        self.reuse = ReuseCounter(routes.n_tokens)
        n = np.bincount(routes.domain[routes.domain >= 0], minlength=len(routes.domains))
        self.domains = DomainCounts(routes.domains, n)
        self.working_set: list[Array] = []
        self.segments: list[list[Segments]] = []
        self.sch: list[Array] = []
        self.pairs: list[Pair] = []
        self.phi: tuple[int, Array] | None = None

    def visit(self, rows: LayerRows) -> None:
        self.used.append(counts(rows))
        self.reuse.add(rows)
        self.domains.add(rows)
        self.working_set.append(working_set(rows, WINDOWS))
        self.segments.append([segments(rows, m) for m in SEGMENTS])
        self.sch.append(sch(rows, CACHE_RATIOS, self.routes.info.top_k))
        if rows.n_expert <= MAX_COACTIVATION:
            both = joint_counts(rows)
            phi = coactivation(both, len(rows))
            own = strongest_pairs(rows.layer, phi, both)
            best = self.pairs[0].phi if self.pairs else 0.0
            if own and own[0].phi > best:
                self.phi = (rows.layer, phi)
            self.pairs = sorted([*self.pairs, *own], key=lambda pair: -pair.phi)[:TOP_PAIRS]

    def consistency(self) -> Consistency:
        layer_srp = np.array([[srp(found)[0] for found in layer] for layer in self.segments]).T
        together = [reduce(add, layers) for layers in zip(*self.segments, strict=True)]
        model = np.array([srp(found) for found in together])
        return Consistency(model[:, 0], model[:, 1], layer_srp, np.array(self.sch).T)


def analyze(readers: Sequence[TraceReader], progress: Progress = lambda done, total: None) -> Analysis:
    """Measure traces of one model, as one. `progress` is told of layers, and of replays, that are done.

    Raises InputError for traces of different models, damaged ones, and those without rows.
    """
    trace = Joined(readers)
    routes = load(trace)
    one = _Pass(routes)
    total = 2.0 * len(routes.layers)
    for i, rows in enumerate(routes.by_layer()):
        one.visit(rows)
        progress(i + 1, total)
    used = np.stack(one.used)
    found = curves(trace, routes, lambda done, n: progress((1 + done / n) * total / 2, total))
    return Analysis(
        traces=tuple(str(reader.path) for reader in readers),
        routes=routes,
        used=used,
        reuse=one.reuse.finish(),
        concentration=concentration(used),
        layer_95=np.array([concentration(layer[None]).experts_for(0.95) for layer in used]),
        entropy=entropy_bits(used),
        working_set=np.array(one.working_set).T,
        consistency=one.consistency(),
        coactivation=None if one.phi is None else Coactivation(tuple(one.pairs), *one.phi),
        domains=one.domains.finish(),
        curves=found,
    )
