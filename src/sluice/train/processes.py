"""Which process of a run this is and where it computes, and what the processes of a run tell each other.

One process unless the command was started by `accelerate launch`. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET = 1 << 24  # numbers that one message holds


@dataclass(frozen=True)
class Place:
    """`rank` of `world` processes, computing on `device`. `split`: each holds a part of the models' weights."""

    rank: int
    world: int
    device: torch.device
    split: bool = False

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.rank == 0


@cache
def place() -> Place:
    """Where this process stands; joins the others of its run, if there are any."""
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env  # what `accelerate launch --cpu` and `--use_fsdp` say

    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU", not torch.accelerator.is_available()))
    assert state.device is not None
    split = state.num_processes > 1 and parse_flag_from_env("ACCELERATE_USE_FSDP")
    return Place(state.process_index, state.num_processes, state.device, split)


def average(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its mean over all processes. All processes give the same shapes in the same order."""
    if place().world == 1:
        return
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(one.numel() for one in bucket) + tensor.numel() > _BUCKET:
            _average(bucket)
            bucket = []
        bucket.append(tensor)
    if bucket:
        _average(bucket)


def _average(tensors: Sequence[Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= place().world
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def averages(values: dict[str, float]) -> dict[str, float]:
    """The means of numbers over all processes, which all give the same names."""
    if place().world == 1:
        return values
    packed = torch.tensor(list(values.values()), dtype=torch.float64, device="cpu")
    packed = packed if dist.get_backend() == "gloo" else packed.to(place().device)
    dist.all_reduce(packed)
    return dict(zip(values, (packed / place().world).tolist(), strict=True))


def weight(n: int) -> float:
    """What the mean of `n` things here is to be multiplied by, that the processes' mean of it be that of all things."""
    return n / averages({"n": float(n)})["n"] if n else 0.0


def gather(value: Any) -> list[Any]:
    """What every process gave, by rank."""
    if place().world == 1:
        return [value]
    found: list[Any] = [None] * place().world
    dist.all_gather_object(found, value)
    return found


def wait() -> None:
    """Until all processes are here."""
    if place().world > 1:
        dist.barrier()
