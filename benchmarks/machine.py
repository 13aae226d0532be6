"""Settings of the machine that benchmarks depend on: memory caps, page cache, read-ahead. Measures nothing.

Linux only, and most of it needs root; what can't be had raises UnavailableError, whose one line says what to leave out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sluice.config import format_size

CGROUPS = Path("/sys/fs/cgroup")
CHUNK_BYTES = 8 << 20


class UnavailableError(Exception):
    """The machine, or the user's rights on it, don't allow this measurement."""


def drop_page_cache() -> None:
    """Make the next reads of any file go to disk."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as error:
        raise UnavailableError(
            f"can't empty the page cache ({error.strerror}): run as root, or leave out --cold"
        ) from error


def fill_page_cache(path: Path) -> None:
    """Read a file once, so that it is in the page cache as far as that has room."""
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


class MemoryCap:
    """A memory cgroup (version 1 or 2) of `n_bytes` for child processes; it counts their page cache too.

    A context manager. Pages that are cached already would be charged to nobody, so it empties the page cache first.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._v1 = (CGROUPS / "memory").is_dir()
        self._group = (CGROUPS / "memory" if self._v1 else CGROUPS) / f"sluice-benchmark-{os.getpid()}"

    def __enter__(self) -> MemoryCap:
        drop_page_cache()
        try:
            if not self._v1:
                (CGROUPS / "cgroup.subtree_control").write_text("+memory")
            self._group.mkdir()
            limit, swap = (
                ("memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", self.n_bytes))
                if self._v1
                else ("memory.max", ("memory.swap.max", 0))
            )
            (self._group / limit).write_text(str(self.n_bytes))
            with suppress(OSError):  # absent where the kernel doesn't account for swap
                (self._group / swap[0]).write_text(str(swap[1]))
        except OSError as error:
            self.__exit__()
            raise UnavailableError(
                f"can't make a memory cgroup of {format_size(self.n_bytes)} ({error}): run as root, or leave out --cap"
            ) from error
        return self

    def join(self) -> None:
        """Put the calling process into the group: for a child, before it becomes another program."""
        (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def __exit__(self, *exc: object) -> None:
        for _ in range(50):  # a process that has just ended may still be counted for a moment
            try:
                self._group.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)


def cap_peak_bytes() -> int | None:
    """The most memory, page cache included, that this process's own cgroup has held; None where that isn't told."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                return int((CGROUPS / "memory" / path.lstrip("/") / "memory.max_usage_in_bytes").read_text())
            peak = CGROUPS / path.lstrip("/") / "memory.peak"
            if controllers == "" and peak.exists():
                return int(peak.read_text())
    return None


@contextmanager
def read_ahead(path: Path, kb: int) -> Iterator[int]:
    """Set the read-ahead of the disk under `path`, KB, and restore it at the end; 0 leaves it. Yields what it is now.

    Linux's usual 128 KB is what page faults are measured with: a virtual disk that comes with 8192 multiplies what
    every fault reads.
    """
    device = path.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    settings = [place / "queue" / "read_ahead_kb" for place in (node, node.parent)]  # a partition's queue is its disk's
    setting = next((s for s in settings if s.exists()), None)
    if setting is None:
        raise UnavailableError(f"{path} lies on no block device with a read-ahead setting: give --read-ahead 0")
    before = setting.read_text().strip()
    if not kb or int(before) == kb:
        yield int(before)
        return
    try:
        setting.write_text(str(kb))
    except OSError as error:
        raise UnavailableError(
            f"can't set the disk's read-ahead ({error.strerror}): run as root, or give --read-ahead 0"
        ) from error
    try:
        yield kb
    finally:
        setting.write_text(before)


def reset_peak_rss() -> bool:
    """Make this process's peak resident memory start anew from what it has now; False where the system can't."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def disk_bytes_read() -> int | None:
    """Bytes that this process has made the disks read, page faults included; None where that isn't told."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))
    return None
