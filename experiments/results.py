"""Writes docs/results.md from what the runs left: verdicts, a section a question, figures, compute. Measures nothing.

What was not run is said to be not run.
"""

from __future__ import annotations

from pathlib import Path

import figures
import sections
from measures import gathered
from page import NOT_RUN, percent, prose, rows, section
from parts import CAPACITY
from runner import Run, Work, keep, write_json

from sluice.lab.gate_check import Verdict, check
from sluice.lab.gates import read_gate, registration


def write_results(work: Work, runs: dict[str, Run], gates: Path, docs: Path) -> None:
    """WORK/gates.json, docs/results.md and docs/figures/experiment-*.png; results are kept where `work` says."""
    keep(work, runs)
    numbers = gathered(work)
    work.folder.mkdir(parents=True, exist_ok=True)
    write_json(work.folder / "gates.json", numbers)
    gate = read_gate(gates)
    known = registration(gate)
    verdict = check(gate, known, {"gates.json": numbers})
    drawn = figures.draw(work, docs / "figures")
    parts = [
        _head(known.recorded),
        _verdicts(verdict),
        sections.base(work),
        sections.locality(work, numbers),
        sections.domain(work, numbers),
        sections.stack(work, numbers),
        *(part(work) for part in sections.SECTIONS),
        _compute(work, runs),
    ]
    text = "\n\n".join(parts)
    for name in figures.FIGURES:
        title, file = drawn.get(name, ("", None))
        place = "" if file is None else f"![{title}](figures/{file.name})\n\n"
        text = text.replace(f"<!-- {name} -->\n\n", place).replace(f"<!-- {name} -->", place.strip())
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "results.md").write_text("\n\n".join(part for part in text.split("\n\n") if part) + "\n", encoding="utf-8")


def _head(recorded: str | None) -> str:
    about = """Models of a few million parameters, trained on four domains of text (code, mathematics, medicine,
        prose), on processor cores alone. `make experiments` runs all of it again; this page is written by `python
        experiments/run.py results`."""
    measures = f"""Misses are those of LRU with {CAPACITY:.1%} of all experts in slots, decoding held-out passages
        of the domains one after the other, a token a step. Perplexity is exp of the mean over domains of a domain's
        mean loss on the same passages. Changes are to the base model of the same seed, which began with the same
        numbers and saw the same rows in the same order. Where there are several seeds: their mean, with one-sided
        95 % bounds (Student's t) in brackets. The gates (`experiments/gates.toml`) were
        {"recorded on " + recorded if recorded else "NOT recorded"}."""
    return f"# Results of the reference experiment\n\n{prose(about)}\n\n{prose(measures)}"


def _verdicts(verdict: Verdict) -> str:
    outcomes = sorted(verdict.outcomes, key=lambda one: one.metric.name.partition(":")[0])
    passed: dict[str, bool] = {}
    for outcome in outcomes:
        question = outcome.metric.name.partition(":")[0]
        passed[question] = passed.get(question, True) and outcome.passed and not verdict.faults
    body = [
        [
            one.metric.name,
            NOT_RUN if one.value is None else percent(one.value, 2),
            f"{'≥' if one.metric.direction == '>=' else '≤'} {percent(one.metric.threshold)}",
            "passed" if one.passed else "**FAILED**",
        ]
        for one in outcomes
    ]
    return section(
        "Verdicts",
        "**" + ", ".join(f"{name} {'PASSED' if good else 'FAILED'}" for name, good in passed.items()) + ".**",
        *(f"**{fault}**" for fault in verdict.faults),
        rows(["metric", "bound", "must be", "verdict"], body),
        prose("""The bound is that of the unfavourable side, over paired seeds. With fewer than two seeds there is
        none, and the metric has failed."""),
    )


def _compute(work: Work, runs: dict[str, Run]) -> str:
    spent = {name: work.spent_s(name) for name in runs}
    results = {name: result for name in runs if (result := work.result(name)) is not None}
    left = [name for name in runs if name not in results]
    body = [
        [name, f"{seconds / 60:.1f}", "done" if name in results else "not finished"]
        for name, seconds in spent.items() if seconds
    ]  # fmt: skip
    ran_on = [result["machine"] for result in results.values()]
    machines = sorted({f"{one['cores']} cores of {one.get('model') or one['processor']}" for one in ran_on})
    return section(
        "Compute",
        f"{sum(spent.values()) / 3600:.2f} hours in all, attempts that were cut short included"
        + (f"; on {' or '.join(machines)}." if machines else "."),
        rows(["run", "minutes", ""], body),
        prose(f"Not run: {', '.join(left)}.") if left else "",
    )
