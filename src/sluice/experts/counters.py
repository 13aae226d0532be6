"""What happened to demands and prefetches in an expert cache, as plain counts; knows nothing of time."""

from __future__ import annotations


class CacheCounters:
    """Counts since the cache was made; `later - earlier` is what happened between two copies."""

    __slots__ = (
        "evictions",
        "hits",
        "late_hits",
        "misses",
        "prefetch_crowded",
        "prefetch_issued",
        "prefetch_late",
        "prefetch_used",
        "prefetch_wasted",
    )

    def __init__(self) -> None:
        self.hits = 0  # resident at demand
        self.late_hits = 0  # its read was issued and not complete
        self.misses = 0  # no read had been issued
        self.evictions = 0  # a resident expert made room for another
        self.prefetch_issued = 0
        self.prefetch_used = 0  # prefetched, then demanded for the first time
        self.prefetch_late = 0  # of those used: still loading at that demand
        self.prefetch_wasted = 0  # prefetched, then evicted, dropped or failed without any demand
        self.prefetch_crowded = 0  # absent, and not prefetched because no slot was left for it

    @property
    def demands(self) -> int:
        return self.hits + self.late_hits + self.misses

    def as_dict(self) -> dict[str, int]:
        return {"demands": self.demands} | {name: getattr(self, name) for name in self.__slots__}

    def copy(self) -> CacheCounters:
        return self - CacheCounters()

    def __sub__(self, earlier: CacheCounters) -> CacheCounters:
        difference = CacheCounters()
        for name in self.__slots__:
            setattr(difference, name, getattr(self, name) - getattr(earlier, name))
        return difference

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheCounters) and self.as_dict() == other.as_dict()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"CacheCounters({', '.join(f'{name}={n}' for name, n in self.as_dict().items())})"
