"""The contract of everything that carries out reads. It does not know how they are carried out."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from sluice.types import Completion, Read


@dataclass(frozen=True)
class ReaderStats:
    """What a reader has done since it was made.

    `reads` ended without an error; `bytes_read` are the exact bytes of finished segments, `bytes_from_disk` what was
    really fetched for them (whole blocks). `busy_s`: at least one read was outstanding, queued or running. `depth_s`:
    the integral over time of the number of segments being read, so `depth_s / busy_s` is the mean depth. `bounced`
    counts segments that were copied from a bounce buffer instead of landing in the pool.
    """

    reads: int = 0
    bytes_read: int = 0
    bytes_from_disk: int = 0
    busy_s: float = 0.0
    depth_s: float = 0.0
    bounced: int = 0


class Reader(Protocol):
    """Carries out reads in the order of their deadlines. One thread calls it; reads are told apart by `serial`.

    Every submitted read ends exactly once: in a completion, in a `cancel` that returned True, or in `close`.
    Once it has ended, its slot is not written again; until then it may be at any time.
    """

    @property
    def name(self) -> str:
        """By what means it reads."""
        ...

    def submit(self, read: Read) -> None:
        """Queue a read. Raises EngineClosed after close()."""
        ...

    def promote(self, read: Read, deadline: int) -> None:
        """Make a queued read more urgent. Without effect on one that has begun or ended, or that is due sooner."""
        ...

    def cancel(self, read: Read) -> bool:
        """True: the read had not begun and never will, no completion follows. False: it runs or has ended."""
        ...

    def completions(self, block: bool = False, timeout: float | None = None) -> list[Completion]:
        """All reads that have ended since the last call, in the order they ended.

        With `block`, waits until there is at least one, `timeout` seconds have passed, or nothing is outstanding.
        """
        ...

    def stats(self) -> ReaderStats:
        """Counters since the reader was made, up to now."""
        ...

    def close(self) -> None:
        """Drop what is queued, wait for what runs, join the threads. May be called again."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
