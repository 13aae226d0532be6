"""What the difference of two ways to answer the same items is worth: intervals, tests, and what could have been seen.

It knows numbers, one a way and item, and no task. Scores that are all 0 or 1 are proportions: the interval of their
difference is Tango's score interval (Tango 1998, Statistics in Medicine 17:891), which has a width where no item
differs, too; the test is McNemar's, exact, on the items that only one way got right. Other scores have a bootstrap
interval over items (percentiles) and an exact or drawn sign-flip test. All are two-sided, at 95 %, and paired.

What a sample could have shown is the least true difference that the test finds in 80 % of such samples, by the normal
approximation: for proportions Connor's (1987, Biometrics 43:207), with the share of items that differ as it was seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

Scores = Sequence[float]
Interval = tuple[float, float]

Z = 1.959963984540054  # of 95 %, two-sided
Z_POWER = 0.8416212335729143  # of 80 % power
RESAMPLES = 10_000
_EXACT_FLIPS = 12  # items that differ, up to which all sign patterns are tried


@dataclass(frozen=True)
class Paired:
    """The second way against the first, in the scores' own unit: `lost` is positive where the second is worse.

    `worse` and `better` count items. `detectable` is the least loss (or gain) that so many items show with 80 % power,
    None where a single item says nothing of the spread; `items_needed` how many would show the difference that was
    seen, None where there is none.
    """

    items: int
    lost: float
    low: float
    high: float
    interval: str
    p: float
    test: str
    worse: int
    better: int
    detectable: float | None
    items_needed: int | None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


def compare(first: Scores, second: Scores) -> Paired:
    """How `second` stands to `first`, item by item; at least one item, as many in each."""
    a, b = np.asarray(first, float), np.asarray(second, float)
    if len(a) != len(b) or not len(a):
        raise ValueError(f"{len(a)} and {len(b)} scores are no pairs")
    n, difference = len(a), a - b
    worse, better = int((difference > 0).sum()), int((difference < 0).sum())
    lost = float(difference.mean())
    if is_binary(first) and is_binary(second):
        share = (worse + better) / n
        return Paired(
            n, lost, *tango(worse, better, n), "Tango score", mcnemar(worse, better), "McNemar exact", worse, better,
            _least(lambda delta: _pairs_needed(delta, share), n), _whole(_pairs_needed(abs(lost), share)),
        )  # fmt: skip
    spread = float(difference.std(ddof=1)) if n > 1 else None
    detectable = None if spread is None else (Z + Z_POWER) * spread / math.sqrt(n)
    needed = None if spread is None or not lost else _whole(((Z + Z_POWER) * spread / lost) ** 2)
    p, test = sign_flip(difference)
    return Paired(
        n, lost, *bootstrap(difference), "bootstrap over items", p, test, worse, better, detectable, needed
    )  # fmt: skip


def is_binary(scores: Scores) -> bool:
    """Whether all are 0 or 1."""
    return all(score in (0, 1) for score in scores)


def mean_interval(scores: Scores) -> Interval:
    """95 % interval of one way's mean: Wilson's of a proportion, else a bootstrap over items."""
    n = len(scores)
    if not is_binary(scores):
        return bootstrap(np.asarray(scores, float))
    share, z2 = sum(scores) / n, Z * Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar(worse: int, better: int) -> float:
    """The p of the exact test: how likely so uneven a split of the items that differ is, were both ways alike."""
    n, k = worse + better, min(worse, better)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, 2 * tail / 2**n)


def tango(worse: int, better: int, n: int) -> Interval:
    """95 % interval of (worse − better) ÷ n: the differences that the score test with them does not refuse."""
    lost = (worse - better) / n
    return (
        _bisect(lambda delta: _score(worse, better, n, delta) > Z, -1.0, lost),
        _bisect(lambda delta: _score(worse, better, n, delta) >= -Z, lost, 1.0),
    )


def _score(worse: int, better: int, n: int, delta: float) -> float:
    """Tango's statistic of a true difference `delta`: falls as it rises. The nuisance is where the likelihood peaks."""
    gap = worse - better - n * delta
    b = -worse - better + (2 * n - worse + better) * delta
    c = -better * delta * (1 - delta)
    rare = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)  # P(better) if the difference is delta
    variance = n * (2 * rare + delta * (1 - delta))
    if variance <= 0:
        return math.copysign(math.inf, gap) if gap else 0.0
    return gap / math.sqrt(variance)


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Where `holds`, true from `low` on, stops being so; `high` if it never does, `low` if it never was."""
    if not holds(low):
        return low
    if holds(high):
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2


def bootstrap(values: np.ndarray) -> Interval:
    """95 % percentile interval of the mean of `values` [n], over RESAMPLES resamples with a fixed seed."""
    rng, n = np.random.default_rng(0), len(values)
    means = np.concatenate(
        [values[rng.integers(0, n, (100, n))].mean(axis=1) for _ in range(RESAMPLES // 100)]
    )  # [RESAMPLES]; a hundred at a time, for memory
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def sign_flip(difference: np.ndarray) -> tuple[float, str]:
    """The p of a mean so far from 0 if each item's sign were a coin's, and which test that was."""
    values = difference[difference != 0]
    seen = abs(values.sum()) * (1 - 1e-12)  # as sums of floats depend on their order
    if len(values) <= _EXACT_FLIPS:
        sums = [abs(float(np.dot(signs, values))) for signs in product((1, -1), repeat=len(values))]
        return sum(each >= seen for each in sums) / len(sums), "sign-flip exact"
    rng = np.random.default_rng(0)
    hits = sum(abs(float(rng.choice((-1, 1), len(values)) @ values)) >= seen for _ in range(RESAMPLES))
    return (hits + 1) / (RESAMPLES + 1), f"sign-flip, {RESAMPLES} draws"


def _pairs_needed(delta: float, share: float) -> float:
    """Items with which McNemar's test finds a difference `delta` with 80 % power, where `share` of them differ."""
    if delta <= 0:
        return math.inf
    share = max(share, delta)  # so many must differ for there to be that difference
    return ((Z * math.sqrt(share) + Z_POWER * math.sqrt(share - delta * delta)) / delta) ** 2


def _least(needed: Callable[[float], float], n: int) -> float | None:
    """The least difference for which `n` items are enough; None if even the largest, 1, is not."""
    return None if needed(1.0) > n else _bisect(lambda delta: needed(delta) > n, 1e-9, 1.0)


def _whole(n: float) -> int | None:
    return math.ceil(n) if math.isfinite(n) else None


def mean_of(each: Sequence[Paired]) -> tuple[float, float, float]:
    """The mean loss over tasks, all counting alike, and its 95 % interval.

    The intervals of the tasks, independent of one another, are put together by their squares (Zou and Donner 2008,
    Statistics in Medicine 27:1693).
    """
    k = len(each)
    lost = sum(one.lost for one in each) / k
    down = math.sqrt(sum((one.lost - one.low) ** 2 for one in each)) / k
    up = math.sqrt(sum((one.high - one.lost) ** 2 for one in each)) / k
    return lost, lost - down, lost + up
