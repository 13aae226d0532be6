"""Compares ways to run one model, each in a process of its own, in turns; knows commands' flags, and no engine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sluice.cli.children import result_of
from sluice.cli.terminal import progress_bar

# What each mode is, as flags of `sluice bench`.
ARMS = {
    "naive": ("--no-overlap", "--no-prefetch"),
    "demand": ("--no-prefetch",),
    "exact": (),
    "hints": ("--prerouter={prerouter}",),
    "prerouted": ("--routing=prerouted", "--prerouter={prerouter}"),
    "oracle": ("--routing=prerouted", "--routes={routes}"),
}
REROUTE = "reroute:"  # and a margin: the flag --reroute
LOSSY = ("prerouted", REROUTE)  # how those begin that may make other tokens than the rest


def flags_of(mode: str, **files: Any) -> list[str]:
    """The flags of a mode, with `files`, the prerouter and routes, in their places; none for a file that is None."""
    if mode.startswith(REROUTE):
        return [f"--reroute={mode.removeprefix(REROUTE)}"]
    return [flag.format(**files) for flag in ARMS[mode] if "{prerouter}" not in flag or files["prerouter"] is not None]


def compare(
    model: str, modes: Sequence[str], words: Sequence[str], *, rounds: int, prerouter: str | None = None
) -> dict[str, Any]:  # fmt: skip
    """Run every mode once a round, in turn: {"arms": {mode: bench's object}, "relative", "rounds", "same_tokens"}.

    An arm's figures are those of its median run, with the runs under `repeats`; `relative` is its tok_per_s ÷ the
    first mode's, `same_tokens` says it of the modes that are not lossy. For `oracle` a run that isn't timed records its
    routes first. Raises what a run that failed said.
    """
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    with progress_bar("comparing") as progress, tempfile.TemporaryDirectory() as folder:
        routes = Path(folder) / "routes.parquet"
        if "oracle" in modes:
            progress(0, rounds * len(modes))
            _bench([model, *words, f"--trace={routes}"])
        for i in range(rounds):
            for j, mode in enumerate(modes):
                progress(i * len(modes) + j, rounds * len(modes))
                runs[mode].append(_bench([model, *words, *flags_of(mode, prerouter=prerouter, routes=routes)]))
    arms = {mode: _median(results) for mode, results in runs.items()}
    base = arms[modes[0]]["tok_per_s"]
    tokens = [result["tokens"] for mode, each in runs.items() if not mode.startswith(LOSSY) for result in each]
    return {
        "arms": arms,
        "relative": {
            mode: arm["tok_per_s"] / base if base and arm["tok_per_s"] else None for mode, arm in arms.items()
        },
        "rounds": rounds,
        "same_tokens": all(each == tokens[0] for each in tokens),
    }


def quality(
    model: str, modes: Sequence[str], words: Sequence[str], text: Path, *, prerouter: str | None = None
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """What `sluice eval` says of a text: `ppl` of "exact", `kl` of each of the lossy `modes`. `words` are its flags."""
    shared = [model, f"--text={text}", *words]
    lossy = [mode for mode in modes if mode.startswith(LOSSY)]
    with progress_bar("scoring") as progress:
        progress(0, 1 + len(lossy))
        found = {"exact": result_of("eval", "ppl", *shared)}
        for mode in lossy:
            progress(len(found), 1 + len(lossy))
            found[mode] = result_of("eval", "kl", *shared, *flags_of(mode, prerouter=prerouter))
    return found


def _median(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The median run of a mode, with the `repeats` of all and the median speed."""
    from statistics import median

    ordered = sorted(results, key=lambda result: result["tok_per_s"] or 0)
    middle = dict(ordered[(len(ordered) - 1) // 2])
    middle["repeats"] = [repeat for result in results for repeat in result["repeats"]]
    speeds = [result["tok_per_s"] for result in results if result["tok_per_s"] is not None]
    middle["tok_per_s"] = median(speeds) if speeds else None
    return middle


def _bench(words: Sequence[str]) -> dict[str, Any]:
    return result_of("bench", *words, "--repeat=1")
