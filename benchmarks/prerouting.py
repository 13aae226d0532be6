"""Routes known a token ahead: what that hides of reading, on the real disk and on slower ones, and what it costs.

    python benchmarks/prerouting.py synth18.gguf --ram 4G --rates disk,2G,1G,500M

Theory. Without reading ahead and without overlap (*naive*) a token takes its arithmetic C and then waits W for its
experts; with reads that begin a token early they run beside each other, so at best it takes max(C, W): a speed-up of
(C + W) ÷ max(C, W), which is 2 where both are equal. *oracle* is that with the true routes, recorded by a run that
isn't timed: it makes the exact run's tokens and moves its bytes, only sooner. *demand* overlaps within a layer; *exact*
looks two layers ahead with the layers' own routers; *hints* reads what untrained heads name (`sluice prerouter init`),
a token ahead; *prerouted* runs what they name, so its text is another one. Disks of a given rate are emulated: reads by
threads, with no credit for idle time.

    oracle ÷ naive, tok/s                    at least 0.9 × (C + W) ÷ max(C, W), C and W naive's in that run
    bytes read a token, oracle ÷ naive       at least 0.95
    peak memory ÷ budget, every mode         at most 1
    prerouted ÷ exact, everything resident   at least 0.95

Every run is a process of its own with an empty pool, in turns; figures are medians. The last row's runs repeat their
text in one process: the second time all its experts are resident (the pool is as large as the model, so it needs memory
for what the text uses).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from common import log, middle, ratio, report, resident_speed, row, run_main, sluice

from sluice.config import parse_size

Json = dict[str, Any]
MODES = ("naive", "demand", "exact", "hints", "oracle", "prerouted")
A_STEP = ("compute_s", "wait_s", "host_s", "bytes_read", "misses", "late_hits")


def streamed(args: argparse.Namespace, heads: Path, rate: str) -> tuple[list[Json], Json]:
    """Rows and raw figures of all modes at one rate."""
    limit = () if rate == "disk" else ("--read-rate", rate)
    found = json.loads(
        sluice(
            "bench", args.model, "--ram", args.ram, "--prompt-tokens", args.prompt, "--gen", args.gen, "--seed",
            args.seed, "--repeat", args.repeat, "--compare", ",".join(MODES), "--prerouter", heads, "--json", *limit,
        )[-1]
    )  # fmt: skip
    arms, n, name = found["arms"], args.repeat, f"{rate}: " if rate == "disk" else f"{rate}/s: "

    def decode(mode: str, key: str) -> float:
        """Of the median over repeats, a step."""
        each = [one["ledger"]["decode"] for one in arms[mode]["repeats"]]
        return middle([one[key] / one["steps"] for one in each]) or 0.0

    c, w = decode("naive", "compute_s"), decode("naive", "wait_s")
    bound = (c + w) / max(c, w)
    rows = [
        row(f"{name}modes that are not lossy make the same tokens", float(found["same_tokens"]), at_least=1),
        row(f"{name}oracle ÷ naive", found["relative"]["oracle"], at_least=0.9 * bound, n=n),
        row(
            f"{name}bytes a token, oracle ÷ naive",
            ratio(decode("oracle", "bytes_read"), decode("naive", "bytes_read")), at_least=0.95, n=n,
        ),
    ]  # fmt: skip
    for mode in MODES:
        rows.append(row(f"{name}{mode}, tok/s", arms[mode]["tok_per_s"], n=n))
        rows.append(row(f"{name}{mode}, ms waited a token", 1e3 * decode(mode, "wait_s"), n=n))
        if rate == "disk":
            peak = arms[mode]["peak_rss_bytes"] / parse_size(args.ram)
            rows.append(row(f"{name}{mode}, peak memory ÷ budget", peak, at_most=1))
    figures = {
        mode: {key: decode(mode, key) for key in A_STEP}
        | {key: arms[mode]["ledger"]["decode"][key] for key in ("prerouter_agreement", "prefetch_crowded")}
        for mode in MODES
    }
    return rows, {"bound": bound, "relative": found["relative"], "a_step": figures}


def resident(args: argparse.Namespace, heads: Path) -> tuple[list[Json], Json]:
    """The last row: exact and prerouted with everything resident, in turns."""
    modes: dict[str, tuple[object, ...]] = {
        "exact": ("--no-prefetch",),
        "prerouted": ("--routing", "prerouted", "--prerouter", heads),
    }
    speeds: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(args.repeat):
        for mode, flags in modes.items():
            words = ("--prompt-tokens", args.prompt, "--gen", args.gen, "--seed", args.seed)
            speeds[mode].append(resident_speed(args.model, *words, *flags))
    prerouted, exact = middle(speeds["prerouted"]), middle(speeds["exact"])
    rows = [row("resident: prerouted ÷ exact", ratio(prerouted, exact), at_least=0.95, n=args.repeat)]
    return rows, {"tok_per_s": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path)
    add("--ram", default="4G")
    add("--rates", default="disk,2G,1G,500M", help="bytes a second of emulated disks; disk is the real one")
    add("--prompt", type=int, default=32, help="tokens")
    add("--gen", type=int, default=48, help="tokens")
    add("--repeat", type=int, default=3)
    add("--seed", type=int, default=7)
    add("--no-resident", action="store_true", help="leave out the last row")
    args = parser.parse_args()
    rows: list[Json] = []
    raw: Json = {}
    with tempfile.TemporaryDirectory() as folder:
        heads = Path(folder) / "init.safetensors"
        sluice("prerouter", "init", args.model, heads)
        for rate in args.rates.split(","):
            log(f"reading: {rate}")
            more, raw[rate] = streamed(args, heads, rate)
            rows += more
        if not args.no_resident:
            log("everything resident")
            more, raw["resident"] = resident(args, heads)
            rows += more
    report("prerouting", rows, settings=vars(args), raw=raw)


if __name__ == "__main__":
    run_main(main)
