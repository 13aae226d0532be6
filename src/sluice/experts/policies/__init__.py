"""Eviction policies by name, one file each."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from sluice.errors import InputError
from sluice.experts.policies.arc import ARC
from sluice.experts.policies.base import Evictable, Policy
from sluice.experts.policies.belady import Belady
from sluice.experts.policies.cyclic import Cyclic
from sluice.experts.policies.lfru import LFRU
from sluice.experts.policies.lfu import LFU
from sluice.experts.policies.lru import LRU
from sluice.experts.policies.pinned import Pinned
from sluice.experts.policies.s3fifo import S3FIFO
from sluice.types import ExpertKey

__all__ = [
    "ARC", "AUTO", "LFRU", "LFU", "LRU", "POLICIES", "S3FIFO", "Belady", "Cyclic", "Evictable", "Pinned", "Policy",
    "Setting", "make_policy",
]  # fmt: skip


class Setting(NamedTuple):
    """What a policy may be made for: the cache, the model, and the fixed set of the policy `pinned`."""

    n_slots: int
    n_layers: int
    pinned: Collection[ExpertKey]


POLICIES: dict[str, Callable[[Setting], Policy]] = {
    "lru": lambda setting: LRU(),
    "lfu": lambda setting: LFU(),
    "lfru": lambda setting: LFRU(setting.n_layers),
    "s3fifo": lambda setting: S3FIFO(setting.n_slots),
    "arc": lambda setting: ARC(setting.n_slots),
    "cyclic": lambda setting: Cyclic(setting.n_layers),
    "pinned": lambda setting: Pinned(setting.pinned),
}


AUTO = "auto"
ROOMY = 1.5  # times the experts that one step demands


def is_roomy(n_slots: int, step_demand: int) -> bool:
    """Whether LRU suits `n_slots`: with fewer, its victims are the very experts that come next.

    Below one step's demand it never hits, and up to one and a half times that, reading ahead costs it more than it
    brings.
    """
    return n_slots >= ROOMY * step_demand


def suited(name: str, n_slots: int, step_demand: int) -> str:
    """`name`, or for "auto" the policy that suits a pool of `n_slots` where a step demands `step_demand` experts."""
    if name != AUTO:
        return name
    return "lru" if is_roomy(n_slots, step_demand) else "cyclic"


def reads_ahead(policy: str, n_slots: int, step_demand: int) -> bool:
    """Whether prefetching brings more than it costs under the policy of that name."""
    return policy == "cyclic" or is_roomy(n_slots, step_demand)


def make_policy(name: str, *, n_slots: int, n_layers: int, pinned: Collection[ExpertKey] = ()) -> Policy:
    """A new policy by its name in POLICIES; `pinned` is the fixed set of the policy of that name."""
    if name not in POLICIES:
        raise InputError(f"unknown cache policy {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](Setting(n_slots, n_layers, pinned))


def pinning(pins: Collection[ExpertKey], name: str, *, n_slots: int, n_layers: int) -> Policy:
    """A new policy that keeps `pins` as long as it can, and has the policy `name` choose among all others."""
    rest = make_policy(name, n_slots=max(1, n_slots - len(pins)), n_layers=n_layers)
    return Pinned(pins, rest) if pins else rest
