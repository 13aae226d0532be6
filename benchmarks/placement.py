"""Which experts to keep: LRU, pinned, the planned split and llama.cpp's mmap side by side, live; cold and warm starts.

    python benchmarks/placement.py synth18.gguf --ram 4G

Theory. A trace says which experts a workload wants. Pinning the hottest keeps them from being flushed but can't follow
the subject; LRU follows it but forgets the popular; `sluice plan` finds the split by simulation on a part of the trace
and judges it on another. Here all three run, on text that was not recorded: with the same experts loaded at the start,
so that only what is kept differs, on demand, each in a process of its own within a memory cgroup of the budget, in
turns. Their tokens must be equal: where experts come from changes no bit. llama.cpp maps the file within the same cap.
The simulated hit rate stands beside the live one. A warm start loads what an earlier run on other text left in memory:
it pays one sweep of reading at the disk's full rate, and saves the misses of an empty pool. What it is worth is counted
in the time until --start-gen tokens are there, loading included. Needs root (cgroups, page cache) and xllamacpp;
without them --no-cap and --no-peer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import Json, arm, flag, log, middle, ratio, report, row, run_main
from machine import MemoryCap, UnavailableError

from sluice.config import parse_size

LRU, PINNED, PLANNED, PEER = "LRU", "pinned", "planned", "llama.cpp"
COLD, WARM = "cold start", "warm start"


class Runs:
    """`sluice` as processes of its own on one model within one budget."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = args.model
        self.cap = None if args.no_cap else parse_size(args.cap or args.ram)
        self.ram = args.ram
        self.common = ["--no-prefetch", *flag("--threads", args.threads), "--prompt-tokens", args.prompt, "--repeat", 1]

    def bench(self, gen: int, seed: int, *words: object) -> Json:
        """`sluice bench`'s object of one repeat within the budget, with an empty page cache."""
        own = ("--ram", self.ram, "--gen", gen, "--seed", seed, *words)
        return self.sluice("bench", self.model, *self.common, *own, capped=True)

    def record(self, gen: int, seed: int, trace: Path) -> None:
        """A trace of the routes of `gen` tokens, with what memory is free: they are the same in any budget."""
        self.sluice("bench", self.model, *self.common, "--gen", gen, "--seed", seed, "--trace", trace)

    def sluice(self, *words: object, capped: bool = False) -> Json:
        """The last line of a command's stdout. Raises UnavailableError with what it said if it failed."""
        line = [sys.executable, "-m", "sluice", *map(str, words), "--json"]
        log(f"+ sluice {' '.join(line[3:-1])}")
        if not capped or self.cap is None:
            done = subprocess.run(line, capture_output=True, text=True)
        else:
            with MemoryCap(self.cap) as group:
                done = subprocess.run(line, capture_output=True, text=True, preexec_fn=group.join)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
            raise UnavailableError(f"sluice {words[0]}: {said[-1]}")
        return json.loads(done.stdout.splitlines()[-1])


def plans(runs: Runs, args: argparse.Namespace, folder: Path) -> tuple[dict[str, Path], Json]:
    """Plan files of the three ways, which load the same experts, and what `sluice plan` said."""
    from dataclasses import replace

    from sluice.plan_file import read_plan, write_plan

    trace = args.trace
    if trace is None:
        trace = folder / "trace.parquet"
        runs.record(args.record, args.seed + 1000, trace)
    paths = {name: folder / f"{name}.json" for name in (LRU, PINNED, PLANNED)}
    found = runs.sluice("plan", args.model, "--ram", args.ram, "--trace", trace, "--out", paths[PLANNED])["plan"]
    plan = read_plan(paths[PLANNED])
    hottest = [*plan.pins, *reversed(plan.load)]
    for name, n in ((LRU, 0), (PINNED, plan.slots - found["room"])):
        write_plan(paths[name], replace(plan, pins=tuple(hottest[:n]), load=tuple(reversed(hottest[n:]))))
    return paths, found


