"""What a user asked for, as frozen values, checked once. Knows no model."""

from __future__ import annotations

import math
import operator
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.errors import InputError
from sluice.experts.policies import AUTO, POLICIES

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
KV_TYPE_NAMES = ("f16", "f32", "q8_0", "q4_0")
READERS = ("auto", "io_uring", "threads")
ROUTINGS = ("exact", "prerouted")
REROUTE_KEEP = 1  # of a token's experts, those that rerouting never replaces unless told otherwise


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

    `expert_slots` sets the pool directly; `ram`, if given too, must hold it. `pool_share` is how much of the slots that
    the budget holds are made: more are not always faster. `beside` of it is left to what else the
    process does, as a server. `overlap=False` waits for all of a
    layer's experts before computing any. `read_rate` emulates a disk of that many bytes a second. `ggml` names a
    folder with other ggml libraries. `reader` is how experts are read: by io_uring, by `io_threads` threads, or
    what suits best (auto). `trace` names a file to record routes in, with the scores of all experts if `trace_scores`;
    one that exists is refused unless `trace_force`. `plan` names a plan file, whose experts are loaded at the start and
    whose policy stands in for `policy`. `prerouter` names a file of heads, which say what to read a token ahead. None
    of these changes the output: `kv` (f16 or another type, "K,V" for two) and `routing` do, and `top_k_experts`, which
    replaces the model's own number of experts a token takes in a layer. With `routing` "prerouted", what the heads say
    is the route, or what the trace `routes` has recorded for as many sessions, opened in the same order. `lora` are
    adapters, each a file and a scale (or a text "FILE:SCALE"), which change the model. `reroute` is a margin: in decode
    steps, experts that have no slot give way to ones that have and score at most so much less, but for a token's best
    `reroute_keep`; nothing is read ahead then. `device` computes what it has room for in `vram` bytes of its memory
    ("auto": a graphics processor, if there is one; "cpu": none): the last `gpu_layers` layers' attention, and experts
    but for the first `cpu_moe_layers` layers'. It rounds otherwise than the processor, so the output changes a little.
    """

    ram: int | None = None
    beside: int = 0
    expert_slots: int | None = None
    pool_share: float = 1.0
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
    prerouter: Path | None = None
    routes: Path | None = None
    lora: tuple[tuple[Path, float], ...] = ()
    reroute: float | None = None
    reroute_keep: int = REROUTE_KEEP
    device: str = "auto"
    vram: int | None = None
    gpu_layers: int | None = None
    cpu_moe_layers: int = 0
    upload_from: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "ram", "expert_slots", "ctx", "threads", "top_k_experts", "read_rate", "vram", "upload_from", "streams",
            "io_threads",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and name not in ("streams", "io_threads"):
                continue
            if (whole := _whole(value)) < 1:
                raise InputError(f"{name} is {value!r}: give a whole number of at least 1")
            object.__setattr__(self, name, whole)  # numpy's integers overflow
        if (beside := _whole(self.beside)) < 0:
            raise InputError(f"beside is {self.beside!r}: give a number of bytes")
        object.__setattr__(self, "beside", beside)
        for name in ("gpu_layers", "cpu_moe_layers"):
            value = getattr(self, name)
            if value is not None and (_whole(value) < 0 or (not _whole(value) and value != 0)):
                raise InputError(f"{name} is {value!r}: give a number of layers, 0 for none")
        if not isinstance(self.device, str) or not self.device:
            raise InputError(f"device is {self.device!r}: give auto, cpu, or a name that sluice doctor lists")
        if not 0 < self.pool_share <= 1:
            raise InputError(f"pool_share is {self.pool_share!r}: give a number above 0, and 1 at most")
        if self.trace is not None:
            object.__setattr__(self, "trace", Path(self.trace))
        elif self.trace_scores or self.trace_force:
            raise InputError("trace_scores and trace_force are for a trace: give trace a file too")
        for name in ("plan", "prerouter", "routes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        if isinstance(self.lora, (str, os.PathLike)):
            raise InputError(f"lora is {str(self.lora)[:80]!r}: give a list of adapters")
        object.__setattr__(self, "lora", tuple(_adapter(given) for given in self.lora))
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
        if self.routing == "prerouted" and self.prerouter is None and self.routes is None:
            raise InputError("routing prerouted needs predictions: give a prerouter, which sluice prerouter init makes")
        if self.routes is not None and (self.routing != "prerouted" or self.prerouter is not None):
            raise InputError("recorded routes are for routing prerouted, in the place of a prerouter")
        if self.reroute is not None:
            margin, keep = _margin(self.reroute, self.reroute_keep)
            object.__setattr__(self, "reroute", margin)
            object.__setattr__(self, "reroute_keep", keep)
            if self.routing == "prerouted":
                raise InputError("prerouted routes are run as they were predicted: leave out reroute, or the routing")
            if self.prerouter is not None:
                raise InputError("reroute reads nothing ahead, which a prerouter is for: leave out one of them")
            object.__setattr__(self, "prefetch", False)  # or the routes would depend on what had been read in time
        if self.device not in ("auto", "cpu"):
            for name in ("prerouter", "routes", "lora"):
                if getattr(self, name):
                    raise InputError(f"{name} runs on the processor alone: leave it out, or take the device cpu")
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


def parse_lora(text: str) -> tuple[Path, float]:
    """An adapter's file and scale, of "FILE" or "FILE:SCALE". Raises InputError."""
    name, colon, last = text.rpartition(":")
    scale = 1.0
    if colon and not os.path.lexists(os.path.expanduser(text)):  # noqa: PTH111
        with suppress(ValueError):
            scale, text = float(last), name
    return _adapter((text, scale))


def parse_reroute(text: str) -> tuple[float, int]:
    """Margin and number of experts kept, of "MARGIN" or "MARGIN:J" (1 unless given). Raises InputError."""
    margin, colon, keep = text.partition(":")
    try:
        given = float(margin), int(keep) if colon else REROUTE_KEEP
    except ValueError:
        raise InputError(f"reroute {text[:60]!r} is no margin: write it like 0.05, or 0.05:2 to keep 2") from None
    return _margin(*given)


def _margin(margin: Any, keep: Any) -> tuple[float, int]:
    """A checked margin and number of experts kept."""
    try:
        margin, keep = float(margin), operator.index(keep)
    except (TypeError, ValueError):
        raise InputError(f"reroute {margin!r}, {keep!r}: give a number, and a whole number to keep") from None
    if not 0 <= margin < math.inf or keep < 0:
        raise InputError(f"reroute {margin:g}:{keep} can't be: give a margin and a number kept of at least 0")
    return margin, keep


def _adapter(given: Any) -> tuple[Path, float]:
    """An adapter's file and scale, of a text, a path, or a pair of path and number."""
    if isinstance(given, str):
        return parse_lora(given)
    path, scale = (given, 1.0) if isinstance(given, os.PathLike) else given
    scale = float(scale)
    if not str(path) or not abs(scale) < 1e9:  # far larger ones aren't numbers of float32
        raise InputError(f"lora {str(path)[:200]}:{scale} is no file and scale: write it like adapter.gguf:0.5")
    return Path(path), scale
