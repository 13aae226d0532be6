"""What a user asked for, as frozen values, checked once. Knows no model."""

from __future__ import annotations

import operator
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.errors import InputError
from sluice.experts.policies import AUTO, POLICIES

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
KV_TYPE_NAMES = ("f16", "f32", "q8_0", "q4_0")
READERS = ("auto", "io_uring", "threads")
ROUTINGS = ("exact",)


def parse_size(text: str) -> int:
    """Bytes of "512M" or "4G" (powers of 1024; fractions and a trailing B or iB allowed). Raises InputError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match:
        raise InputError(f"{text!r} is not a size: write it like 512M or 4G")
    n = int(float(match[1]) * _UNITS[match[2].upper()])
    if not 0 < n < 1 << 50:
        raise InputError(f"{text!r} is not a usable size: write it like 512M or 4G")
    return n


def format_size(n: int) -> str:
    """`n` bytes the way `parse_size` reads them, rounded."""
    for unit in ("T", "G", "M", "K"):
        if n >= _UNITS[unit]:
            value = n / _UNITS[unit]
            return f"{value:.2f}{unit}" if value < 10 else f"{value:.1f}{unit}"
    return f"{n}B"


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _whole(value: Any) -> int:
    """`value` as Python's int, numpy's integers too; 0 if it is no whole number."""
    try:
        return 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to open an engine. Sizes in bytes; None lets the engine choose.

    `expert_slots` sets the pool directly; `ram`, if given too, must hold it. `overlap=False` waits for all of a
    layer's experts before computing any. `read_rate` emulates a disk of that many bytes a second. `ggml` names a
    folder with other ggml libraries. `reader` is how experts are read: by io_uring, by `io_threads` threads, or
    what suits best (auto). `trace` names a file to record routes in, with the scores of all experts if `trace_scores`;
    one that exists is refused unless `trace_force`. `plan` names a plan file, whose experts are loaded at the start and
    whose policy stands in for `policy`. None of these changes the output: `kv` (f16 or another type, "K,V"
    for two) and `routing` do, and `top_k_experts`, which replaces the model's own number of experts a token takes in a
    layer.
    """

    ram: int | None = None
    expert_slots: int | None = None
    ctx: int | None = None
    threads: int | None = None
    kv: str = "f16"
    policy: str = AUTO
    routing: str = "exact"
    top_k_experts: int | None = None
    prefetch: bool = True
    overlap: bool = True
    streams: int = 1
    io_threads: int = 4
    reader: str = "auto"
    read_rate: int | None = None
    ggml: Path | None = None
    poison: bool = False
    trace: Path | None = None
    trace_scores: bool = False
    trace_force: bool = False
    plan: Path | None = None

    def __post_init__(self) -> None:
        for name in ("ram", "expert_slots", "ctx", "threads", "top_k_experts", "read_rate", "streams", "io_threads"):
            value = getattr(self, name)
            if value is None and name not in ("streams", "io_threads"):
                continue
            if (whole := _whole(value)) < 1:
                raise InputError(f"{name} is {value!r}: give a whole number of at least 1")
            object.__setattr__(self, name, whole)  # numpy's integers overflow
        if self.trace is not None:
            object.__setattr__(self, "trace", Path(self.trace))
        elif self.trace_scores or self.trace_force:
            raise InputError("trace_scores and trace_force are for a trace: give trace a file too")
        if self.plan is not None:
            object.__setattr__(self, "plan", Path(self.plan))
        if not isinstance(self.kv, str):
            raise InputError(f"kv is {self.kv!r}: give the name of a type")
        if self.threads is not None and self.threads > 512:
            raise InputError(f"threads is {self.threads}: ggml takes at most 512")
        if not 1 <= self.streams <= 1024 or not 1 <= self.io_threads <= 64:
            raise InputError(f"streams ({self.streams}) must be 1 to 1024 and io_threads ({self.io_threads}) 1 to 64")
        if self.reader not in READERS:
            raise InputError(f"reader {self.reader!r} is unknown: choose from {', '.join(READERS)}")
        if self.routing not in ROUTINGS:
            raise InputError(f"routing {self.routing!r} is unknown: choose from {', '.join(ROUTINGS)}")
        if self.policy not in (AUTO, *POLICIES):
            raise InputError(f"policy {self.policy!r} is unknown: choose from {AUTO}, {', '.join(sorted(POLICIES))}")
        for name in self.kv_names:
            if name not in KV_TYPE_NAMES:
                raise InputError(f"kv type {name!r} is unknown: choose from {', '.join(KV_TYPE_NAMES)}, or K,V")

    @property
    def kv_names(self) -> tuple[str, str]:
        """Names of the types of keys and values."""
        k, comma, v = self.kv.partition(",")
        return k, v if comma else k
