"""Everything resident: decode and a prompt of 256 tokens, against llama.cpp at its best thread count, alternating.

    python benchmarks/resident.py synth18.gguf          # needs memory for the whole file, one program at a time

Theory. With nothing to read, both run the same kernels of ggml over the same bytes, so their speeds should be equal but
for what surrounds the kernels: Sluice cuts each layer's graph where the router's choice must be seen, and Python runs
there. Sluice's pool holds every expert that is met (an untimed first walk reads them; the timed ones repeat it);
llama.cpp's pages are in the page cache and mapped (the file is read once before, and its first repeat isn't counted).
Needs xllamacpp.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import arm, flag, log, middle, ratio, report, row, run_main, thread_counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path)
    add("--prompt", type=int, default=256, help="tokens")
    add("--gen", type=int, default=32, help="tokens")
    add("--rounds", type=int, default=3, help="of all programs in turn, each in a process of its own")
    add("--repeat", type=int, default=3, help="within a process")
    add("--threads", help="of llama.cpp, as 1,2; by default powers of two up to the cores")
    add("--sluice-threads", type=int)
    args = parser.parse_args()
    shared = (args.model, "--prompt", args.prompt, "--gen", args.gen)
    ours: list[dict[str, Any]] = []
    theirs: dict[int, list[dict[str, Any]]] = {threads: [] for threads in thread_counts(args.threads)}
    for i in range(args.rounds):
        log(f"round {i + 1} of {args.rounds}")
        ours += arm(
            "arm.py", *shared, "--resident", "--warm-up", 0, "--walks", args.repeat,
            *flag("--threads", args.sluice_threads),
        )  # fmt: skip
        for threads, repeats in theirs.items():
            repeats += arm(
                "llamacpp.py", *shared, "--warm", "--threads", threads, "--repeat", args.repeat + 1, "--read-ahead", 0
            )[1:]
    speeds: dict[str, Any] = {}
    rows = []
    for phase in ("decode", "prefill"):
        key = f"{phase}_tok_per_s"
        own = middle([one[key] for one in ours])
        by_threads = {threads: middle([one[key] for one in repeats]) for threads, repeats in theirs.items()}
        best = max((value for value in by_threads.values() if value is not None), default=None)
        speeds[phase] = {"sluice": own, "llama.cpp": by_threads}
        rows.append(row(f"resident {phase} ÷ llama.cpp's best", ratio(own, best), at_least=0.9))
    missed = sum(one["ledger"]["decode"]["misses"] for one in ours)
    rows.append(row("experts that had to be read nevertheless", missed, at_most=0))
    report("resident", rows, settings=vars(args) | {"tok_per_s": speeds}, raw={"sluice": ours, "llama.cpp": theirs})


if __name__ == "__main__":
    run_main(main)
