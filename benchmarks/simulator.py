"""The simulator's speed and memory: policies through the engine's own cache, LRU at every capacity, Belady.

    python benchmarks/simulator.py                     # 5 million demands, some 4 minutes
    python benchmarks/simulator.py --demands 500000
    python benchmarks/simulator.py --trace FILE        # one of your own

Theory. An acquire of 8 experts of which 70 % are resident is 8 look-ups, 8 touches and 2.4 times a victim, an
admission and a read that ends: some 50 calls, 15 µs in CPython on a core of 2020, or 0.5 million demands a second.
The bar is 0.4.
The same objects run live, once for each layer, so this is also what the cache adds to a layer. LRU at every capacity
is a wavelet matrix of the demands: for each of 23 bits a few passes over arrays of 5 million, some 10 s; bars are 15 s
and 600 MB. Belady adds 8 bytes a demand for the future, and a heap that stays as small as the cache; the bar is 1 GB.

Every part runs in a process of its own, without threads.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from common import Json, arm, emit, log, middle, report, row, run_main

from sluice.experts.policies import POLICIES
from sluice.lab.replay import Demands
from sluice.lab.simulate import policy_for, replay, result
from sluice.lab.stack_distance import LruStack
from sluice.lab.synthetic import Shape, write
from sluice.trace import TraceReader

SHARE = 0.134  # of all experts
MIB = 1 << 20
PASSES = 3


def part(name: str, trace: Path, demands_most: int) -> Json:
    """One part: what it took, and what came out."""
    began = perf_counter()
    with TraceReader(trace) as reader:
        demands = Demands.of(reader)
    load_s = perf_counter() - began
    n_slots = round(SHARE * demands.n_experts)
    if name == "stack":
        began = perf_counter()
        stack = LruStack(demands)
        seconds = perf_counter() - began
        figures: Json = {"seconds": seconds, "hits": int(stack.hits[n_slots]), "exact": stack.exact}
    else:
        if name != "belady":
            demands = demands.head(demands_most)
        passes: list[Json] = []
        hits = hit_rate = None
        for _ in range(1 if name == "belady" else PASSES):
            began, cpu = perf_counter(), process_time()
            policy = policy_for(demands, name, n_slots)
            misses = replay(demands, policy, n_slots)
            passes.append({"seconds": perf_counter() - began, "cpu_s": process_time() - cpu})
            found = result(demands, name, n_slots, misses)
            hits, hit_rate = found.hits, found.hit_rate
        figures = {"passes": passes, "hits": hits, "hit_rate": hit_rate}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"part": name, "demands": len(demands.ids), "load_s": load_s, "peak_bytes": peak, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demands", type=int, default=5_000_000)
    parser.add_argument("--object-demands", type=int, default=1_000_000, help="of them, replayed with each live policy")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part is not None:
        emit(part(args.part, args.trace, args.object_demands))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    shape = Shape()
    with tempfile.TemporaryDirectory() as folder:
        trace = args.trace
        if trace is None:
            trace = Path(folder) / "trace.parquet"
            n_tokens = max(1, -(-args.demands // (shape.layers * shape.top_k)))
            log(f"writing a trace of {n_tokens} tokens")
            write(trace, shape, n_tokens)
        found = {
            name: arm("simulator.py", "--part", name, "--trace", trace, "--object-demands", args.object_demands)[-1]
            for name in (*POLICIES, "stack", "belady")
        }
    speeds = {
        name: middle([found[name]["demands"] / one["seconds"] for one in found[name]["passes"]])
        for name in (*POLICIES, "belady")
    }
    rows = [
        row("lru through the engine's cache, demands/s", speeds["lru"], at_least=4e5, n=PASSES),
        row("its hit rate", found["lru"]["hit_rate"]),
        *(row(f"{name}, demands/s", speeds[name], n=PASSES) for name in POLICIES if name != "lru"),
        row("lru at every capacity, s", found["stack"]["seconds"], at_most=15, n=1),
        row("its peak memory, MiB", found["stack"]["peak_bytes"] / MIB, at_most=600, n=1),
        row("belady, demands/s", speeds["belady"], n=1),
        row("its peak memory, MiB", found["belady"]["peak_bytes"] / MIB, at_most=1024, n=1),
    ]
    report("simulator", rows, {"demands": args.demands, "object_demands": args.object_demands}, {"parts": found})


if __name__ == "__main__":
    run_main(main)
