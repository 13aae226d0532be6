"""Writes files that appear whole or not at all, and says before the work where one can't be. Knows no format."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sluice.errors import InputError


def check_out(path: str | Path, *, force: bool, keep: Sequence[Path] = (), made: str = "the new file") -> None:
    """Raise InputError where `made` can't be written to `path`. `keep` are files that are never overwritten."""
    path = Path(path)
    if not path.name or path.is_dir():
        raise InputError(f"{path}: a directory names no file: name the file to write")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no directory {path.parent}: make it first")
    if path.exists() and not path.is_file():  # a device, say, which the new file would take the place of
        raise InputError(f"{path}: not a regular file: name the file to write")
    if path.exists() and any(path.samefile(other) for other in keep if other.exists()):
        raise InputError(f"{path}: is what {made} is made from: name another file to write")
    if os.path.lexists(path) and not force:
        raise InputError(f"{path}: exists already: name another file, or overwrite it with --force")


@contextmanager
def appearing(
    path: Path, kind: str, *, force: bool, keep: Sequence[Path] = (), made: str = "the new file"
) -> Iterator[Path]:  # fmt: skip
    """Another name beside `path` to write to; what is there takes its own at the end, and goes if that fails.

    Raises as `check_out`, which is asked before and after, and InputError where writing fails.
    """
    check_out(path, force=force, keep=keep, made=made)
    temporary = path.with_name(f".sluice-{kind}-{secrets.token_hex(4)}")
    try:
        yield temporary
        check_out(path, force=force, keep=keep, made=made)  # it may have appeared since
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path}: can't be written ({error.strerror}): name another place") from error
    finally:
        with suppress(OSError):  # a complete file no longer has this name
            temporary.unlink(missing_ok=True)
