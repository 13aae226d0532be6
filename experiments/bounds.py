"""Bounds from a few runs with paired seeds. Knows numbers, not what they measure.

The mean of n values with Student's t: one-sided, so that the true mean lies beyond the bound with probability 5 %. A
single value has no bound, which is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# Student's t, one-sided 95 %, for 1, 2, … degrees of freedom
QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


def half_width(values: Sequence[float]) -> float | None:
    """t · s ÷ √n; None for fewer than two values. At most 11 are taken."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    return QUANTILES[n - 2] * deviation / math.sqrt(n)


def bounded(values: Sequence[float]) -> dict[str, Any]:
    """Of values, one a seed: their mean with its lower and upper bound."""
    mean = sum(values) / len(values) if values else None
    half = half_width(values)
    bounds = (None, None) if mean is None or half is None else (mean - half, mean + half)
    return {"n": len(values), "mean": mean, "lower": bounds[0], "upper": bounds[1], "values": list(values)}


def changes(changed: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Of changed ÷ base − 1, seed by seed, averaged and bounded as logarithms of quotients.

    Of counts, 0 is taken for half of one.
    """
    found = bounded([math.log((one or 0.5) / other) for one, other in zip(changed, base, strict=True)])
    scaled = {name: None if (x := found[name]) is None else math.expm1(x) for name in ("mean", "lower", "upper")}
    return {"n": found["n"], **scaled, "values": [math.expm1(value) for value in found["values"]]}
