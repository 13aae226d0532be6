"""The files of a batch: requests in one, a line each, and answers that grow in another. Knows no request's fields.

A line of OUT names the line of IN that it answers, by its number and a digest, so OUT alone says what is left to do: a
run that was killed goes on, a line that was half written is dropped and answered again, and an IN that was changed
meanwhile is noticed. In memory there are 16 bytes for each answer and 8 for each request.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from sluice.errors import InputError

SYNC_S = 1.0  # answers reach the disk after that long at the latest, should the machine lose power
MAX_ANSWER_BYTES = 1 << 30
_BLOCK = 1 << 16
_BEGINS = b'{"id": "batch_req_'  # how every answer does


@dataclass(frozen=True)
class Line:
    """A line of IN. `raw` is None where it is longer than may be read; `key` tells it from others, `digest` says what.

    `custom_id` is None where the line has none that can be used. Both hashes have 64 bits.
    """

    number: int
    raw: bytes | None
    custom_id: str | None
    key: int
    digest: int


def hash64(data: bytes) -> int:
    """64 bits of BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def key_of(custom_id: str | None, number: int) -> int:
    """What tells a line from others: its custom_id, or its number where it has none."""
    return hash64(f"line {number}".encode() if custom_id is None else b"id " + custom_id.encode("utf-8", "replace"))


class Requests:
    """IN, read line by line, as often as wanted. `n_lines` counts those that are not blank, once `check` has run."""

    def __init__(self, path: Path, max_line: int) -> None:
        self.path = path
        self.max_line = max_line
        self.n_lines = 0
        try:
            if not path.is_file():
                what = "not a regular file" if path.exists() else "no such file"
                raise InputError(f"{path}: {what}: name a file with one request a line")
            self._state = self._stat()
            path.open("rb").close()
        except OSError as error:
            raise InputError(f"{path}: can't be read ({error.strerror}): check the file") from None

    def _stat(self) -> tuple[int, int]:
        state = self.path.stat()
        return state.st_size, state.st_mtime_ns

    def check_unchanged(self) -> None:
        """Raise InputError where the file is no longer the one that was checked."""
        if self._stat() != self._state:
            raise InputError(f"{self.path}: was changed while it was read: run the same command again")

    def lines(self) -> Iterator[Line]:
        """Every line that is not blank."""
        with self.path.open("rb") as file:
            number = 0
            while raw := file.readline(self.max_line + 1):
                number += 1
                if len(raw) > self.max_line and not raw.endswith(b"\n"):
                    yield self._too_long(number, raw, file)
                elif raw.strip():
                    raw = raw.rstrip(b"\r\n")
                    custom_id = _custom_id(raw)
                    yield Line(number, raw, custom_id, key_of(custom_id, number), hash64(raw))

    def _too_long(self, number: int, begun: bytes, file: IO[bytes]) -> Line:
        digest = hashlib.blake2b(begun, digest_size=8)
        while piece := file.readline(_BLOCK):
            digest.update(piece)
            if piece.endswith(b"\n"):
                break
        return Line(number, None, None, key_of(None, number), int.from_bytes(digest.digest(), "little"))

    def check(self, answered: Answered, still: Callable[[], object] = lambda: None) -> int:
        """Look through all lines; how many are not answered yet. `still` is called for each, and may raise to end it.

        Raises InputError for a custom_id that is there twice, and where OUT answers what IN does not ask, or no longer.
        """
        keys, left, met = array("Q"), 0, 0
        for line in self.lines():
            still()
            keys.append(line.key)
            digest = answered.digest(line.key)
            left += digest is None
            met += digest is not None
            if digest is not None and digest != line.digest:
                raise InputError(
                    f"{self.path}: line {line.number} ({_called(line)}) is not what {answered.path} answers: IN was "
                    "changed, so name another OUT, or start over with --force"
                )
        self.n_lines = len(keys)
        self._check_distinct(keys)
        if met < len(answered):
            raise InputError(
                f"{answered.path}: answers {len(answered) - met} lines that {self.path} does not have: IN was changed, "
                "so name another OUT, or start over with --force"
            )
        self.check_unchanged()
        return left

    def _check_distinct(self, keys: array[int]) -> None:
        ordered = np.sort(np.frombuffer(keys, np.uint64)) if keys else np.empty(0, np.uint64)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if not len(twice):
            return
        key, first = int(twice[0]), None
        for line in self.lines():
            if line.key != key:
                continue
            if first is not None:
                raise InputError(
                    f"{self.path}: {_called(line)} is on line {first} and on line {line.number}: give each request its "
                    "own custom_id"
                )
            first = line.number


