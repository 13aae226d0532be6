"""How a workload spreads over experts: concentration, entropy, domains, co-activation. Knows no order of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice.lab.routes import LayerRows

Array = np.ndarray[Any, Any]

MAX_DOMAINS = 16  # compared with each other: those with the most rows
MAX_COACTIVATION = 1024  # experts a layer, beyond which pairs are not counted (4 MB a layer)
HOT_SHARE = 0.9  # of a domain's traffic in a layer: its hot set
HALF_TOKENS = 32  # a domain's alternate blocks of so many positions are its two halves
TOP_PAIRS = 20  # most co-activated pairs that are kept of a layer, and of all
LEAST_TOGETHER = 10  # tokens that chose both: of fewer, phi says little


def counts(rows: LayerRows, chosen: Array | None = None) -> Array:
    """[n_expert] int64: how many of the tokens (all, or those where `chosen` [n] holds) chose each expert."""
    experts = rows.experts if chosen is None else rows.experts[chosen]
    return np.bincount(experts.ravel().astype(np.intp) + 1, minlength=rows.n_expert + 1)[1:]


@dataclass(frozen=True)
class Concentration:
    """Traffic by share of all (layer, expert) pairs, most used first. Both [n + 1], from 0 to 1."""

    experts: Array
    traffic: Array

    def experts_for(self, share: float) -> float:
        """The smallest share of experts that carries at least `share` of the traffic."""
        return float(self.experts[np.searchsorted(self.traffic, share - 1e-12)])

    def traffic_of(self, share: float) -> float:
        """The traffic of the most used experts, as many as `share` of all, rounded down: what pinning them serves."""
        return float(self.traffic[int(share * (len(self.experts) - 1) + 1e-9)])


def concentration(used: Array) -> Concentration:
    """`used` [layers, experts]: choices of each expert; at least one."""
    ranked = np.sort(used.ravel())[::-1]
    traffic = np.concatenate([[0.0], np.cumsum(ranked) / ranked.sum()])
    return Concentration(np.arange(len(traffic)) / len(ranked), traffic)


def entropy_bits(used: Array) -> Array:
    """[layers]: Shannon entropy of each layer's traffic over its experts, log2(experts) if all are used alike."""
    share = used / np.maximum(used.sum(axis=-1, keepdims=True), 1)
    return -(share * np.log2(share, out=np.zeros_like(share), where=share > 0)).sum(axis=-1)


# --- domains


@dataclass(frozen=True)
class Domains:
    """How alike domains route. `overlap` and `hot` [n, n], each a mean over layers, 1 where nothing differs.

    `overlap`: Σ over experts of the smaller of both shares of traffic (1 - total variation distance). Its diagonal
    compares two halves of one domain, which shows how much of a difference the sample's size alone makes; NaN where a
    domain is too short for that. `hot`: experts common to both hot sets ÷ experts in either (Jaccard); a hot set is the
    smallest that carries HOT_SHARE of a layer's traffic.
    """

    names: tuple[str, ...]
    tokens: tuple[int, ...]  # of the layer that has most
    overlap: Array
    hot: Array


