"""Which of the experiment's tries are claimed, by rules that were written down before other seeds were run.

It knows what an evaluation measured and which evaluations can be compared, not how anything is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipes import DOMAINS, LOCALITY
from runner import Json, RunError, Step, Work

GATE_PPL = 0.01  # the locality gate's cost
MOST_PPL = 0.005  # by which a try is chosen: half of that, as a bound over three seeds asks for room
STACK_PPL = 0.034  # the stack gate's cost
MOST_STACK_PPL = 0.03  # by which its margin is chosen, with room too
STRONGER_PPL = 0.024  # what a model may cost that the stack begins with: the rest is for rerouting
LEAST_HITS = 0.91  # by which a try of domains is chosen: the gate asks for 0.90, and a bound for room


def misses(measured: Json) -> int:
    """LRU's misses at CAPACITY."""
    return int(measured["cache"]["results"][0]["misses"])


def ppl(measured: Json) -> float:
    """Perplexity with domains weighted alike."""
    return float(measured["balanced"]["ppl"])


def alike(work: Work, run: str, other: str) -> bool:
    """Whether two runs that are done can be compared: trained on the same kind of machine, measured on the same text.

    Processors round otherwise, training follows that, and the difference is no smaller than what is looked for.
    """
    machines = [(work.result(name) or {}).get("machine", {}).get("model") for name in (run, other)]
    texts = [work.step(name, "evaluate").get("data") for name in (run, other)]
    return machines[0] == machines[1] and texts[0] == texts[1]


def comparable(work: Work, name: str) -> bool:
    """Whether a try is done with the first seed, and can be compared with its base."""
    return work.result(f"{name}-s1") is not None and alike(work, "base-s1", f"{name}-s1")


def choose_steps(work: Work) -> list[Step]:
    tries = [name for name, (_, changes) in LOCALITY.items() if "locality" in changes]  # the rest are controls
    done = [name for name in tries if comparable(work, name)]
    native = [name for name in done if not LOCALITY[name][1]["locality"].get("reroute")]
    if not native:
        raise RunError("choose needs a try of locality that is done: run one of " + ", ".join(tries) + ", as NAME-s1")

    def choose(_: Mapping[str, Json]) -> Json:
        base = work.step("base-s1", "evaluate")
        tries: dict[str, dict[str, float]] = {}
        for name in done:
            measured = work.step(f"{name}-s1", "evaluate")
            tries[name] = {
                "misses_change": misses(measured) / misses(base) - 1,
                "ppl_change": ppl(measured) / ppl(base) - 1,
            }
        own = {name: tries[name] for name in native}
        found = {"chosen": best(own, MOST_PPL), "stronger": best(own, STRONGER_PPL), "tries": tries}
        rerouted = {name: one for name, one in tries.items() if name not in own}
        return {**found, "rerouted": best(rerouted, STRONGER_PPL)} if rerouted else found

    return [Step("choose", ("compute", "choose", *done), choose)]


def choose_domain_steps(work: Work) -> list[Step]:
    done = [name for name in DOMAINS if comparable(work, name)]
    if not done:
        raise RunError("choose-domain needs a try that is done: run one of " + ", ".join(DOMAINS) + ", as NAME-s1")

    def choose(_: Mapping[str, Json]) -> Json:
        base = ppl(work.step("base-s1", "evaluate"))
        tries: dict[str, dict[str, float]] = {}
        for name in done:
            one = work.step(f"{name}-s1", "evaluate")
            tries[name] = {"hit_rate": one["domains"]["mean_pinned_hit_rate"], "ppl_change": ppl(one) / base - 1}
        return {"chosen": cheapest(tries, LEAST_HITS), "tries": tries}

    return [Step("choose", ("compute", "choose-domain", *done), choose)]


def best(tries: Mapping[str, Mapping[str, Any]], most_ppl: float) -> str:
    """Of those within `most_ppl` the one with the fewest misses; where none is, the one that costs least."""
    within = [name for name, one in tries.items() if one["ppl_change"] <= most_ppl]
    if within:
        return min(within, key=lambda name: tries[name]["misses_change"])
    return min(tries, key=lambda name: tries[name]["ppl_change"])


def cheapest(tries: Mapping[str, Mapping[str, Any]], least_hits: float) -> str:
    """Of those with at least `least_hits` the one that costs least; where none has, the one with the most."""
    enough = [name for name in tries if tries[name]["hit_rate"] >= least_hits]
    if enough:
        return min(enough, key=lambda name: tries[name]["ppl_change"])
    return max(tries, key=lambda name: tries[name]["hit_rate"])
