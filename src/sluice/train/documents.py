"""Reads documents out of text files, .jsonl files and folders of them. Knows no tokens and no domains."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from sluice.errors import InputError
from sluice.text.vocabulary import replace_surrogates

MAX_DOCUMENT = 1 << 26  # characters, or bytes of a file that is one document: it is held in memory whole


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files that `paths` name, in order; a folder stands for every file in it and below, by name.

    Names that begin with a dot are passed over in folders. Raises InputError for what is no file or folder, and for a
    folder that holds none.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_file():
            found.append(path)
            continue
        if not path.is_dir():
            raise InputError(f"{path}: no such file or folder: check the path")
        inside = [each for each in sorted(path.rglob("*")) if each.is_file() and not _hidden(each, path)]
        if not inside:
            raise InputError(f"{path}: the folder holds no file: put text into it, or name another")
        found += inside
    return found


def read_documents(file: Path) -> Iterator[str]:
    """The documents of `file` that hold more than white space.

    A .jsonl file has one a line, an object with the document as "text"; any other file is one document. Lines end
    with \\n, lone surrogates are U+FFFD. Raises InputError, naming file and line, for what is no UTF-8, no such object,
    or longer than MAX_DOCUMENT.
    """
    try:
        yield from _read_jsonl(file) if file.suffix == ".jsonl" else _read_whole(file)
    except UnicodeDecodeError:
        raise InputError(f"{file}: is not UTF-8 text: convert it, or leave it out") from None
    except OSError as error:
        raise InputError(f"{file}: can't be read ({error.strerror}): check its permissions") from None


def _hidden(path: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(below).parts)


def _read_whole(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8-sig") as opened:
        text = opened.read(MAX_DOCUMENT + 1)
    if len(text) > MAX_DOCUMENT:
        raise InputError(f"{file}: a document of more than {MAX_DOCUMENT >> 20} Mi characters: cut it into several")
    if not text.isspace() and text:
        yield text


def _read_jsonl(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8-sig") as opened:
        number = 0
        while line := opened.readline(MAX_DOCUMENT + 1):
            number += 1
            if len(line) > MAX_DOCUMENT:
                raise InputError(
                    f"{file}: line {number} has more than {MAX_DOCUMENT >> 20} Mi characters: cut its document into "
                    "several"
                )
            if line.isspace():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, LookupError, TypeError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise InputError(f'{file}: line {number} is no object with a document as "text": write it as JSON')
            text = replace_surrogates(text)
            if text and not text.isspace():
                yield text
