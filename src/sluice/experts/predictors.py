"""Guesses which experts a layer will be asked for, ahead of its demand, and counts how good the guesses are.

It reads nothing and moves nothing. A predictor is told what routers chose, layer by layer; "layers" are those with
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Protocol

from sluice.errors import InputError

RECALL = 0.85  # of the next layer's router on this layer's residual; 0.72 to 0.89 have been published for it


class Predictor(Protocol):
    """`ahead` maps each distance that it guesses over, in layers, to the share of such a guess that is worth reading.

    `crosses_tokens`: it can guess from one token's last layers into the next one's first.
    """

    ahead: Mapping[int, float]
    crosses_tokens: bool

    def predict(self, layer: int, coming: Sequence[int], distance: int) -> list[int]:
        """Expert ids for the execution of `layer` that lies `distance` layers ahead, likeliest first.

        Empty when there is nothing to go by. `coming` are the experts that it will demand: at most as many are
        guessed, and only what stands for a router or for the bound looks at which.
        """
        ...

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        """The routers of `layer` chose `experts`, each once."""
        ...


class Nothing:
    """Guesses nothing: on demand only."""

    ahead: Mapping[int, float] = {}
    crosses_tokens = False

    def predict(self, layer: int, coming: Sequence[int], distance: int) -> list[int]:
        return []

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        pass


class PreviousToken:
    """Each layer asks for what it asked for last time."""

    ahead: Mapping[int, float] = {1: 1.0}
    crosses_tokens = True

    def __init__(self) -> None:
        self._last: dict[int, list[int]] = {}

    def predict(self, layer: int, coming: Sequence[int], distance: int) -> list[int]:
        return self._last.get(layer, [])[: len(coming)]

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        self._last[layer] = list(experts)


class Popularity:
    """Each layer asks for what it has asked for most often so far."""

    ahead: Mapping[int, float] = {1: 1.0}
    crosses_tokens = True

    def __init__(self, n_experts: int) -> None:
        self._n_experts = n_experts
        self._counts: dict[int, list[int]] = {}  # [n_experts] executions that chose each

    def predict(self, layer: int, coming: Sequence[int], distance: int) -> list[int]:
        counts = self._counts.get(layer)
        return [] if counts is None else [e for e in top_experts(counts, len(coming)) if counts[e]]

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        counts = self._counts.setdefault(layer, [0] * self._n_experts)
        for expert in experts:
            counts[expert] += 1

    def draw(self, layer: int, n: int, excluded: Collection[int], random: Random) -> list[int]:
        """`n` different experts but for those `excluded`, each with a probability that goes with its popularity.

        Fewer where there are no more. What was never chosen counts as if it had been once.
        """
        weights = [count + 1 for count in self._counts.get(layer, [0] * self._n_experts)]
        for expert in excluded:
            weights[expert] = 0
        drawn: list[int] = []
        for _ in range(min(n, self._n_experts - len(excluded))):
            expert = random.choices(range(self._n_experts), weights)[0]
            weights[expert] = 0
            drawn.append(expert)
        return drawn


class NextLayer:
    """Stands for later layers' routers on this layer's residual, whose guesses a trace doesn't hold.

    Each expert that the next layer will demand is guessed with probability `recall`, and the second layer's with
    `recall`²; in place of the others stand wrong ones, drawn by their popularity so far. What a router is surest of is
    mostly right, so the right ones rank first. As the engine, it takes all of a guess for the next layer and the
    better half of one for the second.
    """

    ahead: Mapping[int, float] = {1: 1.0, 2: 0.5}
    crosses_tokens = False

    def __init__(self, n_experts: int, recall: float, seed: int) -> None:
        self._recall = recall
        self._popular = Popularity(n_experts)
        self._random = Random(seed)

    def predict(self, layer: int, coming: Sequence[int], distance: int) -> list[int]:
        random, recall = self._random, self._recall**distance
        right = [expert for expert in coming if random.random() < recall]
        missing = len(coming) - len(right)
        return right + self._popular.draw(layer, missing, coming, random) if missing else right

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        self._popular.observe(layer, experts)


class Perfect:
    """Knows what will be demanded `distance` layers ahead: the bound of every predictor with that lead."""

    crosses_tokens = True

    def __init__(self, distance: int) -> None:
        self.ahead: Mapping[int, float] = {distance: 1.0}

    def predict(self, layer: int, coming: Sequence[int], distance: int) -> list[int]:
        return list(coming)

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        pass


# name: of (layers with experts, experts of each, recall, seed)
PREDICTORS: dict[str, Callable[[int, int, float, int], Predictor]] = {
    "none": lambda n_layers, n_experts, recall, seed: Nothing(),
    "previous-token": lambda n_layers, n_experts, recall, seed: PreviousToken(),
    "popularity": lambda n_layers, n_experts, recall, seed: Popularity(n_experts),
    "next-layer": lambda n_layers, n_experts, recall, seed: NextLayer(n_experts, recall, seed),
    "perfect": lambda n_layers, n_experts, recall, seed: Perfect(1),
    "perfect-token": lambda n_layers, n_experts, recall, seed: Perfect(n_layers),
}


def make_predictor(name: str, *, n_layers: int, n_experts: int, recall: float = RECALL, seed: int = 0) -> Predictor:
    """A new predictor by its name in PREDICTORS for `n_layers` layers of `n_experts` each.

    `recall`, 0 to 1, and `seed` are next-layer's. Raises InputError for an unknown name or no such recall.
    """
    if name not in PREDICTORS:
        raise InputError(f"unknown predictor {name!r}; choose from {', '.join(PREDICTORS)}")
    if not 0 <= recall <= 1:
        raise InputError(f"a recall of {recall} can't be: give 0 to 1")
    return PREDICTORS[name](n_layers, n_experts, recall, seed)


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
