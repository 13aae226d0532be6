"""How near streaming comes to its bound, max(arithmetic, reading): decode, reading, prefill, steadiness, Python.

    python benchmarks/overlap.py synth18.gguf --ram 4G

Theory. Arithmetic and reading use different hardware, so a perfect overlap takes as long as the longer of the two.
*compute*: what the arithmetic of the very same tokens takes with all their experts resident, in a process of its own
(which needs memory for them). *raw*: plain reading of the same read size at the engine's mean depth, 3 s right before
and after each repeat; where the two differ by more than 10 % the repeat is discarded, counted, and taken again. Each
round runs a streamed process and then a resident one that is forced along its tokens twice, of which the quicker counts
(what disturbs it would flatter streaming); figures are medians over rounds.

    decode       step time ÷ max(compute, bytes read ÷ raw)                                          at most 1.15
    reading      bytes read ÷ time with a read outstanding ÷ raw                                     at least 0.85
    Python       (step - arithmetic - waiting) ÷ (60 µs a layer + 15 µs a read + 1 ms)               at most 1
    prefill      time of a 512-token prompt ÷ max(compute, one scan of the experts met ÷ raw)        at most 1.25
    steadiness   95th percentile ÷ median of the time between tokens, in a text on one subject       at most 2
    excursion    at a change of subject: the longest step, and the time lost until it is steady again   reported

Where reading is done by the processor (virtual disks) the two compete for it, and the bound can't be reached. Subjects
are the clusters of synth.py's vocabulary; other files have none. The modes are *exact* (with prefetch) and *demand*.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import walks
from bound import decode_figures, median_of, pair, prefill_figures, retakes
from common import arm, flag, log, report, row, run_main
from walks import CLUSTERS, Walk

from sluice.engine.report import quantile
from sluice.ggml import load_library
from sluice.gguf import open_gguf

MODES: dict[str, list[object]] = {"exact": [], "demand": ["--no-prefetch"]}
PARTS = ("decode", "prefill", "steadiness")
STEADY_PROMPT = 16  # tokens
SETTLED, SETTLED_STEPS = 1.25, 4  # a text is steady again once so many steps have a median within this of its own

Json = dict[str, Any]


def vocabulary_size(model: Path) -> int:
    return len(open_gguf(model, load_library()).metadata["tokenizer.ggml.tokens"])


def decode(args: argparse.Namespace, ours: Sequence[object], folder: Path) -> tuple[list[Json], Json]:
    """Rows and raw figures of decoding in every mode."""
    rows, raw = [], {}
    streamed: dict[str, list[Json]] = {mode: [] for mode in args.modes}
    figures: dict[str, list[Json]] = {mode: [] for mode in args.modes}
    for i in range(args.repeat):
        for mode in args.modes:
            log(f"decode, {mode}, round {i + 1} of {args.repeat}")
            tokens = folder / "decode.json"
            one = arm(
                "arm.py", *ours, *MODES[mode], "--raw", "--raw-seconds", args.raw_seconds, "--retakes", args.retakes,
                "--prompt", args.prompt, "--warm-up", args.warm_up, "--gen", args.gen, "--seed", 7 + i,
                "--dump", tokens,
            )  # fmt: skip
            streamed[mode] += one
            if any(repeat["kept"] for repeat in one):
                resident = arm(
                    "arm.py", args.model, *_threads(args), "--resident", "--replay", tokens, "--passes", args.passes
                )
                figures[mode] += [decode_figures(*both) for both in pair(one, resident)]
    for mode in args.modes:
        mine, n, again = figures[mode], len(figures[mode]), retakes(streamed[mode])
        rows += [
            row(f"decode step ÷ bound, {mode}", median_of(mine, "over_bound"), at_most=1.15, n=n),
            row(f"reading ÷ raw, {mode}", median_of(mine, "read_efficiency"), at_least=0.85, n=n),
            row(f"Python ÷ allowance, {mode}", median_of(mine, "python_over_allowed"), at_most=1, n=n),
            row(f"repeats discarded, {mode}", again),
        ]
        raw[mode] = {"figures": mine, "retakes": again, "repeats": streamed[mode]}
    return rows, raw


def prefill(args: argparse.Namespace, ours: Sequence[object], folder: Path) -> tuple[list[Json], Json]:
    """Rows and raw figures of long prompts."""
    log("prefill")
    rng, n_vocab = np.random.default_rng(args.seed), vocabulary_size(args.model)
    prompts = folder / "prompts.json"
    walks.save(prompts, [Walk([walks.changing(args.prefill, n_vocab, rng)]) for _ in range(args.repeat)])
    shared = ("--measure", "prefill", "--replay", prompts)
    streamed = arm(
        "arm.py", *ours, *shared, "--raw", "--raw-seconds", args.raw_seconds, "--retakes", args.retakes
    )  # fmt: skip
    resident = arm("arm.py", args.model, *_threads(args), "--resident", *shared, "--passes", args.passes)
    figures = [prefill_figures(*both) for both in pair(streamed, resident)]
    name = f"prefill of {args.prefill} tokens ÷ bound"
    again = retakes(streamed)
    raw = {"figures": figures, "retakes": again, "repeats": streamed}
    return [
        row(name, median_of(figures, "over_bound"), at_most=1.25, n=len(figures)),
        row("prefill repeats discarded", again),
    ], raw


def steadiness(args: argparse.Namespace, ours: Sequence[object], folder: Path) -> tuple[list[Json], Json]:
    """Rows and raw figures of a text on one subject that then changes it, in every mode."""
    rng, n_vocab = np.random.default_rng(args.seed), vocabulary_size(args.model)
    texts = []
    start, change = args.warm_up, args.warm_up + args.steady
    for i in range(args.texts):
        first, second = 2 * i, 2 * i + CLUSTERS // 2 + 1
        tokens = walks.subject(first, change, n_vocab, rng) + walks.subject(second, args.after, n_vocab, rng)
        prompt = walks.subject(first, STEADY_PROMPT, n_vocab, rng)
        texts.append(Walk([prompt], [tokens], [(start, change), (change, change + args.after)]))
    path = folder / "texts.json"
    walks.save(path, texts)
    rows, raw = [], {}
    for mode in args.modes:
        log(f"steadiness, {mode}")
        repeats = arm("arm.py", *ours, *MODES[mode], "--replay", path)
        figures = [
            _excursion(one["intervals_s"], other["intervals_s"])
            for one, other in zip(repeats[::2], repeats[1::2], strict=True)
        ]
        rows += [
            row(f"p95 ÷ p50 between tokens in steady text, {mode}", median_of(figures, "p95_over_p50"), at_most=2),
            row(f"longest step at a change of subject ÷ p50, {mode}", median_of(figures, "longest_over_p50")),
            row(f"time lost at a change of subject, s, {mode}", median_of(figures, "lost_s")),
        ]
        raw[mode] = {"figures": figures, "repeats": repeats}
    return rows, raw


def _excursion(steady: Sequence[float], after: Sequence[float]) -> Json:
    """Steps in steady text beside those after a change of subject, seconds."""
    p50, p95 = quantile(steady, 0.5), quantile(steady, 0.95)
    assert p50 is not None and p95 is not None
    last = len(after) - SETTLED_STEPS
    settled = next((i for i in range(last + 1) if median(after[i : i + SETTLED_STEPS]) <= SETTLED * p50), None)
    return {
        "p50_s": p50,
        "p95_over_p50": p95 / p50,
        "longest_over_p50": max(after) / p50,
        "steps_until_steady": settled,
        "lost_s": sum(s - p50 for s in after[:settled]),
        "after_s": list(after),
    }


def _threads(args: argparse.Namespace) -> list[object]:
    return flag("--threads", args.threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path)
    add("--ram", default="4G")
    add("--threads", type=int)
    add("--repeat", type=int, default=5, help="rounds of decode, and prompts of prefill")
    add("--prompt", type=int, default=32, help="tokens before decode")
    add("--warm-up", type=int, default=32, help="steps before what is timed")
    add("--gen", type=int, default=48, help="steps of a decode repeat")
    add("--prefill", type=int, default=512, help="tokens of a long prompt")
    add("--texts", type=int, default=3, help="for steadiness")
    add("--steady", type=int, default=96, help="steps on one subject")
    add("--after", type=int, default=32, help="steps after the change")
    add("--modes", default=",".join(MODES))
    add("--parts", default=",".join(PARTS))
    add("--raw-seconds", type=float, default=3.0)
    add("--passes", type=int, default=2, help="of the resident arms; the quicker counts")
    add("--retakes", type=int, default=5, help="of one repeat, at most")
    add("--seed", type=int, default=7, help="of the made-up texts")
    args = parser.parse_args()
    args.modes, args.parts = args.modes.split(","), args.parts.split(",")
    if not set(args.modes) <= set(MODES) or not set(args.parts) <= set(PARTS):
        parser.error(f"modes are {', '.join(MODES)}; parts are {', '.join(PARTS)}")
    if args.after < SETTLED_STEPS or args.steady < 2:
        parser.error(f"--after must be at least {SETTLED_STEPS}, --steady at least 2")
    ours = [args.model, "--ram", args.ram, *_threads(args)]
    rows: list[Json] = []
    raw: Json = {}
    with tempfile.TemporaryDirectory() as folder:
        for part, function in zip(PARTS, (decode, prefill, steadiness), strict=True):
            if part in args.parts:
                more, raw[part] = function(args, ours, Path(folder))
                rows += more
    report("overlap", rows, settings=vars(args), raw=raw)


if __name__ == "__main__":
    run_main(main)
