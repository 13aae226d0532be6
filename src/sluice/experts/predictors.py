"""Guesses which experts a layer will be asked for next, and how good the guesses are; reads nothing, moves nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class Predictor(Protocol):
    def predict(self, layer: int) -> list[int]:
        """Expert ids for the layer's next execution, most likely first; empty when there is nothing to go by."""
        ...

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        """The router of `layer` chose `experts`, best first."""
        ...


class PreviousToken:
    """Each layer asks for what it asked for last time."""

    def __init__(self) -> None:
        self._last: dict[int, list[int]] = {}

    def predict(self, layer: int) -> list[int]:
        return self._last.get(layer, [])

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        self._last[layer] = list(experts)


def top_experts(scores: Sequence[float], n: int) -> list[int]:
    """Ids of the `n` highest of `scores` `[n_experts]`, best first, the lower id of equals first."""
    return sorted(range(len(scores)), key=lambda expert: -scores[expert])[:n]


class Recall:
    """The share of the experts really demanded that had been predicted."""

    def __init__(self) -> None:
        self.predicted = 0  # of those demanded
        self.demanded = 0

    def observe(self, predicted: Collection[int], demanded: Collection[int]) -> None:
        wanted = set(demanded)
        self.predicted += len(wanted.intersection(predicted))
        self.demanded += len(wanted)

    @property
    def recall_at_k(self) -> float | None:
        """None before anything was demanded."""
        return self.predicted / self.demanded if self.demanded else None
