"""Compares ways to run one model, each run in a process of its own, in turns; knows bench's flags, and no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from sluice.cli.terminal import one_line, progress_bar
from sluice.errors import InputError, SluiceError

# What each mode is, as flags of `sluice bench`.
ARMS = {"naive": ("--no-overlap", "--no-prefetch"), "demand": ("--no-prefetch",), "exact": ()}


def compare(model: str, modes: Sequence[str], words: Sequence[str], *, rounds: int) -> dict[str, Any]:
    """Run every mode once a round, in turn: {"arms": {mode: bench's object}, "relative", "rounds", "same_tokens"}.

    An arm's figures are those of its median run, with the runs under `repeats`; `relative` is its tok_per_s ÷ the
    first mode's. Raises what a run that failed said.
    """
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    with progress_bar("comparing") as progress:
        for i in range(rounds):
            for j, mode in enumerate(modes):
                progress(i * len(modes) + j, rounds * len(modes))
                runs[mode].append(_run([model, *words, *ARMS[mode]]))
    arms = {mode: _median(results) for mode, results in runs.items()}
    base = arms[modes[0]]["tok_per_s"]
    tokens = [result["tokens"] for results in runs.values() for result in results]
    return {
        "arms": arms,
        "relative": {
            mode: arm["tok_per_s"] / base if base and arm["tok_per_s"] else None for mode, arm in arms.items()
        },
        "rounds": rounds,
        "same_tokens": all(each == tokens[0] for each in tokens),
    }


def _median(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The median run of a mode, with the `repeats` of all and the median speed."""
    from statistics import median

    ordered = sorted(results, key=lambda result: result["tok_per_s"] or 0)
    middle = dict(ordered[(len(ordered) - 1) // 2])
    middle["repeats"] = [repeat for result in results for repeat in result["repeats"]]
    speeds = [result["tok_per_s"] for result in results if result["tok_per_s"] is not None]
    middle["tok_per_s"] = median(speeds) if speeds else None
    return middle


def _run(words: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "sluice", "bench", *words, "--repeat=1", "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, encoding="utf-8") as child:
        try:
            out, complaint = child.communicate()
        except BaseException:
            child.terminate()
            child.wait()
            raise
    if child.returncode == 0:
        return json.loads(out.splitlines()[-1])
    if child.returncode == 130:
        raise KeyboardInterrupt
    lines = complaint.strip().splitlines()
    said = one_line(lines[-1]).removeprefix("sluice: ") if lines else f"a run ended with status {child.returncode}"
    raise (InputError if child.returncode == 2 else SluiceError)(said)