def figures(one: Json) -> Json:
    """What a run of ours came to."""
    decode = one["ledger"]["decode"]
    return {
        "tok_per_s": one["tok_per_s"],
        "hit_rate": decode["hits"] / decode["demands"],
        "bytes_per_token": decode["bytes_read"] / decode["tokens"],
        "load_s": one["load_s"],
        "ttft_s": one["ttft_s"],
        "until_all_s": one["load_s"] + one["ttft_s"] + one["repeats"][0]["decode_s"],
        "peak_rss_bytes": one["peak_rss_bytes"],
        "plan": one.get("plan"),
        "tokens": one["tokens"],
    }


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict[str, list[Json]], Json]:
    """All arms in turn, --repeat times; and what `sluice plan` said."""
    runs = Runs(args)
    paths, found = plans(runs, args, folder)
    residents = folder / "residents.json"
    runs.bench(args.gen, args.seed + 2000, "--save-residents", residents)
    arms: dict[str, list[Json]] = {}
    for i in range(args.repeat):
        log(f"round {i + 1} of {args.repeat}")
        seed = args.seed + i
        for name, path in paths.items():
            arms.setdefault(name, []).append(figures(runs.bench(args.gen, seed, "--plan", path)))
        for name, words in ((COLD, ()), (WARM, ("--plan", residents))):
            arms.setdefault(name, []).append(figures(runs.bench(args.start_gen, seed, *words)))
        if not args.no_peer:
            cap = flag("--cap", None if args.no_cap else args.cap or args.ram)
            shape = ("--prompt", args.prompt, "--gen", args.gen, "--threads", args.peer_threads)
            [peer] = arm("llamacpp.py", args.model, *cap, *shape)
            read = peer["bytes_read"]
            peer["tok_per_s"] = peer["decode_tok_per_s"]
            peer["bytes_per_token"] = None if read is None else read / (args.prompt + args.gen)  # the prompt's among it
            arms.setdefault(PEER, []).append(peer)
    return arms, found


def rows(arms: dict[str, list[Json]], found: Json) -> list[Json]:
    """The claims."""
    n = len(arms[LRU])

    def of(name: str, key: str) -> float | None:
        return middle([one[key] for one in arms.get(name, [])])

    ours = [name for name in arms if name != PEER]
    texts = [[tuple(arms[name][i]["tokens"]) for name in ours] for i in range(n)]
    same = all(a[: len(b)] == b[: len(a)] for text in texts for a in text for b in text)
    best = max(of(LRU, "tok_per_s") or 0, of(PINNED, "tok_per_s") or 0)
    expected = found["held_out"]["planned"]["decode_hit_rate"]
    live = of(PLANNED, "hit_rate")
    result = [row("all arms generate the same tokens", float(same), at_least=1, n=n)]
    for name in (LRU, PINNED, PLANNED, COLD, WARM):
        result.append(row(f"{name}: decode hit rate", of(name, "hit_rate"), n=n))
        result.append(row(f"{name}: MB read a token", ratio(of(name, "bytes_per_token"), 1e6), n=n))
        result.append(row(f"{name}: tok/s", of(name, "tok_per_s"), n=n))
    if PEER in arms:
        result.append(row(f"{PEER}: MB read a token", ratio(of(PEER, "bytes_per_token"), 1e6), n=n))
        result.append(row(f"{PEER}: tok/s", of(PEER, "tok_per_s"), n=n))
        result.append(row("planned tok/s ÷ llama.cpp's", ratio(of(PLANNED, "tok_per_s"), of(PEER, "tok_per_s")), n=n))
    apart = None if expected is None or live is None else abs(expected - live)
    result += [
        row("share of the slots that the plan pins", found["pins"] / found["slots"]),
        row("planned hit rate, simulated on held-out demands", expected),
        row("planned hit rate, simulated and live apart", apart),
        row("planned tok/s ÷ the better of LRU and pinned", ratio(of(PLANNED, "tok_per_s"), best), n=n),
        row("time to the first tokens, warm ÷ cold", ratio(of(WARM, "until_all_s"), of(COLD, "until_all_s")), n=n),
        row("speed of the first tokens, warm ÷ cold", ratio(of(WARM, "tok_per_s"), of(COLD, "tok_per_s")), n=n),
    ]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path)
    add("--ram", default="4G")
    add("--cap", help="of the memory cgroup; by default --ram")
    add("--trace", type=Path, help="plan from this one; by default --record tokens are recorded first")
    add("--record", type=int, default=1024, help="tokens")
    add("--prompt", type=int, default=32, help="tokens")
    add("--gen", type=int, default=128, help="tokens")
    add("--start-gen", type=int, default=16, help="tokens that a cold and a warm start are timed on")
    add("--repeat", type=int, default=3)
    add("--seed", type=int, default=7)
    add("--threads", type=int)
    add("--peer-threads", type=int, default=1, help="of llama.cpp")
    add("--no-peer", action="store_true")
    add("--no-cap", action="store_true", help="no memory cgroup: the page cache is warm")
    args = parser.parse_args()
    if min(args.record, args.prompt, args.repeat) < 1 or min(args.gen, args.start_gen) < 2:
        parser.error("record, prompt and repeat must be at least 1, gen and start-gen at least 2")
    with TemporaryDirectory(prefix="sluice-placement-") as folder:
        arms, found = measure(args, Path(folder))
    settings: dict[str, Any] = vars(args)
    report("placement", rows(arms, found), settings=settings, raw={"arms": arms, "plan": found})


if __name__ == "__main__":
    run_main(main)
