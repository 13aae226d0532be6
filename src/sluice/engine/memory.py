"""What memory the process has, uses and may use, as the operating system tells it; plans nothing."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


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


def cgroup_limit_bytes() -> int | None:
    """The tightest memory limit of this process's control groups (version 1 or 2), or None."""
    limits = []
    places = [Path(p) for p in _CGROUP_LIMITS]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                places.append(Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.max")
            elif "memory" in controllers.split(","):
                places.append(Path("/sys/fs/cgroup/memory") / path.lstrip("/") / "memory.limit_in_bytes")
    for place in places:
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(place.read_text()))  # "max" is no number
    return min((n for n in limits if n < 1 << 60), default=None)


def free_bytes() -> int:
    """Memory that could be taken without pushing others out, within the control group's limit."""
    free = None
    with contextlib.suppress(OSError):
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        free = int(match[1]) << 10 if match else None
    if free is None:
        free = _total_bytes() // 2
    limit = cgroup_limit_bytes()
    return free if limit is None else min(free, limit)


def _total_bytes() -> int:
    import os

    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 << 30
