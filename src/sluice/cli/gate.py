"""`sluice gate`: records what an experiment must reach, and holds its results against it. It measures nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.options import Json
from sluice.cli.terminal import emit, note, one_line, print_table
from sluice.errors import InputError

if TYPE_CHECKING:
    from sluice.lab.gate_check import Outcome, Verdict
    from sluice.lab.gates import Gate, Registration

File = Annotated[Path, typer.Argument(metavar="FILE", help="The gate, a TOML file.")]
Results = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[RESULTS...]", help="What commands printed with --json.", show_default=False),
]
Record = Annotated[bool, typer.Option("--record", metavar="", help="Record the gate, before the experiment.")]
EXIT_FAILED = 1


def gate(file: File, results: Results = None, record: Record = False, json: Json = False) -> int:
    """Hold results against a gate that was recorded before the experiment: passed, or FAILED.

    --record writes the gate's hash and the date to FILE.recorded.json, once: a gate that changes afterwards can't pass
    and can't be recorded again. Commit both files before the run.

    A gate passes if it is recorded and unchanged, its datasets are those that it names, and each of its metrics,
    benefits and costs, reaches its threshold. What was not measured has failed. Exit code 0: passed, or recorded.
    1: failed. 2: the input is at fault.
    """
    from sluice.lab import gates
    from sluice.lab.gate_check import check, read_results

    read = gates.read_gate(file)
    if record:
        if results:
            raise InputError("--record is for before the experiment: leave out the results")
        known = gates.record(read)
        if json:
            emit(_facts(read, known))
        else:
            print(one_line(f"{file}: {read.name}: recorded on {known.recorded}, SHA-256 {known.sha256}"))
        return 0
    given: dict[str, Any] = {}
    for path in results or ():
        if path.name in given:
            raise InputError(f"two files of results are named {path.name}: give each a name of its own")
        given[path.name] = read_results(path)
    known = gates.registration(read)
    verdict = check(read, known, given, gates.dataset_faults(read))
    if json:
        emit(_facts(read, known) | _outcomes(verdict))
    else:
        _show(read, known, verdict)
    for fault in verdict.faults:
        note(f"FAILED: {fault}")
    for path in results or ():
        if known.recorded and _written(path) < datetime.fromisoformat(known.recorded):
            note(f"warning: {path} is older than the gate's record: it was measured before the gate was written down")
    if verdict.unstated:
        note(f"not stated, so not checked: which dataset and seed {', '.join(verdict.unstated)} came from")
    return 0 if verdict.passed else EXIT_FAILED


def _written(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


def _facts(gate: Gate, known: Registration) -> dict[str, Any]:
    return {
        "gate": gate.name,
        "description": gate.description,
        "seed": gate.seed,
        "datasets": [{"file": dataset.file, "sha256": dataset.sha256} for dataset in gate.datasets],
        "sha256": gate.sha256,
        "registration": {"state": known.state, "recorded": known.recorded, "sha256": known.sha256},
    }


def _outcomes(verdict: Verdict) -> dict[str, Any]:
    return {
        "metrics": [
            {
                "name": outcome.metric.name,
                "side": outcome.metric.side,
                "path": outcome.metric.path,
                "baseline": outcome.metric.baseline,
                "value": outcome.value,
                "direction": outcome.metric.direction,
                "threshold": outcome.metric.threshold,
                "passed": outcome.passed,
                "why": outcome.why,
            }
            for outcome in verdict.outcomes
        ],
        "faults": list(verdict.faults),
        "unstated": list(verdict.unstated),
        "passed": verdict.passed,
    }


def _show(gate: Gate, known: Registration, verdict: Verdict) -> None:
    when = f"recorded on {known.recorded}" if known.state == "recorded" else known.state.upper()
    heads = ["metric", "side", "measured", "must be", "verdict"]
    print_table(heads, [_row(outcome) for outcome in verdict.outcomes], title=one_line(f"{gate.name}, {when}"))
    reached = sum(outcome.passed for outcome in verdict.outcomes)
    of = f"{reached} of {len(verdict.outcomes)} metrics reached"
    print(one_line(f"{gate.name}: {'passed' if verdict.passed else 'FAILED'}, {of}"))


def _row(outcome: Outcome) -> list[str]:
    metric = outcome.metric
    measured = f"not measured ({outcome.why})" if outcome.value is None else f"{outcome.value:.6g}"
    relative = "" if metric.baseline is None else ", relative"
    return [
        f"{metric.name}{relative}",
        metric.side,
        measured,
        f"{metric.direction} {metric.threshold:.6g}",
        "passed" if outcome.passed else "FAILED",
    ]
