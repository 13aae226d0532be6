"""Cache-aware rerouting: which chosen experts give way to ones that have a slot already. Knows no cache and no files.

After the router has chosen, an expert that would have to be read is replaced by the best other one that has a slot, if
that one's score is close enough (cache-aware routing, Skliar et al. 2024, "Mixture of Cache-Conditional Experts"). The
outcome depends on scores and slots alone. The live engine and the simulator decide by the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

LEAST = 2.0**-126  # a share of routing weights counts as at least that, so that a divergence is a number


class Rerouting(NamedTuple):
    """`margin`: how much lower a replacement's score may be, in the scores' own unit (0: nothing is replaced).

    The best `keep` of a token's experts are never replaced.
    """

    margin: float
    keep: int = 1


class Rerouted(NamedTuple):
    """The final ids of each token, and over all of them how many were replaced and the sum of their divergences."""

    ids: list[list[int]]
    substituted: int
    divergence: float


def reroute(
    rule: Rerouting, chosen: Sequence[int], scores: Sequence[float], has_slot: Callable[[int], bool]
) -> tuple[list[int], int]:  # fmt: skip
    """The final ids of a token, each at the rank of the one it stands for, and how many were replaced.

    `chosen`: what the router chose, best first. `scores`: of all experts, those that routing weights are taken from. In
    rank order, one past the first `keep` that has no slot gives way to the best expert that was not chosen, has a slot
    and is not taken yet (the lower id of equals), if that one's score is at most the margin below its own.
    """
    final = list(chosen)
    if rule.margin <= 0:
        return final, 0
    absent = [rank for rank in range(rule.keep, len(final)) if not has_slot(final[rank])]
    if not absent:
        return final, 0
    own, lowest = set(chosen), min(scores[chosen[rank]] for rank in absent)
    near = sorted((-s, e) for e, s in enumerate(scores) if lowest - s <= rule.margin and e not in own)
    candidates = (e for _, e in near if has_slot(e))
    best = next(candidates, None)
    substituted = 0
    for rank in absent:
        if best is None:
            break
        if scores[chosen[rank]] - scores[best] <= rule.margin:
            final[rank] = best
            substituted += 1
            best = next(candidates, None)
    return final, substituted


def reroute_together(
    rule: Rerouting, chosen: Sequence[Sequence[int]], scores: Sequence[Sequence[float]],
    has_slot: Callable[[int], bool], *, logits: bool,
) -> Rerouted:  # fmt: skip
    """The tokens that a layer runs in one step, one after the other; see `reroute`.

    What an earlier one keeps and must have read has a slot for the later ones. `logits` as in `divergence`.
    """
    reading: set[int] = set()

    def has(expert: int) -> bool:
        return expert in reading or has_slot(expert)

    ids: list[list[int]] = []
    total, diverged = 0, 0.0
    for native, row in zip(chosen, scores, strict=True):
        final, substituted = reroute(rule, native, row, has)
        if substituted:
            total += substituted
            diverged += divergence(row, native, final, logits=logits)
        reading.update(expert for expert in final if not has_slot(expert))
        ids.append(final)
    return Rerouted(ids, total, diverged)


def divergence(scores: Sequence[float], native: Sequence[int], final: Sequence[int], *, logits: bool) -> float:
    """KL(p‖q) in nats of a token's routing weights, p of `native` and q of `final` ids, rank by rank.

    Each is normalised over the token's experts, whatever scale a family gives them: by their sum, or by softmax where
    scores are router `logits`.
    """
    pairs = zip(_shares(scores, native, logits), _shares(scores, final, logits), strict=True)
    return max(0.0, sum(p * math.log(p / q) for p, q in pairs))


def _shares(scores: Sequence[float], ids: Sequence[int], logits: bool) -> list[float]:
    values = [scores[i] for i in ids]
    if logits:
        top = max(values)
        values = [math.exp(value - top) for value in values]
    values = [max(value, LEAST) for value in values]
    total = sum(values)
    return [value / total for value in values]
