"""What memory the process has, uses and may use, as the operating system tells it; plans nothing."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path


def _status(field: str) -> int | None:
    """A field of /proc/self/status in bytes."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None
    match = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else None


def rss_bytes() -> int:
    """Resident memory of this process now (its peak where the system tells no more)."""
    return _status("VmRSS") or peak_rss_bytes()


def peak_rss_bytes() -> int:
    """The most resident memory this process has had."""
    if (peak := _status("VmHWM")) is not None:
        return peak
    if sys.platform == "win32":
        return _windows_peak()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _windows_peak() -> int:
    import ctypes
    from ctypes import wintypes

    class Counters(ctypes.Structure):
        _fields_ = [("cb", wintypes.DWORD), ("faults", wintypes.DWORD), ("peak", ctypes.c_size_t)] + [
            (f"_{i}", ctypes.c_size_t) for i in range(8)
        ]

    counters = Counters(cb=ctypes.sizeof(Counters))
    windll = getattr(ctypes, "windll")  # noqa: B009  (exists on Windows only)
    windll.psapi.GetProcessMemoryInfo(windll.kernel32.GetCurrentProcess(), ctypes.byref(counters), counters.cb)
    return counters.peak


def page_cache_bytes() -> int | None:
    """The system's page cache, or None where it isn't told."""
    try:
        match = re.search(r"^Cached:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) << 10 if match else None


def _cgroups() -> list[tuple[Path, str, str]]:
    """This process's memory control groups, innermost first: (folder, file of the limit, field of memory.stat)."""
    groups = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, limit, field = Path("/sys/fs/cgroup"), "memory.max", "anon"
            elif "memory" in controllers.split(","):
                root, limit, field = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "total_rss"
            else:
                continue
            folder = root / path.lstrip("/")
            groups += [(each, limit, field) for each in (folder, *folder.parents) if each.is_relative_to(root)]
    # a container sees its own group as the root, whatever path it is told
    return [*groups, (Path("/sys/fs/cgroup"), "memory.max", "anon")]


def cgroup_limit_bytes() -> int | None:
    """The tightest memory limit of this process's control groups and theirs (version 1 or 2), or None."""
    limits = [limit for limit, _ in _cgroup_limits()]
    return min(limits, default=None)


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, memory in use) of each group that has a limit; page cache doesn't count as used."""
    found = []
    for folder, limit_file, field in _cgroups():
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / limit_file).read_text())  # "max" is no number
            match = re.search(rf"^{field} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
            if limit < 1 << 60:
                found.append((limit, int(match[1]) if match else 0))
    return found


def free_bytes() -> int:
    """Memory that this process could have in all without pushing others out, within its control groups' limits."""
    free = None
    with contextlib.suppress(OSError):
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        free = int(match[1]) << 10 if match else None
    if free is None:
        free = _total_bytes() // 2
    own = rss_bytes()
    return min([free, *(limit - max(0, used - own) for limit, used in _cgroup_limits())])


def _total_bytes() -> int:
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 << 30
