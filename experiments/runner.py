"""Runs an experiment's parts one at a time, each of commands in processes of their own. Knows none of their business.

A run has a folder, WORK/runs/NAME. Each of its steps leaves NN-STEP.json there when it is done: its words, its time
over all attempts, and what it printed with --json. A step that was cut short is started again; commands that train go
on from their own checkpoints. When all steps are done, result.json appears. Paths in words are relative to WORK, where
commands run, so a work folder may be moved. Models and checkpoints are large and stay in WORK; results are small, and
`keep` copies them to a folder that outlives it.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
MAX_SAID = 160  # characters of a command that are shown; the log has all
RESULT, ATTEMPTS, LOG = "result.json", "attempts.jsonl", "log.txt"


class RunError(Exception):
    """What keeps a run from being done, in one line."""


@dataclass(frozen=True)
class Step:
    """A command. `words` begin with "sluice" or the name of a script beside this one.

    `compute`: made of earlier steps' results by Python instead; then `words` only say what it is.
    """

    name: str
    words: tuple[str, ...]
    compute: Callable[[Mapping[str, Json]], Json] | None = None


@dataclass(frozen=True)
class Run:
    """A part of an experiment. `steps` are asked for when what it needs is done, whose results they may read."""

    name: str
    about: str
    needs: tuple[str, ...]
    steps: Callable[[Work], Sequence[Step]]
    minutes: float  # about, on 2 cores


@dataclass(frozen=True)
class Work:
    """A folder of runs. `kept`: where results are looked up that it doesn't have; None where files are wanted too."""

    folder: Path
    kept: Path | None = None

    def at(self, name: str) -> Path:
        """A run's folder."""
        return self.folder / "runs" / name

    def result(self, name: str) -> Json | None:
        """What a run came to; None if it isn't done."""
        path = self.at(name) / RESULT
        if not path.is_file() and self.kept is not None:
            path = self.kept / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def step(self, run: str, step: str) -> Json:
        """What a step of a run that is done printed. Raises RunError."""
        result = self.result(run)
        if result is None or step not in result["steps"]:
            raise RunError(f"{run} has no result of {step} yet: run it first")
        return result["steps"][step]["result"]

    def spent_s(self, name: str, step: str | None = None) -> float:
        """Seconds that attempts at a run, or at one step of it, took, those that failed too."""
        path = self.at(name) / ATTEMPTS
        if not path.is_file() and self.kept is not None and step is None:
            return (self.result(name) or {"elapsed_s": 0.0})["elapsed_s"]
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        attempts = [json.loads(line) for line in lines]
        return sum(each["elapsed_s"] for each in attempts if step in (None, each["step"]))

    def training(self, name: str) -> list[tuple[int, float]]:
        """Tokens and cross entropy by the way, of a run that trained a language model; empty for others."""
        path = self.at(name) / "train" / "metrics.jsonl"
        if not path.is_file():
            known = None if self.kept is None else self.result(name)
            return [] if known is None else known.get("training", [])
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [(line["tokens"], round(line["cross_entropy"], 4)) for line in lines if "cross_entropy" in line]

    def last_words(self, name: str) -> str | None:
        """What a run that was begun and isn't done said last; None for others."""
        if self.result(name) is not None or not (path := self.at(name) / LOG).is_file():
            return None
        said = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return said[-1].removeprefix("sluice: ") if said else "nothing"

    def state(self, run: Run) -> str:
        """ "done", "begun", "ready", or what it waits for."""
        if self.result(run.name) is not None:
            return "done"
        waits = [name for name in run.needs if self.result(name) is None]
        if waits:
            return "needs " + ", ".join(waits)
        return "begun" if self.at(run.name).is_dir() else "ready"


def keep(work: Work, names: Iterable[str]) -> None:
    """Write results of runs, as far as they are done, to `work.kept`, with what training said by the way."""
    if work.kept is None:
        return
    work.kept.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (work.at(name) / RESULT).is_file():
            write_json(work.kept / f"{name}.json", {**(work.result(name) or {}), "training": work.training(name)})


def execute(work: Work, run: Run, *, log: Callable[[str], None]) -> Json:
    """Do what is left of a run; its result. Raises RunError where a step fails, or what it needs isn't done."""
    if (known := work.result(run.name)) is not None:
        return known
    if (state := work.state(run)).startswith("needs"):
        raise RunError(f"{run.name} {state}: run that first")
    steps = run.steps(work)
    folder = work.at(run.name)
    folder.mkdir(parents=True, exist_ok=True)
    done: dict[str, Json] = {}
    for i, step in enumerate(steps):
        path = folder / f"{i:02d}-{step.name}.json"
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["words"] != list(step.words):
                raise RunError(
                    f"{path} is of another command ({shlex.join(found['words'])[:200]}): move {folder} away to run anew"
                )
            done[step.name] = found
            continue
        said = shlex.join(step.words)
        log(f"{run.name}: {said if len(said) <= MAX_SAID else said[:MAX_SAID] + '…'}")
        began = time.time()
        if step.compute is not None:
            result: Json | None = step.compute({name: each["result"] for name, each in done.items()})
        else:
            result = _command(work, folder, step, log)
        spent = work.spent_s(run.name, step.name) or time.time() - began
        done[step.name] = {"words": list(step.words), "elapsed_s": spent, "result": result}
        write_json(path, done[step.name])
    whole = {
        "run": run.name,
        "about": run.about,
        "machine": machine(),
        "elapsed_s": work.spent_s(run.name),
        "steps": done,
    }
    write_json(folder / RESULT, whole)
    return whole


def _command(work: Work, folder: Path, step: Step, log: Callable[[str], None]) -> Json | None:
    """Run it; the JSON that is its last line on stdout, None where that is none. Its stderr goes to the log and on."""
    program = ["-m", "sluice"] if step.words[0] == "sluice" else [str(Path(__file__).parent / step.words[0])]
    began = time.time()
    with (folder / LOG).open("ab") as errors:
        errors.write(f"+ {shlex.join(step.words)}\n".encode())
        errors.flush()
        child = subprocess.Popen(
            [sys.executable, *program, *step.words[1:]], cwd=work.folder, stdout=subprocess.PIPE, stderr=errors,
            text=True, start_new_session=True,  # a Ctrl-C in the terminal reaches it once, from here
        )  # fmt: skip
        try:
            with _passed_on(child):
                out, _ = child.communicate()
        finally:
            line = {"step": step.name, "began": began, "elapsed_s": time.time() - began, "status": child.returncode}
            with (folder / ATTEMPTS).open("a", encoding="utf-8") as attempts:
                attempts.write(json.dumps(line) + "\n")
    if child.returncode:
        said = (folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RunError(f"{shlex.join(step.words)} ended with {child.returncode}: {said[-1] if said else 'no message'}")
    try:
        result = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return result if isinstance(result, dict) else None


@contextmanager
def _passed_on(child: subprocess.Popen[str]) -> Iterator[None]:
    """While it lasts, SIGINT and SIGTERM go to the child, which saves what it has and ends by itself."""

    def passed(number: int, frame: object) -> None:
        if child.poll() is None:
            child.send_signal(number)

    before = {number: signal.signal(number, passed) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_json(path: Path, value: Json) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def machine() -> Json:
    """What the runs ran on, without names of hosts. Other processors round otherwise, and training follows that."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": platform.system(), "processor": platform.machine(), "model": next(iter(models), platform.processor()),
        "cores": os.cpu_count(), "python": platform.python_version(),
    }  # fmt: skip