class DomainCounts:
    """Gathers, layer by layer, what each domain used."""

    def __init__(self, names: tuple[str, ...], n_rows: Array) -> None:
        """`n_rows` [names]: the rows of each domain."""
        ranked = np.argsort(-n_rows, kind="stable")[:MAX_DOMAINS]
        self._places = np.sort(ranked[n_rows[ranked] > 0])
        self.names = tuple(names[i] for i in self._places)
        n = len(self.names)
        self._tokens = np.zeros(n, np.int64)
        self._overlap, self._hot = np.zeros((n, n)), np.zeros((n, n))
        self._layers = np.zeros((n, n), np.int64)

    def add(self, rows: LayerRows) -> None:
        """Count one layer."""
        n = len(self.names)
        if not n:
            return
        of = [rows.domain == place for place in self._places]
        odd = rows.position // HALF_TOKENS % 2 == 1
        used = np.stack([counts(rows, chosen) for chosen in of])
        self._tokens = np.maximum(self._tokens, [int(chosen.sum()) for chosen in of])
        shares, hot = _shares(used), _hot_sets(used)
        for a in range(n):
            halves = _shares(np.stack([counts(rows, of[a] & odd), counts(rows, of[a] & ~odd)]))
            for b in range(a, n):
                one, other = (halves[0], halves[1]) if a == b else (shares[a], shares[b])
                if not one.any() or not other.any():
                    continue
                self._layers[a, b] += 1
                self._overlap[a, b] += np.minimum(one, other).sum()
                self._hot[a, b] += (hot[a] & hot[b]).sum() / (hot[a] | hot[b]).sum()

    def finish(self) -> Domains | None:
        """None where the traces have no domains."""
        if not self.names:
            return None
        lower = np.tril_indices(len(self.names), -1)
        results = []
        for total in (self._overlap, self._hot):
            mean = np.divide(total, self._layers, out=np.full(total.shape, np.nan), where=self._layers > 0)
            mean[lower] = mean.T[lower]
            results.append(mean)
        np.fill_diagonal(results[1], 1.0)
        return Domains(self.names, tuple(self._tokens.tolist()), *results)


def _shares(used: Array) -> Array:
    return used / np.maximum(used.sum(axis=1, keepdims=True), 1)


def _hot_sets(used: Array) -> Array:
    """[domains, experts] bool: the fewest experts, most used first, that carry HOT_SHARE of a domain's traffic."""
    order = np.argsort(-used, axis=1, kind="stable")
    before = np.cumsum(np.take_along_axis(used, order, 1), axis=1) - np.take_along_axis(used, order, 1)
    hot = np.zeros(used.shape, np.bool_)
    np.put_along_axis(hot, order, before < HOT_SHARE * used.sum(axis=1, keepdims=True), 1)
    return hot


# --- co-activation


@dataclass(frozen=True)
class Pair:
    """Two experts of a layer, `n` tokens chose both; `phi` is the correlation of choosing one with the other."""

    layer: int
    a: int
    b: int
    n: int
    phi: float


def coactivation(both: Array, n: int) -> Array:
    """[experts, experts]: the phi coefficient of each two experts over `n` tokens that chose `both`; 0 on the diagonal.

    phi = (n·n_ab - n_a·n_b) ÷ √(n_a(n - n_a)·n_b(n - n_b)): 1 if a token that chooses one always chooses the other, 0
    if the choices are independent; 0 also where an expert is chosen by every token or by none. k choices of E that are
    otherwise free give -1 ÷ (E - 1).
    """
    used = np.diag(both)
    spread = np.sqrt(used * (n - used))
    below = np.outer(spread, spread)
    phi = np.divide(n * both - np.outer(used, used), below, out=np.zeros_like(below), where=below > 0)
    np.fill_diagonal(phi, 0.0)
    return phi


def joint_counts(rows: LayerRows) -> Array:
    """[n_expert, n_expert] float64, whole numbers: tokens that chose both experts; on the diagonal, that chose one."""
    both = np.zeros((rows.n_expert, rows.n_expert))
    for _, cells in rows.chunks():
        chosen = cells.astype(np.float32)  # a chunk's counts are exact in float32: it has fewer than 2^24 rows
        both += chosen.T @ chosen
    return both


def strongest_pairs(layer: int, phi: Array, both: Array, n: int = TOP_PAIRS) -> list[Pair]:
    """The pairs of a layer with the highest phi above 0, highest first, of those that LEAST_TOGETHER tokens chose."""
    a, b = np.triu_indices(len(phi), 1)
    values = np.where(both[a, b] >= LEAST_TOGETHER, phi[a, b], 0.0)
    order = np.lexsort((b, a, -values))[:n]
    return [Pair(layer, int(a[i]), int(b[i]), int(both[a[i], b[i]]), float(values[i])) for i in order if values[i] > 0]
