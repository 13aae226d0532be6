"""Divides a memory budget: what must be resident first, expert slots from the rest. Pure arithmetic on sizes."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.config import format_size
from sluice.errors import BudgetError

DEFAULT_SHARE = 0.75  # of what is free: the rest is for other programs and the page cache
HOST_BYTES = 40 << 20  # Python objects, graphs and buffers that appear while running
SLACK = 0.01  # of the budget, for what no one counts


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes the process takes beside its slots. `process`: interpreter, libraries, tokenizer, as measured now."""

    process: int
    dense: int
    kv: int
    workspace: int
    scratch: int
    work: int  # ggml's own work buffer
    heads: int = 0  # of a prerouter
    adapters: int = 0
    beside: int = 0  # what the process does beside the engine

    @property
    def fixed(self) -> int:
        counted = self.process + self.dense + self.kv + self.workspace + self.scratch + self.work + self.heads
        return counted + self.adapters + self.beside + HOST_BYTES


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`slots` fit the budget; `floor_slots` is one token's demand, below which an LRU never hits."""

    budget: int | None
    slots: int
    needs: MemoryNeeds
    slot_bytes: int
    floor_slots: int

    @property
    def below_floor(self) -> bool:
        return self.slots < self.floor_slots


def plan_memory(
    needs: MemoryNeeds, slot_bytes: int, *, ram: int | None, free: int, expert_slots: int | None,
    least_slots: int, floor_slots: int, all_slots: int, share: float = 1.0,
) -> MemoryPlan:  # fmt: skip
    """`share` of the slots that the budget `ram` (by default a part of `free`) holds, or `expert_slots` of them.

    `least_slots` is what one layer of one token needs. Raises BudgetError naming the smallest budget that works.
    """

    def total(slots: int) -> int:
        return budget_for(needs, slot_bytes, slots)

    if expert_slots is not None:
        slots = min(expert_slots, all_slots)
        if slots < least_slots:
            raise BudgetError(f"--expert-slots {expert_slots} is too few: one layer of one token needs {least_slots}")
        if ram is not None and total(slots) > ram:
            raise BudgetError(
                f"--ram {format_size(ram)} can't hold {slots} expert slots: "
                f"they and the rest need {round_up_size(total(slots))}, or leave out --expert-slots"
            )
        return MemoryPlan(ram, slots, needs, slot_bytes, floor_slots)
    budget = int(free * DEFAULT_SHARE) if ram is None else ram
    slots = min(int(budget * (1 - SLACK) - needs.fixed) // slot_bytes, all_slots)
    if slots < least_slots:
        given = f"--ram {format_size(budget)}" if ram is not None else f"{format_size(budget)} of free memory"
        raise BudgetError(
            f"{given} is too little for this model: the smallest budget that works is "
            f"--ram {round_up_size(total(least_slots))} (a shorter --ctx or fewer streams lower it)"
        )
    return MemoryPlan(budget, max(least_slots, int(slots * share)), needs, slot_bytes, floor_slots)


def budget_for(needs: MemoryNeeds, slot_bytes: int, slots: int) -> int:
    """The smallest budget, bytes, that holds `slots` slots."""
    return int((needs.fixed + slots * slot_bytes) / (1 - SLACK)) + 1


def round_up_size(n: int) -> str:
    """`n` bytes in whole M, rounded up, so that the size named is enough."""
    return f"{-(-n // (1 << 20))}M"
