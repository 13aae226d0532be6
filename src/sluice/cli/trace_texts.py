"""Reads what a trace is recorded of: prompts line by line, texts in pieces. Knows no engine and no tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.errors import InputError

MAX_LINE = 1 << 20  # characters of a prompt's line, and by which a piece of text may be longer to end with its line
PIECE = 1 << 20  # characters
MAX_LABEL = 64


@dataclass(frozen=True)
class Source:
    """A file of prompts, or of text, and the label that its rows get."""

    path: Path
    prompts: bool
    domain: str | None = None

    def lines(self) -> Iterator[tuple[int, str]]:
        """The prompts of a file of prompts, each with its line's number. Raises InputError for a line that is none."""
        as_json = self.path.suffix == ".jsonl"
        with self.path.open(encoding="utf-8") as file:
            number = 0
            while line := self._read(lambda: file.readline(MAX_LINE + 1)):
                number += 1
                if len(line) > MAX_LINE:
                    raise InputError(
                        f"{self.path}: line {number}: is longer than {MAX_LINE >> 20} MiB: give it as --text"
                    )
                if text := line.strip():
                    yield number, self._prompt(number, text) if as_json else text

    def _prompt(self, number: int, text: str) -> str:
        try:
            prompt = json.loads(text)["prompt"]
        except (ValueError, LookupError, TypeError, RecursionError):
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            raise InputError(f'{self.path}: line {number}: is no object with a text as "prompt"')
        return prompt

    def pieces(self) -> Iterator[str]:
        """A text, cut at ends of lines where it has some. Raises InputError for what is no text."""
        with self.path.open(encoding="utf-8") as file:
            while piece := self._read(lambda: file.read(PIECE) + file.readline(MAX_LINE)):
                yield piece

    def _read(self, read: object) -> str:
        try:
            return read()  # type: ignore[operator]
        except UnicodeDecodeError:
            raise InputError(f"{self.path}: is not UTF-8 text: convert it") from None

    def check(self) -> None:
        """Read the file through. Raises InputError where it is missing, or holds nothing to record."""
        if not self.path.is_file():
            what = "not a regular file" if self.path.exists() else "no such file"
            raise InputError(f"{self.path}: {what}: check the path")
        try:
            n = sum(1 for _ in (self.lines() if self.prompts else self.pieces()))
        except OSError as error:
            raise InputError(f"{self.path}: can't be read ({error.strerror}): check its permissions") from None
        if not n:
            raise InputError(f"{self.path}: is empty: give it {'a prompt a line' if self.prompts else 'some text'}")


def sources(prompts: Sequence[str] | None, texts: Sequence[str] | None, domains: Sequence[str] | None) -> list[Source]:
    """What --prompts, --text and --domain name, checked. Raises InputError."""
    found = [Source(Path(path), True) for path in prompts or ()] + [Source(Path(path), False) for path in texts or ()]
    for given in domains or ():
        name, equals, path = given.partition("=")
        if not (name and equals and path) or len(name) > MAX_LABEL:
            raise InputError(f"--domain {given[:80]!r} is not NAME=PATH: write it like code=code.txt")
        found.append(Source(Path(path), Path(path).suffix == ".jsonl", name))
    if not found:
        raise InputError("there is nothing to record: give --prompts FILE, --text FILE or --domain NAME=PATH")
    for source in found:
        source.check()
    return found
