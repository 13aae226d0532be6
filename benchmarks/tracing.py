"""What recording a trace costs: decode with --trace against decode without, in turns, each in a process of its own.

    python benchmarks/tracing.py synth18.gguf --ram 4G

Theory. A layer's choice is copied once: ids, weights and a few numbers a column, some 2.5 µs a layer and token in numpy
calls, 0.1 ms a step of 48 layers. The routing weights are one more copy of 32 bytes in a graph that runs anyway. A
block of rows is encoded when it is full, 20 to 40 ms every 290 steps of 48 layers, 0.1 ms a step. Together 0.2 ms of a
step of 100 to 200 ms. So little drowns in the noise of a whole step's time; the time that is neither arithmetic nor
waiting, where recording happens, shows it better. Both are reported, as medians over rounds of pairs that decode the
same tokens.

    decode      step time, recording ÷ not                                       at most 1.02
    Python      (time of Python recording - not) ÷ step time not recording       at most 0.02
    size        bytes of the trace a token                                       reported

`--scores` records all experts' scores too, which is not held to these bars.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import flag, log, middle, ratio, report, row, run_main

Json = dict[str, Any]


def bench(args: argparse.Namespace, trace: Path | None) -> Json:
    """One process's figures: seconds a step, and of those Python's; the tokens; the trace's bytes."""
    words = [
        args.model, "--prompt-tokens", args.prompt, "--gen", args.gen, "--repeat", 1, "--seed", args.seed, "--json",
        "--ctx", args.prompt + args.gen, *flag("--ram", args.ram), *flag("--threads", args.threads),
        *flag("--trace", trace), *flag("--trace-scores", trace is not None and args.scores),
    ]  # fmt: skip
    command = [sys.executable, "-m", "sluice", "bench", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    result = json.loads(done.stdout.splitlines()[-1])
    decode = result["ledger"]["decode"]
    assert trace is None or trace.exists(), "nothing was recorded"
    return {
        "step_s": result["repeats"][0]["decode_s"] / decode["steps"],
        "python_s": decode["host_s"] / decode["steps"],
        "tokens": result["tokens"],
        "trace_bytes": trace.stat().st_size if trace is not None else None,
        "fed": result["prompt_tokens"] + decode["steps"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model")
    add("--ram", default="4G")
    add("--threads", type=int)
    add("--rounds", type=int, default=5)
    add("--prompt", type=int, default=32, help="tokens before decode")
    add("--gen", type=int, default=300, help="steps, enough for a block to be encoded")
    add("--scores", action="store_true", help="record the scores of all experts too")
    add("--seed", type=int, default=7)
    args = parser.parse_args()
    pairs: list[Json] = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.rounds):
            log(f"round {i + 1} of {args.rounds}")
            each: dict[str, Json] = {}
            order = ("plain", "recording") if i % 2 == 0 else ("recording", "plain")
            for name in order:
                each[name] = bench(args, Path(folder) / f"{i}.parquet" if name == "recording" else None)
            assert each["plain"]["tokens"] == each["recording"]["tokens"], "recording changed the output"
            python_s = each["recording"]["python_s"] - each["plain"]["python_s"]
            pairs.append({
                "decode": ratio(each["recording"]["step_s"], each["plain"]["step_s"]),
                "python": python_s / each["plain"]["step_s"],
                "bytes": each["recording"]["trace_bytes"] / each["recording"]["fed"],
                **{name: {k: v for k, v in one.items() if k != "tokens"} for name, one in each.items()},
            })  # fmt: skip
    bar = not args.scores
    rows = [
        row("decode step, recording ÷ not", middle([p["decode"] for p in pairs]), at_most=1.02 if bar else None,
            n=len(pairs)),
        row("Python's time more ÷ step", middle([p["python"] for p in pairs]), at_most=0.02 if bar else None,
            n=len(pairs)),
        row("bytes of trace a token", middle([p["bytes"] for p in pairs]), n=len(pairs)),
    ]  # fmt: skip
    report("tracing", rows, settings=vars(args), raw={"pairs": pairs})


if __name__ == "__main__":
    run_main(main)
