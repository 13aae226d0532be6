"""Chooses what carries out reads: io_uring where system and files suit it, threads elsewhere. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sluice.errors import InputError
from sluice.io.files import ModelFiles
from sluice.io.pool_reader import PoolReader
from sluice.io.reader import Reader
from sluice.io.ring_reader import RingReader
from sluice.io.uring import available
from sluice.types import Read, Segment

RING_DEPTH = 2  # reads that io_uring keeps running for each thread that would read instead


def make_reader(
    files: ModelFiles, pool: memoryview, locate: Callable[[Read], Sequence[Segment]], *,
    how: str, threads: int, in_place: bool,
) -> Reader:  # fmt: skip
    """A reader of `files` into `pool`: "io_uring", "threads" or what suits best ("auto").

    `in_place`: every segment lies as far into a block of the pool as of its file. Raises InputError where io_uring is
    asked for by name and can't be had.
    """
    suits = _ring_suits(files, in_place)
    if how == "io_uring" and not suits:
        raise InputError(
            "reader io_uring needs O_DIRECT, experts of whole blocks, and no emulated disk: leave it at auto"
        )
    if how != "threads" and suits:
        try:
            return RingReader(files, pool, locate, depth=RING_DEPTH * threads)
        except OSError as error:
            if how == "io_uring":
                raise InputError(f"this system gives no io_uring ({error}): leave the reader at auto") from error
    return PoolReader(files, pool, locate, threads=threads)


def auto_name(files: ModelFiles, in_place: bool) -> str:
    """The name of the reader that "auto" makes."""
    return (RingReader if _ring_suits(files, in_place) and available() else PoolReader).name


def _ring_suits(files: ModelFiles, in_place: bool) -> bool:
    return files.direct and files.by_descriptor and in_place
