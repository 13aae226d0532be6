"""Runs commands as processes of their own, and says what a command left behind; knows no expected values."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

FAST = ["--threads", "1", "--expert-slots", "12"]  # of 24 experts: some are read again and again


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


Cli = Callable[..., Outcome]


def process(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Starts a command as a process of its own, with pipes."""
    pipe = subprocess.PIPE
    options = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "encoding": "utf-8"} | options
    return subprocess.Popen([sys.executable, "-m", "sluice", *(str(word) for word in words)], **options)


def finished(words: Sequence[object], **options: Any) -> Outcome:
    """Runs a command as a process of its own, to its end."""
    given = options.pop("input", None)
    if given is not None:
        options["stdin"] = subprocess.PIPE
    with process(*words, **options) as child:
        out, err = child.communicate(given, timeout=300)
        return Outcome(child.returncode, out, err)
