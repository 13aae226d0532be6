"""What a run cost, phase by phase: time, demands, bytes. Counts and adds up; knows nothing of how work is done."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from sluice.experts.counters import CacheCounters
from sluice.io.reader import ReaderStats


@dataclass
class PhaseLedger:
    """Totals of one phase ("prefill" or "decode"). Times in seconds; wall = compute + wait + host."""

    steps: int = 0
    tokens: int = 0
    wall_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    token_demands: int = 0
    predicted: int = 0  # routed experts for which there was a prediction
    predicted_right: int = 0
    preroutes: int = 0  # experts that a prerouter named for a token, and those of them that its router chose too
    preroutes_right: int = 0
    reroutable: int = 0  # experts that routers chose where others might have stood in for them
    substituted: int = 0
    rerouted_rows: int = 0  # (token, layer): rows of those, and the sum of their routing weights' divergences, in nats
    reroute_kl: float = 0.0
    device_hits: int = 0  # demands met by experts in a device's memory
    promotions: int = 0  # experts copied there to stay, and those of them that it gave back to RAM for that
    demotions: int = 0
    uploads: int = 0  # experts copied there for one step
    overlapped: int = 0  # of promotions and uploads: begun before what the device had been given was waited for
    bytes_read: int = 0
    reads: int = 0
    io_busy_s: float = 0.0
    io_depth_s: float = 0.0
    cache: CacheCounters = field(default_factory=CacheCounters)

    def add_io(self, before: ReaderStats, after: ReaderStats) -> None:
        self.bytes_read += after.bytes_read - before.bytes_read
        self.reads += after.reads - before.reads
        self.io_busy_s += after.busy_s - before.busy_s
        self.io_depth_s += after.depth_s - before.depth_s

    def add(self, step: PhaseLedger) -> None:
        """Add the figures of `step`."""
        for each in fields(self):
            if each.name != "cache":
                setattr(self, each.name, getattr(self, each.name) + getattr(step, each.name))
        for name in CacheCounters.__slots__:
            setattr(self.cache, name, getattr(self.cache, name) + getattr(step.cache, name))

    @property
    def host_s(self) -> float:
        """What neither computes nor waits: Python."""
        return max(0.0, self.wall_s - self.compute_s - self.wait_s)

    def as_dict(
        self, *, resident_bytes: int | None = None, page_cache_bytes: int | None = None, device: bool = False
    ) -> dict[str, Any]:  # fmt: skip
        """The JSON form. What was not measured is None, never 0. `device`: one took part, so its counters are there."""
        c = self.cache
        names = ("device_hits", "promotions", "demotions", "uploads", "overlapped") if device else ()
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "wall_s": self.wall_s,
            "compute_s": self.compute_s,
            "wait_s": self.wait_s,
            "host_s": self.host_s,
            "demands": c.demands,
            "hits": c.hits,
            "late_hits": c.late_hits,
            "misses": c.misses,
            "token_demands": self.token_demands,
            "evictions": c.evictions,
            "reads": self.reads,
            "bytes_read": self.bytes_read,
            "prefetch_issued": c.prefetch_issued,
            "prefetch_used": c.prefetch_used,
            "prefetch_late": c.prefetch_late,
            "prefetch_wasted": c.prefetch_wasted,
            "prefetch_crowded": c.prefetch_crowded,
            "recall_at_k": self.predicted_right / self.predicted if self.predicted else None,
            "prerouter_agreement": self.preroutes_right / self.preroutes if self.preroutes else None,
            "substituted": self.substituted,
            "native_agreement": 1 - self.substituted / self.reroutable if self.reroutable else None,
            "reroute_kl": self.reroute_kl / self.rerouted_rows if self.rerouted_rows else None,
            "io_busy_s": self.io_busy_s,
            "io_depth_mean": self.io_depth_s / self.io_busy_s if self.io_busy_s else None,
            "resident_bytes": resident_bytes,
            "page_cache_bytes": page_cache_bytes,
            **{name: getattr(self, name) for name in names},
        }
