"""What `sluice plan` predicts against what `sluice bench` measures, at several memory budgets: one table.

    python benchmarks/prediction.py synth18.gguf

Theory. A decode step is arithmetic, reads and Python that overlap as the engine lets them (sluice/plan/timeline.py).
How many experts each layer lacks at a budget follows from the text's routes alone, which an untimed run records. What
they cost was measured on this machine: a profile, taken anew in every round. Disks drift within minutes, so plain
reading is measured again right before and right after each point, and the prediction is the mean of the two made with
it. So nothing of the measured run goes into its prediction.

Each round takes a profile, then visits the budgets in turn; figures are medians over rounds. A point is one run of
`sluice bench` in a process of its own with an empty pool. The bar: |predicted ÷ measured - 1| at most 0.2 at each.
Budgets for which the machine lacks memory are left out, and named.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from common import log, middle, ratio, report, row, run_main, sluice

from sluice.config import parse_size
from sluice.memory import free_bytes
from sluice.plan.measure import settle

Json = dict[str, Any]
MODES: dict[str, list[str]] = {"exact": [], "demand": ["--no-prefetch"]}
TOLERANCE = 0.2


def told(*words: object) -> Json:
    """What a command of Sluice prints as JSON."""
    return json.loads(sluice(*words, "--json")[-1])


def point(args: argparse.Namespace, ram: str, mode: str, profile: Path, trace: Path) -> Json:
    """One budget: predicted, measured, predicted again. Where a virtual machine's host takes free memory back, that is
    waited for first: memory that a run before has left would be cheaper to touch than a profile says."""
    shared = [*MODES[mode], *([] if args.threads is None else ["--threads", args.threads])]

    def predicted() -> Json:
        found = told("plan", args.model, "--ram", ram, "--profile", profile, "--trace", trace, "--ctx", args.ctx,
                       *shared)  # fmt: skip
        return found["results"][0] | {"disk_now": found["disk_now"]}

    before = predicted()
    settle()
    measured = told(
        "bench", args.model, "--ram", ram, "--profile", profile, "--prompt-tokens", args.prompt, "--gen", args.gen,
        "--repeat", 1, "--seed", args.seed, *shared,
    )  # fmt: skip
    after = predicted()
    decode = measured["ledger"]["decode"]
    speeds = [before["tok_per_s"], after["tok_per_s"]]
    one = {
        "ram": ram,
        "mode": mode,
        "predicted": sum(speeds) / len(speeds),
        "measured": measured["tok_per_s"],
        "by_its_counters": (measured["predicted"] or {}).get("tok_per_s"),
        "hit_rate_predicted": before["hit_rate"],
        "hit_rate": 1 - (decode["misses"] + decode["prefetch_used"]) / decode["demands"],  # had nothing been read ahead
        "disk_now": [before["disk_now"], after["disk_now"]],
        "bottleneck": before["bottleneck"],
        "raw": {"before": before, "after": after, "decode": decode, "slots": measured["slots"]},
    }
    log(f"  {mode} at {ram}: predicted {one['predicted']:.2f}, measured {one['measured']:.2f} tok/s")
    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path)
    add("--ram", default="3G,4G,6G,10G,16G", help="budgets")
    add("--modes", default="exact,demand", help=f"of {', '.join(MODES)}")
    add("--repeat", type=int, default=3, help="rounds")
    add("--prompt", type=int, default=32, help="tokens")
    add("--gen", type=int, default=48, help="tokens")
    add("--threads", type=int)
    add("--seed", type=int, default=7)
    args = parser.parse_args()
    budgets, modes = args.ram.split(","), args.modes.split(",")
    if not set(modes) <= set(MODES):
        parser.error(f"modes are {', '.join(MODES)}")
    args.ctx = args.prompt + args.gen
    room = free_bytes()
    possible = [ram for ram in budgets if parse_size(ram) <= room]
    if left_out := [ram for ram in budgets if ram not in possible]:
        log(f"left out, for want of memory: {', '.join(left_out)}")
    points: list[Json] = []
    profiles: list[Json] = []
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "routes.trace"
        told(
            "bench", args.model, "--ram", possible[0], "--prompt-tokens", args.prompt, "--gen", args.gen,
            "--repeat", 1, "--seed", args.seed, "--trace", trace,
            *([] if args.threads is None else ["--threads", args.threads]),
        )  # fmt: skip
        for i in range(args.repeat):
            log(f"round {i + 1} of {args.repeat}")
            profile = Path(folder) / f"profile{i}.json"
            taken = told("plan", args.model, "--ram", possible[0], "--profile", profile,
                           *([] if args.threads is None else ["--threads", args.threads]))  # fmt: skip
            profiles.append(taken["profile"])
            points += [point(args, ram, mode, profile, trace) for ram in possible for mode in modes]
    rows = []
    for mode in modes:
        for ram in possible:
            mine = [one for one in points if (one["ram"], one["mode"]) == (ram, mode)]
            found = ratio(middle([one["predicted"] for one in mine]), middle([one["measured"] for one in mine]))
            rows.append(row(
                f"predicted ÷ measured tok/s, {mode}, {ram}", found, at_least=1 - TOLERANCE, at_most=1 + TOLERANCE,
                n=len(mine),
            ))  # fmt: skip
    table = [
        {
            "mode": mode, "ram": ram,
            **{
                name: middle([one[name] for one in points if (one["ram"], one["mode"]) == (ram, mode)])
                for name in ("predicted", "measured", "by_its_counters", "hit_rate_predicted", "hit_rate")
            },
        }
        for mode in modes for ram in possible
    ]  # fmt: skip
    for one in table:
        log(
            f"{one['mode']:>8} {one['ram']:>5}: predicted {one['predicted']:.2f}, measured {one['measured']:.2f} "
            f"tok/s, hit rate {one['hit_rate_predicted']:.3f}, {one['hit_rate']:.3f}"
        )
    settings = vars(args) | {"left_out": left_out}
    report("prediction", rows, settings, {"table": table, "profiles": profiles, "points": points})


if __name__ == "__main__":
    run_main(main)
