"""Many streams in one step: step time against its bound, and the aggregate speed, at every width.

    python benchmarks/streams.py synth18.gguf --ram 4G --widths 1,2,4,8,16,32

Theory. A step of many streams demands the union of their experts, each read once: the wider, the more streams share one
read, but from a few streams on the union exceeds the pool, and a policy that evicts the least recently used then hits
nothing. So the default policy is then cyclic, which keeps part of the set across steps. The bound is
overlap.py's: max(compute of the same tokens in the same batch, everything resident, bytes read ÷ raw), and so is the
protocol. Each stream has its own prompt (they begin in all 16 clusters of synth.py's vocabulary) and its own seed.

    step ÷ bound at every width                        at most 1.33
    tokens a second of all streams ÷ those of one      at least 0.5 at every width, at least 1 at 32

With --peer, llama.cpp serves as many concurrent requests under a memory cap of the same size. --repeat spans follow
each other in one process after one warm-up. Needs memory for the whole file (the resident arms).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from bound import decode_figures, median_of, pair, retakes
from common import arm, flag, log, middle, ratio, report, row, run_main

Json = dict[str, Any]


def measure(args: argparse.Namespace, width: int, folder: Path) -> Json:
    """One width: its repeats, streamed and resident, and the peer's if wanted."""
    log(f"{width} streams")
    tokens = folder / f"{width}.json"
    shared = (args.model, "--ctx", args.ctx, *flag("--threads", args.threads))
    streamed = arm(
        "arm.py", *shared, "--ram", args.ram, "--streams", width, "--policy", args.policy,
        *flag("--no-prefetch", args.no_prefetch), "--prompt", args.prompt, "--warm-up", args.warm_up,
        "--gen", args.gen, "--repeat", args.repeat, "--raw", "--raw-seconds", args.raw_seconds,
        "--retakes", args.retakes, "--dump", tokens,
    )  # fmt: skip
    figures: list[Json] = []
    if any(one["kept"] for one in streamed):
        resident = arm("arm.py", *shared, "--resident", "--replay", tokens, "--passes", args.passes)
        figures = [decode_figures(*both) for both in pair(streamed, resident)]
    result: Json = {"policy": args.policy, "figures": figures, "retakes": retakes(streamed), "repeats": streamed}
    if args.peer:
        result["peer"] = arm(
            "llamacpp.py", args.model, "--cap", args.ram, "--streams", width, "--prompt", args.prompt,
            "--gen", args.warm_up + args.gen, "--ctx", args.ctx, "--threads", args.peer_threads,
        )  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path)
    add("--ram", default="4G")
    add("--widths", default="1,2,4,8,16,32", help="in the order to run; the others are compared to 1")
    add("--threads", type=int)
    add("--policy", default="auto")
    add("--no-prefetch", action="store_true")
    add("--ctx", type=int, default=256, help="positions of each stream")
    add("--prompt", type=int, default=16, help="tokens of each stream")
    add("--warm-up", type=int, default=6, help="steps")
    add("--gen", type=int, default=12, help="steps of a repeat")
    add("--repeat", type=int, default=3)
    add("--raw-seconds", type=float, default=3.0)
    add("--passes", type=int, default=2, help="of the resident arms; the quicker counts")
    add("--retakes", type=int, default=2, help="of one repeat, at most")
    add("--peer", action="store_true", help="measure llama.cpp too; needs root and xllamacpp")
    add("--peer-threads", type=int, default=1)
    args = parser.parse_args()
    widths = [int(word) for word in args.widths.split(",")]
    longest = args.prompt + args.warm_up + args.gen * args.repeat * (1 + args.retakes)
    if longest > args.ctx:
        parser.error(f"prompt, warm-up and all repeats with their retakes may take {longest} positions: raise --ctx")
    with tempfile.TemporaryDirectory() as folder:
        raw = {width: measure(args, width, Path(folder)) for width in widths}
    speeds = {width: median_of(raw[width]["figures"], "tok_per_s") for width in widths}
    rows = []
    for width in widths:
        name = f"{width} stream{'s' if width > 1 else ''}"
        figures = raw[width]["figures"]
        rows.append(row(f"{name}: step ÷ bound", median_of(figures, "over_bound"), at_most=1.33, n=len(figures)))
        rows.append(row(f"{name}: repeats discarded", raw[width]["retakes"]))
        if width > 1:
            relative = ratio(speeds[width], speeds.get(1))
            rows.append(row(f"{name}: aggregate ÷ one stream's", relative, at_least=1.0 if width >= 32 else 0.5))
        if args.peer:
            peer = middle([one["decode_tok_per_s"] for one in raw[width]["peer"]])
            rows.append(row(f"{name}: aggregate ÷ llama.cpp's", ratio(speeds[width], peer)))
    report("streams", rows, settings=vars(args) | {"tok_per_s": speeds}, raw={str(w): raw[w] for w in widths})


if __name__ == "__main__":
    run_main(main)
