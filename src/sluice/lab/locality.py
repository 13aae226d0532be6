"""How alike the routes of neighbouring tokens are: adjacent reuse against chance, working sets. Knows no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice.lab.popularity import counts
from sluice.lab.routes import LayerRows

Array = np.ndarray[Any, Any]

BLOCK_TOKENS = 32  # resampled together: what neighbours share must not count as independent evidence
RESAMPLES = 1000
CONFIDENCE = 0.95
_LEAST_BLOCKS = 8
_WEIGHTS = 1 << 22  # of blocks, drawn at once


@dataclass(frozen=True)
class Reuse:
    """Adjacent-token reuse. Arrays are [layers]; NaN where a layer has no two consecutive tokens.

    `measured`: the mean, over consecutive tokens of one sequence, of the share of the second's experts that the first
    chose too. `chance`: Σ qₑ² ÷ k with qₑ the share of the layer's tokens that chose e: what two tokens drawn at random
    share. `uniform`: k ÷ E. `low` and `high` bound `measured` with CONFIDENCE, by a bootstrap over blocks of
    `block_tokens` consecutive tokens, the same blocks in all layers (a token's layers are not independent of each
    other either). Means are over the layers that have pairs.
    """

    layers: tuple[int, ...]
    pairs: Array
    measured: Array
    low: Array
    high: Array
    chance: Array
    uniform: Array
    mean: float
    mean_low: float
    mean_high: float
    mean_chance: float
    mean_uniform: float
    block_tokens: int


class ReuseCounter:
    """Gathers adjacent reuse, layer by layer."""

    def __init__(self, n_tokens: int) -> None:
        """`n_tokens` of the layer that has most."""
        self.block_tokens = max(1, min(BLOCK_TOKENS, n_tokens // _LEAST_BLOCKS))
        self._layers: list[int] = []
        self._chance: list[tuple[float, float]] = []
        self._blocks: list[tuple[Array, Array, Array]] = []  # keys, Σ of shares, pairs

    def add(self, rows: LayerRows) -> None:
        k = float(rows.lengths.mean())
        q = counts(rows) / len(rows)
        self._layers.append(rows.layer)
        self._chance.append((float((q**2).sum()) / k, k / rows.n_expert))
        second = np.setdiff1d(np.arange(len(rows)), rows.runs)  # rows whose token follows the row before
        shared = np.zeros(len(rows))
        for first, cells in rows.chunks(overlap=1):
            shared[first + 1 : first + len(cells)] = (cells[1:] & cells[:-1]).sum(axis=1)
        share = shared[second] / rows.lengths[second]
        block = np.stack([rows.sequence[second], rows.position[second] // self.block_tokens], axis=1)
        keys, place = np.unique(block, axis=0, return_inverse=True) if len(block) else (block, np.zeros(0, np.int64))
        place = place.reshape(-1)
        self._blocks.append((keys, np.bincount(place, share, len(keys)), np.bincount(place, minlength=len(keys))))

    def finish(self) -> Reuse:
        keys = np.concatenate([keys for keys, _, _ in self._blocks])
        _, place = np.unique(keys, axis=0, return_inverse=True)
        place = place.reshape(-1)
        n_blocks = int(place.max(initial=-1)) + 1
        sums, pairs = np.zeros((2, len(self._layers), n_blocks))
        at = 0
        for i, (own, total, n) in enumerate(self._blocks):
            where = place[at : at + len(own)]
            sums[i, where], pairs[i, where] = total, n
            at += len(own)
        n_pairs = pairs.sum(axis=1)
        measured = np.divide(sums.sum(axis=1), n_pairs, out=np.full(len(n_pairs), np.nan), where=n_pairs > 0)
        low, high, mean_low, mean_high = _bootstrap(sums, pairs)
        chance, uniform = np.array(self._chance).T
        some = n_pairs > 0
        means = [float(x[some].mean()) if some.any() else np.nan for x in (measured, chance, uniform)]
        return Reuse(
            tuple(self._layers), n_pairs.astype(np.int64), measured, low, high, chance, uniform, means[0], mean_low,
            mean_high, means[1], means[2], self.block_tokens,
        )  # fmt: skip


def _bootstrap(sums: Array, pairs: Array) -> tuple[Array, Array, float, float]:
    """Bounds of Σ sums ÷ Σ pairs of each layer, and of the layers' mean, resampling blocks. Inputs [layers, blocks]."""
    n_layers, n_blocks = sums.shape
    some = np.flatnonzero(pairs.sum(axis=1) > 0)
    low, high = np.full((2, n_layers), np.nan)
    if n_blocks < 2 or not len(some):
        return low, high, np.nan, np.nan
    rng = np.random.default_rng(0)
    replicates, size = [], max(1, _WEIGHTS // n_blocks)
    for first in range(0, RESAMPLES, size):
        n = min(size, RESAMPLES - first)
        drawn = rng.integers(n_blocks, size=(n, n_blocks)) + np.arange(n)[:, None] * n_blocks
        weights = np.bincount(drawn.ravel(), minlength=n * n_blocks).reshape(n, n_blocks).astype(np.float64)
        total, count = weights @ sums[some].T, weights @ pairs[some].T
        replicates.append(np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0))
    values = np.concatenate(replicates)  # [RESAMPLES, layers with pairs]
    tails = [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)]
    for i, column in zip(some, values.T, strict=True):
        if len(known := column[~np.isnan(column)]):
            low[i], high[i] = np.percentile(known, tails)
    known = np.isfinite(values)
    means = np.where(known, values, 0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    mean_low, mean_high = np.percentile(means[known.any(axis=1)], tails)
    return low, high, float(mean_low), float(mean_high)


def working_set(rows: LayerRows, windows: Sequence[int]) -> Array:
    """[windows] Mean number of distinct experts of a layer in so many consecutive tokens (Denning 1968).

    Over all windows that lie within a run of one sequence; NaN where no run is long enough. Exact, from the gaps
    between uses: a gap of g tokens hides its expert from max(0, g - w + 1) windows of w tokens.
    """
    starts, ends = rows.runs[:-1], rows.runs[1:]
    run = np.repeat(np.arange(len(starts)), ends - starts)
    row = np.repeat(np.arange(len(rows)), rows.lengths)
    expert = rows.experts[rows.experts >= 0].astype(np.int64)
    order = np.lexsort((row, expert, run[row]))
    row, expert = row[order], expert[order]
    first = np.concatenate([[True], (np.diff(expert) != 0) | (np.diff(run[row]) != 0)])
    last = np.concatenate([first[1:], [True]])
    before = np.where(first, row - starts[run[row]], row - np.concatenate([[0], row[:-1]]) - 1)
    gaps = np.concatenate([before, ends[run[row[last]]] - row[last] - 1])
    seen = np.bincount(run[row[first]], minlength=len(starts))  # experts that a run uses at all
    result = []
    for w in windows:
        n = np.maximum(ends - starts - w + 1, 0)  # windows of each run
        hidden = np.maximum(gaps - w + 1, 0).sum()
        result.append((float((seen * n).sum()) - float(hidden)) / float(n.sum()) if n.any() else np.nan)
    return np.array(result)
