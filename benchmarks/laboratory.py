"""The laboratory at scale: a report on a trace of 5 million demands, its time and its memory.

    python benchmarks/laboratory.py                    # some 2 minutes
    python benchmarks/laboratory.py --demands 500000

Theory. The trace (sluice.lab.synthetic, 48 layers × 128 experts, top 8) is 625 thousand rows. Its table takes 31 MB,
its demands 5 bytes each, Belady's future 8 bytes each. What costs time is one replay of the trace through the engine's
own cache for the Belady point, at some 0.4 million demands a second; everything else goes through arrays. The bar is 2
minutes and 1 GB for the report with its figures, the LRU curve at all capacities and one Belady point, on one core.

The second half of the claim is what the trace is like: the figures published of Qwen3-30B-A3B.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import Json, log, report, row, run_main

from sluice.lab.synthetic import Shape, write

GIB = 1 << 30
PUBLISHED = {"lru": 0.659, "static": 0.592, "experts_for_95": 0.525, "over_chance": 2.0}
WITHIN = {"lru": 0.02, "static": 0.02, "experts_for_95": 0.025, "over_chance": 0.1}


def measured(command: list[str]) -> tuple[str, float, int | None]:
    """Run a command: its stdout, its seconds, and its peak resident bytes (Linux; None elsewhere)."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        peak: list[int] = []
        watcher = threading.Thread(target=_watch, args=(child, peak))
        watcher.start()
        out, _ = child.communicate()
        watcher.join()
    if child.returncode:
        raise SystemExit(child.returncode)
    return out, time.perf_counter() - began, max(peak, default=None)


def _watch(child: subprocess.Popen[str], peak: list[int]) -> None:
    """Note the highest peak that the kernel reports, until the child ends."""
    status = Path(f"/proc/{child.pid}/status")
    while child.poll() is None:
        try:
            lines = status.read_text().splitlines()
        except OSError:
            return
        peak += [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")]
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demands", type=int, default=5_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = Shape(seed=args.seed)
    n_tokens = max(1, -(-args.demands // (shape.layers * shape.top_k)))
    with tempfile.TemporaryDirectory() as folder:
        trace, page = Path(folder) / "trace.parquet", Path(folder) / "report.html"
        log(f"writing a trace of {n_tokens} tokens")
        began = time.perf_counter()
        write(trace, shape, n_tokens)
        written_s, trace_bytes = time.perf_counter() - began, trace.stat().st_size
        log("reporting on it")
        command = [sys.executable, "-m", "sluice", "trace", "report", str(trace), "--out", str(page), "--json"]
        before = os.times()
        out, seconds, peak = measured(command)
        after = os.times()
        found: Json = json.loads(out.splitlines()[-1])
        page_bytes = page.stat().st_size
    at = round(0.134 * found["experts_all"])
    bound = [point for point in found["caches"]["policies"]["belady"] if point["capacity_slots"] == at]
    lru = found["caches"]["at_usual"]["lru"] / found["demands"]
    figures = {
        "lru": lru,
        "static": found["caches"]["at_usual"]["static"] / found["demands"],
        "experts_for_95": found["concentration"]["experts_for"]["0.95"],
        "over_chance": found["reuse"]["over_chance"],
    }
    rows = [
        row("report with LRU curve and Belady point, s", seconds, at_most=120, n=1),
        row("its peak memory, GiB", None if peak is None else peak / GIB, at_most=1, n=1),
        *(
            row(f"{name}, published {PUBLISHED[name]:g}", value, at_least=PUBLISHED[name] - WITHIN[name],
                at_most=PUBLISHED[name] + WITHIN[name])
            for name, value in figures.items()
        ),
        row("Belady at 13.4 %", bound[0]["hit_rate"] if bound else None),
        row("LRU's gap to Belady at 13.4 %", bound[0]["hit_rate"] - lru if bound else None),
    ]  # fmt: skip
    raw = {"demands": found["demands"], "rows": found["rows"], "trace_bytes": trace_bytes, "write_s": written_s,
           "report_cpu_s": after.children_user + after.children_system - before.children_user - before.children_system,
           "page_bytes": page_bytes,
           "report": {name: found[name] for name in ("reuse", "concentration", "consistency")}}  # fmt: skip
    report("laboratory", rows, {"demands": args.demands, "seed": args.seed, "tokens": n_tokens}, raw)


if __name__ == "__main__":
    run_main(main)
