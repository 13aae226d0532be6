"""The experts that a domain uses most: how much of its demand they serve, what loading them at a switch saves.

Knows routes and the laboratory's cache, no model. A domain's set is found on other text than it is measured on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sluice.experts.cache import ExpertCache
from sluice.experts.waves import Waves, waves
from sluice.lab.replay import Demands
from sluice.lab.simulate import demand, policy_for
from sluice.train.decode_routes import Decoded
from sluice.types import ExpertKey

Array = np.ndarray[Any, Any]


def domain_counts(texts: Sequence[Decoded], n_expert: int) -> dict[str, Array]:
    """By domain, [layers, E] int64: tokens that chose each expert."""
    found: dict[str, Array] = {}
    for text in texts:
        n_layers = text.experts.shape[1]
        used = found.setdefault(text.domain, np.zeros((n_layers, n_expert), np.int64))
        for layer in range(n_layers):
            used[layer] += np.bincount(text.experts[:, layer].ravel(), minlength=n_expert)
    return found


def hottest_sets(counts: Mapping[str, Array], size: int) -> dict[str, Array]:
    """By domain, [layers, E] bool: the `size` experts of each layer that it uses most; the lower id of equals."""
    sets: dict[str, Array] = {}
    for domain, used in counts.items():
        sets[domain] = np.zeros(used.shape, np.bool_)
        np.put_along_axis(sets[domain], np.argsort(-used, axis=1, kind="stable")[:, :size], True, axis=1)
    return sets


def pinned_hit_rates(texts: Sequence[Decoded], sets: Mapping[str, Array]) -> dict[str, float]:
    """By domain: the share of its tokens' choices that its set holds, were it pinned."""
    hits: dict[str, int] = {}
    demands: dict[str, int] = {}
    for text in texts:
        layers = np.arange(text.experts.shape[1])[None, :, None]
        inside = sets[text.domain][layers, text.experts]
        hits[text.domain] = hits.get(text.domain, 0) + int(inside.sum())
        demands[text.domain] = demands.get(text.domain, 0) + inside.size
    return {domain: hits[domain] / n for domain, n in demands.items()}


@dataclass(frozen=True)
class Switching:
    """LRU with the new domain's hottest experts read at each change of domain, against LRU left alone."""

    capacity_slots: int
    switches: int
    loaded_experts: int  # asked for at each switch
    loads: int  # of those, read: the others were there
    misses: int  # of decoding, afterwards
    misses_alone: int  # without loading
    reads_change: float | None  # (loads + misses) ÷ misses_alone − 1

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


def switching(
    demands: Demands, texts: Sequence[Decoded], counts: Mapping[str, Array], n_slots: int, n_loaded: int
) -> Switching:  # fmt: skip
    """Replay `demands`, the trace of `texts`, through LRU, reading `n_loaded` experts wherever the domain changes.

    These are the domain's most used ones by `counts`, the most used last, so that they stay longest.
    """
    layers = demands.info.moe_layers
    hottest: dict[str, list[ExpertKey]] = {}
    for domain, used in counts.items():
        ranked = np.argsort(-used.ravel(), kind="stable")[: min(n_loaded, n_slots)][::-1]
        hottest[domain] = [ExpertKey(layers[i // used.shape[1]], int(i % used.shape[1])) for i in ranked.tolist()]
    starts = np.cumsum([0, *(len(text.experts) for text in texts)]).tolist()
    before = [None, *(text.domain for text in texts)]
    changes = {
        start: text.domain for start, text, last in zip(starts, texts, before, strict=False) if text.domain != last
    }
    changes.pop(0, None)  # the first text finds an empty cache: no switch
    loads, misses = _replay(demands, n_slots, {step: hottest[domain] for step, domain in changes.items()})
    _, alone = _replay(demands, n_slots, {})
    change = (loads + misses) / alone - 1 if alone else None
    return Switching(n_slots, len(changes), min(n_loaded, n_slots), loads, misses, alone, change)


def _replay(demands: Demands, n_slots: int, loaded_at: Mapping[int, Sequence[ExpertKey]]) -> tuple[int, int]:
    """Reads of loading and of demand."""
    cache = ExpertCache(n_slots, policy_for(demands, "lru", n_slots))
    loads, step = 0, -1
    for execution in demands:
        if execution.step != step:
            step = execution.step
            for key in loaded_at.get(step, ()):
                before = cache.counters.misses
                demand(cache, Waves([[key]], overlap=False), execution.tick, scan=False)
                loads += cache.counters.misses - before
        demand(cache, waves(execution.keys, n_slots, cache.resident), execution.tick, scan=execution.scan)
    return loads, cache.counters.misses - loads
