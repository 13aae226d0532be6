"""Runs the reference experiment, one resumable run at a time, and writes down what came of it.

    python experiments/run.py list                    what there is, what is done, what is next
    python experiments/run.py NAME [NAME …]           do these; one that was cut short goes on where it was
    python experiments/run.py next                    the first that can be done
    python experiments/run.py all                     all, one after the other
    python experiments/run.py results                 WORK/gates.json, and docs/results.md with its figures, of these
                                                      results and of those that are kept from other work folders

Every run is planned to take at most half an hour on 2 cores. WORK is --work, build/experiments by default. The gates
must have been recorded (`sluice gate experiments/gates.toml --record`) before anything is run. Ctrl-C ends a run in
good order.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from recipes import SIZES
from results import write_results
from runner import Run, RunError, Work, execute
from runs import table

from sluice.lab.gates import read_gate, registration

HERE = Path(__file__).resolve().parent
GATES = HERE / "gates.toml"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: done. 1: a run failed. 2: it can't be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="runs, or list, next, all, results")
    parser.add_argument("--work", type=Path, default=HERE.parent / "build" / "experiments", help="the folder of runs")
    parser.add_argument("--size", choices=sorted(SIZES), default="reference")
    parser.add_argument("--text", action="append", metavar="DOMAIN=PATH", help="this text instead of the packages'")
    parser.add_argument("--gates", type=Path, default=GATES, help="the gates' file")
    parser.add_argument("--kept", type=Path, help="results of all work folders (experiments/kept; none for --text)")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs", help="where results.md goes")
    given = parser.parse_args(arguments)
    texts = None if given.text is None else dict(one.split("=", 1) for one in given.text)
    work = Work(given.work.resolve())
    try:
        return _do(work, table(SIZES[given.size], texts), given)
    except RunError as error:
        log(f"run.py: {error}")
        return 1


def _do(work: Work, runs: dict[str, Run], given: argparse.Namespace) -> int:
    match given.names:
        case ["list"]:
            _list(work, runs)
            return 0
        case ["results"]:
            kept = given.kept or (HERE / "kept" if given.text is None and given.size == "reference" else None)
            write_results(replace(work, kept=kept), runs, given.gates, given.docs)
            return 0
    gate = read_gate(given.gates)
    if (state := registration(gate).state) != "recorded":
        log(f"run.py: the gates are {state}: record them first with `sluice gate {given.gates} --record`")
        return 2
    _keep_size(work, given)
    if given.names in (["next"], ["all"]):
        while (run := _next(work, runs)) is not None:
            execute(work, run, log=log)
            if given.names == ["next"]:
                return 0
        log("run.py: all runs are done" if given.names == ["all"] else "run.py: there is nothing left to run")
        return 0
    if unknown := [name for name in given.names if name not in runs]:
        log(f"run.py: there is no run {unknown[0]!r}: choose from {', '.join(runs)}")
        return 2
    for name in given.names:
        result = execute(work, runs[name], log=log)
        log(f"{name}: done, {result['elapsed_s']:.0f} s")
    return 0


def _next(work: Work, runs: dict[str, Run]) -> Run | None:
    """What was begun, else the first that is ready."""
    states = {name: work.state(run) for name, run in runs.items()}
    for wanted in ("begun", "ready"):
        for name, state in states.items():
            if state == wanted:
                return runs[name]
    return None


def _list(work: Work, runs: dict[str, Run]) -> None:
    left = 0.0
    for name, run in runs.items():
        state = work.state(run)
        left += 0 if state == "done" else run.minutes
        spent = work.spent_s(name) / 60
        waits = state if len(state) < 40 else state[:37] + "…"
        print(f"{name:14} {waits:40} {spent:6.1f} of ~{run.minutes:g} min  {run.about}")
    print(f"about {left / 60:.1f} hours are left")


def _keep_size(work: Work, given: argparse.Namespace) -> None:
    """Write down what a work folder is for, and refuse another size or other text there."""
    path = work.folder / "work.json"
    asked = {"size": given.size, "text": given.text}
    if path.is_file():
        if (known := json.loads(path.read_text(encoding="utf-8"))) != asked:
            raise RunError(f"{work.folder} is of other runs ({known}): give another folder with --work")
        return
    work.folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asked) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
