"""Decoding from disk under a memory cap, against llama.cpp under the same cap: alternating, cold, medians.

    python benchmarks/streaming.py synth18.gguf --ram 4G

Theory. Both run in a memory cgroup that counts page cache, so that the file, several times the cap, can't hide in it.
llama.cpp then reads by page faults of 128 KB, one at a time per thread, while its arithmetic stands still; Sluice reads
whole experts past the page cache, several at once, while it computes those that are there. The claim is made without
prefetching (*demand*), because the next layer is nearly perfectly predictable on files of synth.py; with prefetching
(*exact*) is reported beside it. Every repeat is a fresh process that begins with an empty page cache. llama.cpp gets
the best of --threads; its own figure counts one token more than it decodes steps. With --disk-read-ahead it is also
measured at another read-ahead of the disk. Needs root (cgroups, page cache, read-ahead) and xllamacpp.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import arm, flag, log, middle, ratio, report, row, run_main, thread_counts

from sluice.config import parse_size

Arms = dict[str, dict[str, list[dict[str, Any]]]]  # program, then variant of it: repeats
PEER, PEER_AT_OWN = "llama.cpp", "llama.cpp at the other read-ahead"
USUAL_READ_AHEAD_KB = 128


def measure(args: argparse.Namespace) -> Arms:
    """All arms in turn, --repeat times."""
    shared = ("--cap", args.cap or args.ram, "--prompt", args.prompt, "--gen", args.gen)
    ours = (args.model, "--ram", args.ram, *shared, "--warm-up", 0, *flag("--threads", args.sluice_threads))
    peers = {PEER: USUAL_READ_AHEAD_KB}
    if args.disk_read_ahead is not None:
        peers[PEER_AT_OWN] = args.disk_read_ahead
    arms: Arms = {}

    def add(program: str, variant: str, repeats: list[dict[str, Any]]) -> None:
        arms.setdefault(program, {}).setdefault(variant, []).extend(repeats)

    for i in range(args.repeat):
        log(f"round {i + 1} of {args.repeat}")
        add("sluice", "demand", arm("arm.py", *ours, "--no-prefetch"))
        add("sluice", "exact", arm("arm.py", *ours))
        for program, kb in peers.items():
            for threads in thread_counts(args.threads):
                one = arm("llamacpp.py", args.model, *shared, "--threads", threads, "--read-ahead", kb)
                add(program, f"{threads} threads", one)
    return arms


def speeds_of(arms: Arms, phase: str) -> dict[str, dict[str, float | None]]:
    """Medians, tokens a second."""
    return {
        program: {variant: middle([one[f"{phase}_tok_per_s"] for one in repeats]) for variant, repeats in of.items()}
        for program, of in arms.items()
    }


def best(speeds: dict[str, float | None]) -> float | None:
    """The greatest of a program's variants."""
    return max((speed for speed in speeds.values() if speed is not None), default=None)


def rows(arms: Arms, ram: int) -> list[dict[str, Any]]:
    """The claims, from the arms' repeats."""
    decode, prefill = speeds_of(arms, "decode"), speeds_of(arms, "prefill")
    ours, peer = decode["sluice"], best(decode[PEER])
    peak = max(one["peak_rss_bytes"] for repeats in arms["sluice"].values() for one in repeats)
    n = len(arms["sluice"]["demand"])
    result = [
        row("peak resident memory ÷ budget", peak / ram, at_most=1),
        row("decode without prefetch ÷ llama.cpp's", ratio(ours["demand"], peer), at_least=2.5, n=n),
        row("decode with prefetch ÷ llama.cpp's", ratio(ours["exact"], peer), n=n),
        row("prefill without prefetch ÷ llama.cpp's", ratio(prefill["sluice"]["demand"], best(prefill[PEER])), n=n),
    ]
    if PEER_AT_OWN in decode:
        result.append(
            row(f"decode without prefetch ÷ that of {PEER_AT_OWN}", ratio(ours["demand"], best(decode[PEER_AT_OWN])))
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path)
    add("--ram", default="4G")
    add("--cap", help="of the memory cgroup; by default --ram")
    add("--prompt", type=int, default=32, help="tokens")
    add("--gen", type=int, default=32, help="tokens")
    add("--repeat", type=int, default=3)
    add("--threads", help="of llama.cpp, as 1,2; by default powers of two up to the cores")
    add("--sluice-threads", type=int)
    add("--disk-read-ahead", type=int, nargs="?", const=0, metavar="KB",
        help="also measure llama.cpp at this read-ahead; without KB, the disk's own")  # fmt: skip
    args = parser.parse_args()
    ram = parse_size(args.ram)
    arms = measure(args)
    speeds = {phase: speeds_of(arms, phase) for phase in ("prefill", "decode")}
    report("streaming", rows(arms, ram), settings=vars(args) | {"tok_per_s": speeds}, raw=arms)


if __name__ == "__main__":
    run_main(main)
