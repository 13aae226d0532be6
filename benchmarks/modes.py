"""What each lossy mode costs nano, by domain: perplexity, and KL divergence from the exact mode.

    python benchmarks/modes.py                         # passages that `python experiments/run.py data` held out
    python benchmarks/modes.py --texts FOLDER          # files named NUMBER-DOMAIN.txt

Theory. KL is what a mode changes of the predictions themselves, so it shows what perplexity's noise hides; an exact
mode has 0. Rerouting and predicted routes act in decode steps alone, or on all but the first tokens of a text, and
rerouting changes more the fewer experts are in memory: the pool here has slots for 15 % of them. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path

from common import HERE, Json, emit, run_main, sluice

from sluice import nano
from sluice.errors import InputError

SLOTS = 38  # 15 % of 256
MODES: dict[str, tuple[object, ...]] = {
    "kv q8_0": ("--kv", "q8_0"),
    "kv q4_0": ("--kv", "q4_0"),
    "reroute 0.1": ("--reroute", "0.1"),
    "reroute 0.3": ("--reroute", "0.3"),
    "one expert of two": ("--top-k-experts", 1),
    "prerouted, heads alone": ("--routing", "prerouted", "--prerouter", nano.HEADS),
    "prerouted, heads and adapter": ("--routing", "prerouted"),
}


def joined(texts: Path, out: Path, passages: int | None) -> list[str]:
    """--domain for a file of each domain in `out`, which holds its passages one after the other."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(texts.glob("*-*.txt")):
        found[path.stem.partition("-")[2]].append(path.read_text(encoding="utf-8"))
    if not found:
        raise InputError(f"{texts}: holds no files like 000-code.txt: run `python experiments/run.py data` first")
    words: list[str] = []
    for domain, some in sorted(found.items()):
        (out / f"{domain}.txt").write_text("\n\n".join(some[:passages]), encoding="utf-8")
        words += ["--domain", f"{domain}={out / domain}.txt"]
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--texts", type=Path, default=HERE.parent / "build" / "experiments" / "texts", help="a folder of passages")
    add("--passages", type=int, help="of each domain, so many instead of all")
    add("--threads", type=int, default=1)
    given = parser.parse_args()
    results: dict[str, Json] = {}
    with tempfile.TemporaryDirectory() as folder:
        words = joined(given.texts, Path(folder), given.passages)
        words += ["--expert-slots", str(SLOTS), "--ctx", "256", "--threads", str(given.threads), "--json"]
        for mode, flags in MODES.items():
            said = json.loads(sluice("eval", "kl", "nano", *words, *flags)[-1])
            domains = said["per_domain"]
            results[mode] = {
                "tokens": said["tokens"], "exact_ppl": said["ppl_reference"], "ppl": said["ppl"],
                "kl": said["kl"]["mean"], "same_top": said.get("same_top"),
                "per_domain": {
                    name: {"exact_ppl": one["ppl_reference"], "ppl": one["ppl"], "kl": one["kl"]["mean"]}
                    for name, one in domains.items()
                },
            }  # fmt: skip
            emit({mode: results[mode]})
    emit({"benchmark": "modes", "slots": SLOTS, "modes": results})


if __name__ == "__main__":
    run_main(main)
