"""What `sluice plan` predicts of a model divided over a device, RAM and disk, against what `sluice bench` measures.

    python benchmarks/devices.py MODEL --ggml FOLDER [--device NAME] [--ram 1G --splits 0.25,0.5,0.75,1]

Theory. A decode step takes what it takes with all experts in RAM, less what each demand saves that is met on the
device, plus reads and copies (sluice/plan/device.py); the trace of an untimed run says how many of each there are.
Splits are shares of the memory that all experts would take on the device. Nothing of the measured run goes into its
prediction: each split is predicted, measured by one run of `sluice bench` in a process of its own, and predicted
again, and the mean of the two predictions counts. The bar: |predicted ÷ measured - 1| at most 0.2 at each split. The
same run's prompt, from an empty pool, is held against what is predicted for prompts.

On a software device (Mesa's) this holds the model of costs, and says nothing of a card's speed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from common import log, middle, ratio, report, row, run_main, sluice

from sluice.config import EngineConfig, parse_size
from sluice.engine import Engine

Json = dict[str, Any]
TOLERANCE = 0.2


def told(*words: object) -> Json:
    """What a command of Sluice prints as JSON."""
    return json.loads(sluice(*words, "--json")[-1])


def whole_bytes(args: argparse.Namespace) -> tuple[str, int, int]:
    """The device's name, and what everything and what no experts would take there."""
    config = EngineConfig(ggml=Path(args.ggml), device=args.device, ctx=args.ctx, ram=parse_size(args.ram))
    with Engine(args.model, config) as engine:
        facts = engine.device
        pool = engine.device_pool
        assert facts is not None and pool is not None, engine.notes
        return facts["name"], facts["bytes"], facts["bytes"] - pool.n_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model")
    add("--ggml", required=True, help="a folder with ggml's libraries, a device's backend among them")
    add("--device", default="auto")
    add("--ram", default="2G")
    add("--splits", default="0.25,0.5,0.75,1", help="shares of the experts that the device holds")
    add("--ctx", type=int, default=1024)
    add("--prompt", type=int, default=32)
    add("--gen", type=int, default=48)
    add("--rounds", type=int, default=3)
    args = parser.parse_args()
    name, whole, least = whole_bytes(args)
    margin = 1 << 20  # a device's memory is given in pieces
    memories = [int(least + float(share) * (whole - least)) + margin for share in args.splits.split(",")]
    common = ["--ggml", args.ggml, "--ctx", args.ctx]
    timed = [*common, "--prompt-tokens", args.prompt, "--gen", args.gen, "--repeat", 1]
    points: dict[int, list[Json]] = {vram: [] for vram in memories}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "routes.trace"
        sluice("bench", args.model, *timed, "--device", "cpu", "--ram", args.ram, "--trace", trace, "--json")
        for n in range(args.rounds):
            profile = Path(folder) / f"profile{n}.json"

            def predicted(profile: Path = profile) -> list[Json]:
                found = told("plan", args.model, *common, "--device", name, "--ram", args.ram, "--vram",
                             ",".join(map(str, memories)), "--trace", trace, "--profile", profile)  # fmt: skip
                return found["device"]["splits"]

            before = predicted()
            measured = [
                told("bench", args.model, *timed, "--device", name, "--ram", args.ram, "--vram", vram)
                for vram in memories
            ]
            after = predicted()
            for vram, first, run, last in zip(memories, before, measured, after, strict=True):
                speeds = [one["decode"]["tok_per_s"] for one in (first, last)]
                prompts = [one["prefill"]["tok_per_s"] for one in (first, last)]
                one = {
                    "prompt_predicted": sum(prompts) / 2, "prompt_measured": run["prefill_tok_per_s"],
                    "predicted": sum(speeds) / 2, "measured": run["tok_per_s"], "slots": run["device"]["slots"],
                    "layers": run["device"]["layers"], "predictions": speeds,
                    "device_hits": run["ledger"]["decode"]["device_hits"] / run["ledger"]["decode"]["steps"],
                    "device_hits_predicted": last["decode"]["device_demands"],
                }  # fmt: skip
                points[vram].append(one)
                log(f"{vram >> 20}M: {one['predicted']:.2f} predicted, {one['measured']:.2f} measured; prompt "
                    f"{one['prompt_predicted']:.1f} predicted, {one['prompt_measured']:.1f} measured")  # fmt: skip
    rows = [
        row(
            f"predicted ÷ measured {what}tok/s, {share} of the experts on {name}",
            ratio(*(middle([one[f"{key}{kind}"] for one in found]) for kind in ("predicted", "measured"))),
            at_least=1 - TOLERANCE, at_most=1 + TOLERANCE, n=len(found),
        )
        for what, key in (("", ""), ("prompt ", "prompt_"))
        for share, found in zip(args.splits.split(","), points.values(), strict=True)
    ]  # fmt: skip
    report("devices", rows, vars(args), {"splits": {str(vram): found for vram, found in points.items()}})


if __name__ == "__main__":
    run_main(main)