def _custom_id(raw: bytes) -> str | None:
    """A line's custom_id, None where it is no object with one that is a text (half a surrogate pair is none)."""
    with suppress(ValueError, RecursionError):
        value = json.loads(raw)
        if isinstance(value, dict) and isinstance(value.get("custom_id"), str):
            value["custom_id"].encode()
            return value["custom_id"]
    return None


def _called(line: Line) -> str:
    return "no custom_id" if line.custom_id is None else f"custom_id {line.custom_id[:100]!r}"


class Answered:
    """Which lines OUT has answers for."""

    def __init__(self, path: Path, keys: array[int], digests: array[int]) -> None:
        self.path = path
        every = np.frombuffer(keys, np.uint64) if keys else np.empty(0, np.uint64)
        order = np.argsort(every, kind="stable")
        self._keys = every[order]
        self._digests = (np.frombuffer(digests, np.uint64) if digests else np.empty(0, np.uint64))[order]
        if (self._keys[1:] == self._keys[:-1]).any():
            raise InputError(f"{path}: answers one line twice: it was written by something else, name another OUT")

    def __len__(self) -> int:
        return len(self._keys)

    def digest(self, key: int) -> int | None:
        """The digest of the line that was answered under `key`; None if there is no answer."""
        at = int(np.searchsorted(self._keys, np.uint64(key)))
        return int(self._digests[at]) if at < len(self._keys) and int(self._keys[at]) == key else None


class Answers:
    """OUT, held for one process alone; a context manager. `answered` is what it held when it was opened.

    `force`: whatever it holds is nothing, and is lost when the first answer is written, not before.
    """

    def __init__(self, path: Path, *, force: bool = False) -> None:
        self.path = path
        if path.is_dir() or not path.name or not path.parent.is_dir() or (path.exists() and not path.is_file()):
            raise InputError(f"{path}: can't be written: name a file, in a folder that exists")
        try:
            self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        except OSError as error:
            raise InputError(f"{path}: can't be written ({error.strerror}): name another place") from None
        try:
            _hold(self._file, path)
            self._overwritten = force
            self.answered = Answered(path, array("Q"), array("Q")) if force else self._scan()
        except BaseException:
            self._file.close()
            raise
        self._unsynced_since: float | None = None

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Bring what was written to the disk, and let others write. May be called again."""
        if not self._file.closed:
            with suppress(OSError):
                os.fsync(self._file.fileno())
            self._file.close()

    def append(self, answer: dict[str, Any], line: Line, now: float) -> None:
        """Write an answer to `line`, whole, at once; `now` is any clock's time in seconds."""
        named = {"line": line.number, "request": f"{line.digest:016x}"}
        raw = json.dumps(answer | {"sluice": named}, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if self._overwritten:
            self._file.truncate(0)
            self._overwritten = False
        view = memoryview(raw)
        while view:
            view = view[self._file.write(view) :]
        if self._unsynced_since is None:
            self._unsynced_since = now
        elif now - self._unsynced_since >= SYNC_S:
            os.fsync(self._file.fileno())
            self._unsynced_since = None

    def _scan(self) -> Answered:
        """What is there; a last line that is not whole is cut off."""
        keys, digests, end, number = array("Q"), array("Q"), 0, 0
        with self.path.open("rb") as file:
            while raw := file.readline(MAX_ANSWER_BYTES):
                if not raw.endswith(b"\n"):
                    if raw.strip(b"\0")[: len(_BEGINS)] != _BEGINS[: len(raw.strip(b"\0"))]:
                        raise self._foreign(number + 1)
                    break
                number += 1
                key, digest = self._named(raw, number)
                keys.append(key)
                digests.append(digest)
                end += len(raw)
        self._file.truncate(end)
        self._file.seek(end)
        return Answered(self.path, keys, digests)

    def _named(self, raw: bytes, number: int) -> tuple[int, int]:
        try:
            value = json.loads(raw)
            named, custom_id = value["sluice"], value["custom_id"]
            line, digest = named["line"], int(named["request"], 16)
            if not isinstance(line, int) or not 0 <= digest < 1 << 64 or not isinstance(custom_id, (str, type(None))):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._foreign(number) from None
        return key_of(custom_id, line), digest

    def _foreign(self, number: int) -> InputError:
        return InputError(
            f"{self.path}: line {number} is no answer of sluice batch: name another OUT, or overwrite it with --force"
        )


def _hold(file: Any, path: Path) -> None:
    """Keep other processes from writing to the same file. Where the system can't, nothing is done."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: another sluice batch is writing it: wait for it, or name another OUT") from None
    except OSError:  # a file system without locks
        return
