"""A temporary file for what does not fit in memory, and whether a disk has room for it. Knows nothing of what it is."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from sluice.cli.doctor import IN_MEMORY
from sluice.cli.machine import filesystem_of
from sluice.config import format_size
from sluice.errors import InputError


@contextmanager
def spool() -> Iterator[tuple[IO[bytes], Path]]:
    """A file, and its folder: on a disk if there is one, as what is in a tmpfs takes memory."""
    folder = Path(tempfile.gettempdir())
    if filesystem_of(folder) in IN_MEMORY and (other := Path("/var/tmp")).is_dir():
        folder = other
    try:
        file = tempfile.TemporaryFile(dir=folder, prefix="sluice-eval-")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise InputError(f"{folder} can't be written ({error.strerror}): set TMPDIR to a folder on a disk") from None
    with file:
        yield file, folder


def check_room(what: str, n_bytes: int, folder: Path, remedy: str) -> None:
    """Raise InputError if `folder` can't take `n_bytes` and leave a tenth of what is free."""
    free = shutil.disk_usage(folder).free
    if n_bytes > 0.9 * free:
        raise InputError(
            f"{what} {format_size(n_bytes)} and {folder} has {format_size(free)} free: {remedy}, or set TMPDIR to a "
            "folder with room"
        )
