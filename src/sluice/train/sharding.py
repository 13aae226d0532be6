"""Weights split over the processes of a run, so that none holds a whole model; knows no loss and no steps.

Each decoder layer is put together when it computes and taken apart again (PyTorch's `fully_shard`). That is what
`accelerate launch --use_fsdp` asks for. Everything here is called by all processes alike, as they exchange parts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sluice.train import processes
from sluice.train.families import decoder


def placed(model: nn.Module, whole: Collection[nn.Parameter] = ()) -> nn.Module:
    """`model` on this process's device: all of it or, in a run that splits weights, its part.

    Parameters in `whole` are kept whole on every process.
    """
    here = processes.place()
    if not here.split:
        return model.to(here.device)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    how: dict[str, Any] = {"mesh": init_device_mesh(here.device.type, (here.world,)), "ignored_params": set(whole)}
    for parameter in whole:
        parameter.data = parameter.data.to(here.device)
    for layer in decoder(model).layers:  # type: ignore[union-attr]
        fully_shard(layer, **how)  # type: ignore[call-overload]
    return fully_shard(model, **how)  # type: ignore[call-overload,no-any-return]


def is_part(tensor: Tensor) -> bool:
    """Whether it is split over the processes, and this one has a part."""
    return isinstance(tensor, DTensor)


def joined(tensor: Tensor) -> Tensor:
    """The whole of a tensor, split or not."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """What this process keeps of `whole`, which all have: split as `like` is, if it is."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(
        whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )  # all have it, so nothing is sent


def norm(gradients: Collection[Tensor]) -> Tensor:
    """The length of all gradients together, a scalar on every process."""
    return torch.stack([joined(nn.utils.get_total_norm(some)) for some in _kinds(gradients) if some]).norm()


def clip(parameters: Collection[nn.Parameter], most: float, length: Tensor) -> None:
    """Shorten all gradients, whose length together is `length`, to at most `most`."""
    for some in _kinds(parameters):
        nn.utils.clip_grads_with_norm_(some, most, length)


def _kinds(tensors: Collection[Any]) -> tuple[list[Any], list[Any]]:
    """Those that are split, and those that aren't: PyTorch takes no mixture of the two."""
    return [one for one in tensors if is_part(one)], [one for one in tensors if not is_part(one)]


def joined_state(model: nn.Module) -> dict[str, Tensor]:
    """All of a model's numbers by name, on the CPU of the first process; an empty one on the others."""
    first = processes.place().first
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        whole = joined(tensor.detach())
        if first:
            found[name] = whole.cpu()
    return found
