"""What the operating system tells of processor, memory, file systems and disks; judges nothing.

Everything is None where the platform doesn't tell.
"""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from pathlib import Path


def cpu_name() -> str:
    """The processor's name."""
    with suppress(OSError):
        if match := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1]
    return platform.processor() or platform.machine()


def memory() -> dict[str, int | None]:
    """Memory of the machine, what is free of it, and the control group's limit, in bytes."""
    from sluice.memory import cgroup_limit_bytes, free_bytes

    total = None
    with suppress(AttributeError, ValueError, OSError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "memory_bytes": total,
        "memory_free_bytes": free_bytes(),
        "memory_limit_bytes": cgroup_limit_bytes(),
    }


def filesystem_of(path: Path) -> str | None:
    """The kind of file system that holds `path`, as in "ext4"."""
    with suppress(OSError, ValueError):
        device = path.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
        # btrfs and overlays number their files otherwise: the longest mount point above the path
        real, best = str(path.resolve()), ("", None)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            point = before.split()[4]
            if (real + "/").startswith(point.rstrip("/") + "/") and len(point) > len(best[0]):
                best = (point, after.split()[0])
        return best[1]
    return None


def read_ahead_kb(path: Path) -> int | None:
    """The read-ahead of the disk under `path`, in KB. Reads past the page cache don't use it."""
    with suppress(OSError, ValueError, AttributeError):
        device = path.stat().st_dev
        folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
        for place in (folder, folder.parent):  # a partition's queue is its disk's
            if (setting := place / "queue" / "read_ahead_kb").exists():
                return int(setting.read_text())
    return None
