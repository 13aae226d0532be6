"""Routed experts computed fast where transformers' own ways are slow; the same function, registered with transformers.

Tokens are sorted by expert and each expert's rows go through its matrices in one product (`grouped_mm`). Sorting and
its undoing are permutations, so their gradients are permutations too: transformers' own version scatters with sums
there, which takes a tenth of a training step on a CPU. It knows no model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "sluice_sorted"


class _Spread(torch.autograd.Function):
    """Rows of x [n, d] to k copies each, sorted: row i of the result is x[perm[i] // k]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, perm: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.k = k
        return x.index_select(0, perm // k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        (grad,) = grads
        return grad.index_select(0, back).view(-1, ctx.k, grad.shape[1]).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """Rows of x in another order: row i of the result is x[order[i]], and `back` undoes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


def sorted_experts(module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Σ_j weights[:, j] · expert_{ids[:, j]}(hidden), [n, d]. `module` is a stack of experts of transformers'.

    Its `gate_up_proj` is [E, 2 ff, d] and its `down_proj` [E, d, ff].
    """
    (n, k), n_expert = ids.shape, module.num_experts
    flat = ids.reshape(-1)
    perm = flat.argsort(stable=True)
    back = torch.empty_like(perm)
    back[perm] = torch.arange(n * k, device=perm.device)
    ends = torch.bincount(flat, minlength=n_expert).cumsum(0).to(torch.int32)  # type: ignore[arg-type]
    gate_up, down = module.gate_up_proj, module.down_proj
    if torch.is_autocast_enabled(hidden.device.type):  # grouped_mm isn't among what autocast knows
        kind = torch.get_autocast_dtype(hidden.device.type)
        hidden, gate_up, down = hidden.to(kind), gate_up.to(kind), down.to(kind)  # type: ignore[operator]
    x = _Spread.apply(hidden, perm, back, k)
    y = torch.nn.functional.grouped_mm(x, gate_up.transpose(1, 2), offs=ends)  # type: ignore[arg-type,operator]
    gate, up = y.chunk(2, dim=-1)
    y = module.act_fn(gate) * up  # type: ignore[operator]
    y = torch.nn.functional.grouped_mm(y, down.transpose(1, 2), offs=ends)  # type: ignore[arg-type,operator]
    y = _Permute.apply(y, back, perm).view(n, k, -1)
    return torch.bmm(weights.to(y.dtype).unsqueeze(1), y).squeeze(1).to(hidden.dtype)


def use_fast_experts(model: nn.Module) -> None:
    """Have `model`, of transformers', compute its experts this way on a CPU. Elsewhere it keeps its own."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if next(model.parameters()).device.type != "cpu" or not hasattr(torch.nn.functional, "grouped_mm"):
        return
    ALL_EXPERTS_FUNCTIONS[NAME] = sorted_experts
    model.set_experts_implementation(NAME)  # type: ignore[operator]
