"""Runs commands of ours in processes of their own; knows no flags."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from sluice.cli.terminal import one_line
from sluice.errors import InputError, SluiceError


def result_of(*words: str) -> dict[str, Any]:
    """The JSON object of a command. Raises what it said if it failed."""
    command = [sys.executable, "-m", "sluice", *words, "--json"]
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
