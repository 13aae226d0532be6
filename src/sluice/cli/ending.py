"""Runs the command line, and turns errors and signals into exit codes and one line each; knows no command."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from sluice.cli.signals import Terminated, raising
from sluice.cli.terminal import note
from sluice.errors import InputError, SluiceError

COMMANDS = (
    *("run", "chat", "serve", "batch", "bench", "inspect", "pack", "doctor", "trace", "simulate", "plan", "eval"),
    *("gate", "prerouter", "lora", "train", "tune"),
)
EXIT_FAILED, EXIT_INPUT = 1, 2


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that `words` (by default the process's arguments) name; returns the exit code.

    0: done. 2: what the user gave is at fault. 130 and 143: ended by SIGINT and SIGTERM. 1: anything else, a closed
    stdout included. An error is one line on stderr; SLUICE_DEBUG in the environment adds the traceback.
    """
    _fill_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that can't show a character gets a question mark
    given = list(sys.argv[1:] if words is None else words)
    try:
        with raising():
            code = _dispatch(given)
            sys.stdout.flush()
            return code
    except BaseException as error:
        if os.environ.get("SLUICE_DEBUG"):
            traceback.print_exc()
        return _report(error, given)


def _fill_closed_streams() -> None:
    """Give standard streams that were closed before the start a file, or the next file opened would get their number.

    A closed stdin is empty, a closed stderr swallows everything, and writing to a closed stdout still fails.
    """
    for name, mode, flags in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, encoding="utf-8"))


def _dispatch(words: list[str]) -> int:
    from sluice.cli.app import app  # here, so that a Ctrl-C while it is imported is an end like any other

    result = app(words, prog_name="sluice", standalone_mode=False)
    return result if isinstance(result, int) else 0


def _report(error: BaseException, words: list[str]) -> int:
    """Say what went wrong, in one line; the exit code."""
    if isinstance(error, BrokenPipeError):
        _discard_stdout()
        return EXIT_FAILED
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, Terminated):
        return 128 + error.number
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_FAILED
    if hasattr(error, "format_message"):  # a usage error of the parser, whichever copy of click typer uses
        command = f"sluice {words[0]}" if words and words[0] in COMMANDS else "sluice"
        said = error.format_message().strip().removesuffix(".")  # type: ignore[attr-defined]
        note(f"{command}: {said}; see {command} --help")
        return EXIT_INPUT
    if isinstance(error, InputError):
        note(f"sluice: {error}")
        return EXIT_INPUT
    if isinstance(error, SluiceError):
        note(f"sluice: {error}")
    elif isinstance(error, MemoryError):
        note("sluice: out of memory: give a smaller --ram or --ctx, or close other programs")
    elif isinstance(error, OSError):
        _discard_stdout()
        note(f"sluice: {error}: check the disk and where the output goes")
    else:
        note(
            f"sluice: internal error ({type(error).__name__}: {error}): set SLUICE_DEBUG=1 to see where, and report it"
        )
    return EXIT_FAILED


def _discard_stdout() -> None:
    """Point stdout at nothing, so that flushing what is left in it at exit can't fail again."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
