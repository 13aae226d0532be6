"""How much generated text repeats itself, as a share of its n-grams. Knows token ids and no model.

A text's *repetition* is the share of its n-grams that stood in it before; *distinct* is the share of different n-grams
among all n-grams of all texts together (Li et al. 2016, distinct-n). Text that has collapsed into a loop comes near 1
and 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

N = 4


@dataclass(frozen=True)
class Repetition:
    """Of several texts. Shares of no n-grams are None."""

    n: int
    texts: int
    tokens: int
    rate: float | None  # mean over the texts that have an n-gram
    worst: float | None  # of one text
    distinct: float | None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


def n_grams(ids: Sequence[int], n: int) -> list[tuple[int, ...]]:
    """All runs of `n` tokens, in order."""
    return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]


def repetition_rate(ids: Sequence[int], n: int = N) -> float | None:
    """The share of a text's n-grams that stood in it before; None where it has none."""
    grams = n_grams(ids, n)
    return 1 - len(set(grams)) / len(grams) if grams else None


def repetition(texts: Sequence[Sequence[int]], n: int = N) -> Repetition:
    """What `texts`, each its generated tokens without the prompt, come to."""
    rates = [rate for ids in texts if (rate := repetition_rate(ids, n)) is not None]
    grams = [gram for ids in texts for gram in n_grams(ids, n)]
    return Repetition(
        n=n,
        texts=len(texts),
        tokens=sum(map(len, texts)),
        rate=sum(rates) / len(rates) if rates else None,
        worst=max(rates, default=None),
        distinct=len(set(grams)) / len(grams) if grams else None,
    )
