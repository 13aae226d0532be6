"""What the runs that are done came to: numbers for the gates, seed by seed. Writes and draws nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bounds import bounded, changes
from choosing import alike, misses, ppl
from parts import local, own
from runner import Json, RunError, Work
from runs import SEEDS


def gathered(work: Work) -> Json:
    """For `sluice gate`: each question's numbers with their bounds; null where nothing was measured."""
    chosen, data = asked(work, "choose", "choose"), asked(work, "data", "prepare")
    pairs = [pair for seed in SEEDS if (pair := _pair(work, seed, lambda s: local(work, s))) is not None]
    domain = [pair for seed in SEEDS if (pair := _pair(work, seed, lambda s: own(work, s))) is not None]
    stacks = seeds(work, "stack", "claim").values()
    stages = [share for one in seeds(work, "stages", "recovered").values() if (share := one["recovered"]) is not None]
    return {
        "seeds": list(SEEDS),
        "data": None if data is None else data["fingerprint"],
        "chosen": None if chosen is None else chosen["chosen"],
        "locality": _compared(pairs),
        "domain": {
            **_compared(domain),
            "hit_rate": bounded([one["domains"]["mean_pinned_hit_rate"] for _, one in domain]),
        },
        "stack": {
            key: changes([one[name] for one in stacks], [one["base"][name] for one in stacks])
            for key, name in (("misses_change", "misses"), ("ppl_change", "ppl"))
        },
        "stages": {"recovered": bounded(stages)},
    }


def asked(work: Work, run: str, step: str) -> Any:
    """What a step left; None if its run isn't done."""
    try:
        return work.step(run, step)
    except RunError:
        return None


def seeds(work: Work, run: str, step: str) -> dict[int, Any]:
    """What a step left, by seed, of the runs that are done; `run` without its seed."""
    found = {seed: asked(work, f"{run}-s{seed}", step) for seed in SEEDS}
    return {seed: one for seed, one in found.items() if one is not None}


def _pair(work: Work, seed: int, name: Callable[[int], str]) -> tuple[Json, Json] | None:
    """What the base and another run of a seed measured, if both are done and alike."""
    try:
        base, other = f"base-s{seed}", name(seed)
        pair = work.step(base, "evaluate"), work.step(other, "evaluate")
        return pair if alike(work, base, other) else None
    except RunError:
        return None


def _compared(pairs: list[tuple[Json, Json]]) -> Json:
    return {
        "misses_change": changes([misses(one) for _, one in pairs], [misses(base) for base, _ in pairs]),
        "ppl_change": changes([ppl(one) for _, one in pairs], [ppl(base) for base, _ in pairs]),
    }
