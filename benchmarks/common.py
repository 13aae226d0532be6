"""What the benchmarks share: progress, JSON, arms in processes of their own, medians, verdicts. Measures nothing.

An *arm* is one configuration of Sluice or its peer; each runs in a process of its own, which prints a JSON object a
line. A *row* is one claim: the figure measured, its bar, and whether it holds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from machine import MemoryCap, UnavailableError

from sluice.config import parse_size, usable_cores
from sluice.errors import SluiceError

HERE = Path(__file__).resolve().parent
EVERY_SLOT = 1 << 20  # more than any model has experts
WORKER = "--worker"  # marks the process in which an arm does its work; its parent has set the machine up

Json = dict[str, Any]


def log(text: str) -> None:
    """A line of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def emit(value: Json) -> None:
    """A line of JSON, on stdout."""
    print(json.dumps(value, default=str), flush=True)


def run_main(main: Callable[[], None]) -> NoReturn:
    """Run a benchmark's main; foreseeable failures end in one line on stderr. SIGTERM cleans up like Ctrl-C."""

    def ended(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, ended)
    try:
        main()
    except (SluiceError, UnavailableError) as error:
        log(f"{Path(sys.argv[0]).name}: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit's flush has somewhere to go
        sys.exit(1)
    sys.exit(0)


def rerun_as_worker(cap: str | None, *more: str) -> None:
    """Run this very command again, with `more`, as a worker; within a memory cgroup of the size `cap` if given.

    The parent thus outlives whatever happens to the measured process, and restores the machine.
    """
    command = [sys.executable, *sys.argv, *more, WORKER]
    if cap is None:
        _finish(subprocess.Popen(command))
        return
    with MemoryCap(parse_size(cap)) as group:
        _finish(subprocess.Popen(command, preexec_fn=group.join))


def _finish(child: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Wait for a child; whatever ends the wait early ends the child too. Exits with its status unless that is 0."""
    try:
        status = child.wait()
    except BaseException:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
    if status == -9:  # SIGKILL
        raise UnavailableError(
            "the measured process was killed, most likely for want of memory: give it more, or free some"
        )
    if status:
        raise SystemExit(status if status > 0 else 128 - status)


def arm(script: str, *arguments: object) -> list[Json]:
    """Run a script of this folder as a process of its own: the JSON objects that it prints, one a line.

    None among `arguments` is left out. Exits with its status, its own message on stderr, if it fails.
    """
    words = [str(word) for word in arguments if word is not None]
    log(f"+ {script} {' '.join(words)}")
    child = subprocess.Popen([sys.executable, str(HERE / script), *words], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        lines = [json.loads(line) for line in child.stdout]
    except BaseException:
        child.terminate()
        child.wait()
        raise
    _finish(child)
    return lines


def sluice(*words: object) -> list[str]:
    """Run a command of Sluice in a process of its own: the lines that it prints. Exits with its status if it fails."""
    text = [str(word) for word in words]
    log(f"+ sluice {' '.join(text)}")
    child = subprocess.Popen([sys.executable, "-m", "sluice", *text], stdout=subprocess.PIPE, text=True)
    out, _ = child.communicate()
    if child.returncode:
        raise SystemExit(child.returncode if child.returncode > 0 else 128 - child.returncode)
    return out.splitlines()


def resident_speed(model: Path, *flags: object) -> float:
    """Tokens a second of `sluice bench` with everything resident: a text's second time in one process.

    The pool is as large as the model, so that needs memory for what the text uses; prefetching is `flags`'s business.
    """
    one = json.loads(sluice("bench", model, "--expert-slots", EVERY_SLOT, "--repeat", 2, "--json", *flags)[-1])
    second = one["repeats"][1]
    if second["ledger"]["decode"]["bytes_read"]:
        raise SystemExit("the second time something was read")
    return second["tok_per_s"]


def flag(name: str, value: object) -> list[object]:
    """`[name, value]` for an arm's command line; nothing for None and False, `[name]` for True."""
    if value is None or value is False:
        return []
    return [name] if value is True else [name, value]


# --- figures


def middle(values: Sequence[float | None]) -> float | None:
    """The median; None if any value was not measured, or there is none."""
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers and len(numbers) == len(values) else None


def ratio(a: float | None, b: float | None) -> float | None:
    """a ÷ b; None where one was not measured or b is 0."""
    return a / b if a is not None and b else None


def row(
    name: str, value: float | None, *, at_least: float | None = None, at_most: float | None = None, n: int | None = None
) -> Json:  # fmt: skip
    """A claim, from `n` repeats, with its verdict: "pass", "fail" or "not measured"; "reported" without a bar."""
    if value is None:
        verdict = "not measured"
    elif at_least is None and at_most is None:
        verdict = "reported"
    else:
        low = at_least is None or value >= at_least
        verdict = "pass" if low and (at_most is None or value <= at_most) else "fail"
    bar = {"at_least": at_least, "at_most": at_most}
    return {"row": name, "value": value, "n": n, **{k: v for k, v in bar.items() if v is not None}, "verdict": verdict}


def report(benchmark: str, rows: Sequence[Json], settings: Json, raw: Json) -> None:
    """Show the verdicts on stderr and print everything as the last line of stdout."""
    for one in rows:
        bars = [f"{word} {one[key]:g}" for key, word in (("at_least", "≥"), ("at_most", "≤")) if key in one]
        value = "–" if one["value"] is None else f"{one['value']:.4g}"
        notes = bars + ([] if one["n"] is None else [f"n = {one['n']}"])
        log(f"{one['verdict']:>12}  {one['row']}: {value}{' (' + ', '.join(notes) + ')' if notes else ''}")
    emit({"benchmark": benchmark, "settings": settings, "rows": list(rows), "raw": raw})


def thread_counts(text: str | None) -> list[int]:
    """Thread counts to try, as "1,2"; by default powers of two up to this machine's cores, and all cores."""
    if text is not None:
        return [int(word) for word in text.split(",")]
    cores = usable_cores()
    return sorted({1 << i for i in range(cores.bit_length()) if 1 << i <= cores} | {cores})
