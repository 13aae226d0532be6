"""What the runs that are done came to: numbers for the gates, seed by seed. Writes and draws nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bounds import bounded, changes
from parts import local, misses, ppl
from runner import Json, RunError, Work
from runs import SEEDS


def gathered(work: Work) -> Json:
    """For `sluice gate`: each question's numbers with their bounds; null where nothing was measured."""
    chosen = _or_none(lambda: work.step("choose", "choose")["chosen"])
    pairs = [pair for seed in SEEDS if (pair := _pair(work, seed, lambda s: local(work, s))) is not None]
    domain = [pair for seed in SEEDS if (pair := _pair(work, seed, lambda s: f"domain-s{s}")) is not None]
    stacks = [one for seed in SEEDS if (one := _or_none(partial(work.step, f"stack-s{seed}", "claim"))) is not None]
    stages = [
        one["recovered"] for seed in SEEDS
        if (one := _or_none(lambda seed=seed: work.step(f"stages-s{seed}", "recovered"))) is not None
        and one["recovered"] is not None
    ]  # fmt: skip
    return {
        "seeds": list(SEEDS),
        "data": _or_none(lambda: work.step("data", "prepare")["fingerprint"]),
        "chosen": chosen,
        "locality": _compared(pairs),
        "domain": _compared(domain)
        and {**_compared(domain), "hit_rate": bounded([one["domains"]["mean_pinned_hit_rate"] for _, one in domain])},
        "stack": {
            key: changes([one[name] for one in stacks], [one["base"][name] for one in stacks])
            for key, name in (("misses_change", "misses"), ("ppl_change", "ppl"))
        },
        "stages": {"recovered": bounded(stages)},
    }


def _or_none(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except RunError:
        return None


def _pair(work: Work, seed: int, name: Callable[[int], str]) -> tuple[Json, Json] | None:
    """What the base and another run of a seed measured, if both are done."""
    return _or_none(lambda: (work.step(f"base-s{seed}", "evaluate"), work.step(name(seed), "evaluate")))


def _compared(pairs: list[tuple[Json, Json]]) -> Json:
    return {
        "misses_change": changes([misses(one) for _, one in pairs], [misses(base) for base, _ in pairs]),
        "ppl_change": changes([ppl(one) for _, one in pairs], [ppl(base) for base, _ in pairs]),
    }
