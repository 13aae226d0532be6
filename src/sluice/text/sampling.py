"""Picks the next token from logits. It knows numbers and a seed, nothing of models or text."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sluice.errors import InputError, ModelFileError, SluiceError

_BLOCK = 512  # tokens summed at a time: finding a token costs two short cumulative sums instead of one long one


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens; checked when built (InputError).

    `temperature` 0 is greedy. `sample_top_k` keeps the k likeliest tokens (0: all), `top_p` the likeliest that together
    have at least that probability (1: all), `min_p` those at least that share of the likeliest's (0: all).
    `repeat_penalty` weakens what is among the last `repeat_last_n` tokens (1: off; -1: all tokens so far). `seed` None
    draws one.
    """

    temperature: float = 0.7
    sample_top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        def check(name: str, good: bool, want: str) -> None:
            if not good:
                raise InputError(f"{name} is {getattr(self, name)!r}; give {want}")

        check("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a number of at least 0")
        check("sample_top_k", self.sample_top_k >= 0, "0 (keep all tokens) or more")
        check("top_p", 0 < self.top_p <= 1, "a number above 0, up to 1 (keep all tokens)")
        check("min_p", 0 <= self.min_p <= 1, "a number from 0 (keep all tokens) to 1")
        check("repeat_penalty", 1e-3 <= self.repeat_penalty <= 1e3, "a number from 0.001 to 1000")
        check("repeat_last_n", self.repeat_last_n >= -1, "-1 (all tokens) or more")
        check("seed", self.seed is None or self.seed >= 0, "0 or more")


class Sampler:
    """Draws tokens for one sequence, in the order of llama.cpp's default chain: penalties, top-k, top-p, min-p, and
    temperature last, so that what is kept does not depend on the temperature.

    The same seed and logits give the same tokens on any machine: one PCG64 draw per token (none when greedy), sums in
    float64 in a fixed order, tokens in order of their id, equal logits decided for the lower id. (numpy's float64 `exp`
    may differ in the last bit between CPUs; that decides a token about once in 10^12.)
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed: int = secrets.randbits(32) if params.seed is None else int(params.seed)
        self._bits = np.random.PCG64(self.seed)
        self._scratch = np.empty((2, 0))  # two float64 vectors of the vocabulary's size; fresh ones cost page faults

    def sample(self, logits: np.ndarray, history: Sequence[int]) -> int:
        """The next token's id. `logits`: [n_vocab] float32, left as they are; `history`: the sequence's ids so far,
        read only for the repetition penalty. Raises ModelFileError when the logits hold NaN or no finite maximum."""
        params = self.params
        x = np.asarray(logits)
        if x.ndim != 1 or not x.size:
            raise SluiceError(f"logits have shape {x.shape}, not [n_vocab]; this is a fault in the engine")
        if params.repeat_penalty != 1 and params.repeat_last_n:
            x = self._penalised(x, history)
        top = float(x.max())
        if not math.isfinite(top):  # max() passes NaN on
            raise ModelFileError(f"the model computes {top}: its file holds damaged weights, get it again")
        if params.temperature == 0:
            return int(x.argmax())
        ids: np.ndarray | None = None  # ascending; None: all
        if 0 < params.sample_top_k < x.size:
            ids = _largest(x, params.sample_top_k)
            x = x[ids]
        if self._scratch.shape[1] < x.size:
            self._scratch = np.empty((2, x.size))
        offsets, weights = self._scratch[:, : x.size]
        np.subtract(x, top, out=offsets, dtype=np.float64)  # [n_kept], 0 for the likeliest
        if params.top_p < 1 or params.min_p > 0:
            np.exp(offsets, out=weights)  # relative to the likeliest
            kept = np.flatnonzero(weights >= params.min_p) if params.top_p == 1 else _nucleus(weights, params.top_p)
            if params.top_p < 1 and params.min_p > 0:
                kept = kept[weights[kept] >= params.min_p]
            ids = kept if ids is None else ids[kept]
            offsets = offsets[kept]
        weights = weights[: offsets.size]
        with np.errstate(over="ignore"):  # a tiny temperature sends offsets to -inf: weight 0, as it should
            scaled = offsets if params.temperature == 1 else np.divide(offsets, params.temperature, out=weights)
        i = self._draw(np.exp(scaled, out=weights))
        return i if ids is None else int(ids[i])

    def _penalised(self, x: np.ndarray, history: Sequence[int]) -> np.ndarray:
        n = self.params.repeat_last_n
        seen = np.unique(np.asarray(history[-n:] if n > 0 else history, dtype=np.int64))
        if not seen.size:
            return x
        if seen[0] < 0 or seen[-1] >= x.size:
            raise InputError(f"the history holds an id outside the vocabulary of {x.size}; give ids of this model")
        x = x.copy()
        old = x[seen]
        x[seen] = np.where(old <= 0, old * self.params.repeat_penalty, old / self.params.repeat_penalty)
        return x

    def _draw(self, weights: np.ndarray) -> int:
        """An index, in proportion to `weights` ([n] float64, at least one of them 1)."""
        u = (int(self._bits.random_raw()) >> 11) * 2.0**-53  # uniform in [0, 1)
        whole = weights.size // _BLOCK * _BLOCK
        blocks = np.append(weights[:whole].reshape(-1, _BLOCK).sum(axis=1), weights[whole:].sum())
        sums = np.cumsum(blocks)
        target = u * sums[-1]
        block = int(np.searchsorted(sums, target, side="right"))
        start = block * _BLOCK
        within = np.cumsum(weights[start : start + _BLOCK])
        # Both sums are rounded, so the target may lie a hair past the block's end: then the last token that counts.
        target = min(target - (sums[block - 1] if block else 0.0), math.nextafter(within[-1], 0.0))
        return start + int(np.searchsorted(within, target, side="right"))


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the softmax over the last axis of `logits` [..., n_vocab], in float64."""
    offsets = np.subtract(logits, logits.max(axis=-1, keepdims=True), dtype=np.float64)
    return np.subtract(offsets, np.log(np.exp(offsets).sum(axis=-1, keepdims=True)), out=offsets)


def likeliest(values: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest of `values` [n_vocab], the largest first; of equals the lower id."""
    ids = _largest(values, count)
    return ids[np.argsort(-values[ids], kind="stable")]


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices, ascending, of the `count` largest of `values`; of equals the first."""
    if count >= values.size:
        return np.arange(values.size)
    threshold = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(values > threshold)
    equal = np.flatnonzero(values == threshold)[: count - above.size]
    return np.sort(np.concatenate((above, equal)))


def _nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Indices, ascending, of the fewest largest weights that make up at least `top_p` of the sum."""
    need = top_p * weights.sum()
    kept = descending = sums = np.empty(0)
    for floor in (1e-3, 1e-6, 0.0):  # usually a few hundred tokens hold it all: sort those, not the vocabulary
        kept = np.flatnonzero(weights >= floor)
        descending = np.sort(weights[kept])[::-1]
        sums = np.cumsum(descending)
        if sums[-1] >= need:
            break
    return kept[_largest(weights[kept], int(np.searchsorted(sums, need)) + 1)]
