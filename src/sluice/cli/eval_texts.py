"""Reads the texts that `sluice eval` scores, whole and as they are. Knows no engine and no tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.errors import InputError

MAX_TEXT_BYTES = 16 << 20
MAX_NAME = 64
_WHAT = "Texts"


@dataclass(frozen=True)
class Text:
    """A text, and what says which it was."""

    text: str
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class TextOptions:
    """What to score."""

    text: Annotated[
        str | None,
        typer.Option("--text", metavar="FILE", help="A text, UTF-8.", rich_help_panel=_WHAT, show_default=False),
    ] = None
    domain: Annotated[
        list[str] | None,
        typer.Option("--domain", metavar="NAME=PATH", help="A text of a domain, reported by its name too. May be "
                     "repeated.", rich_help_panel=_WHAT, show_default=False),
    ] = None  # fmt: skip

    def texts(self) -> dict[str, Text]:
        """The texts by name; that of --text is "text". Raises InputError for none, and for what is no text."""
        found: dict[str, Text] = {}
        if self.text is not None:
            found["text"] = read_text(self.text)
        for given in self.domain or ():
            name, equals, path = given.partition("=")
            if not (name and equals and path) or len(name) > MAX_NAME:
                raise InputError(f"--domain {given[:80]!r} is not NAME=PATH: write it like code=code.txt")
            if name in found:
                raise InputError(f"--domain {name} is given twice: name each text once, and that of --text is text")
            found[name] = read_text(path)
        if not found:
            raise InputError("there is nothing to score: give --text FILE or --domain NAME=PATH")
        return found


def read_text(path: str) -> Text:
    """The text of a file, as it is. Raises InputError where that can't be read, or is empty, too long, or no text."""
    try:
        if not Path(path).is_file():
            what = "not a regular file" if Path(path).exists() else "no such file"
            raise InputError(f"{path}: {what}: check the path")
        with Path(path).open("rb") as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: can't be read ({why}): check the file") from None
    if len(raw) > MAX_TEXT_BYTES:
        raise InputError(f"{path}: is longer than {MAX_TEXT_BYTES >> 20} MiB: give a part of it")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8 text: convert it") from None
    if not text.strip():
        raise InputError(f"{path}: is empty: give it some text")
    return Text(text, {"path": path, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})
