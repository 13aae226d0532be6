"""A machine profile with figures that are easy to follow; knows no machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sluice.plan.profile import MachineProfile, PromptCost, StepCost


def profile(**changes: Any) -> MachineProfile:
    """10 layers of 16 experts of a megabyte, 4 a token; a load takes 1 ms, a resident step 41 + 40 + 10 ms."""
    plain = MachineProfile(
        fingerprint="f" * 64, machine="some processor, 2 cores, Linux", threads=2, reader="io_uring", ggml="0.0",
        taken="2026-01-01T00:00:00+00:00", moe_layers=10, n_expert=16, top_k=4, expert_bytes=1e6, dense_bytes=100_000,
        ram_bytes_per_s=20e9, raw_bytes_per_s=1e9, raw_depth=4, load_a_s=1e-5, load_b_s=1e-3, load_error_s=1e-6,
        read_beside=1.0, compute_beside=1.0, fresh_host_s=0.0, fresh_load_s=0.0, host_read_s=0.0, sampling_s=0.0,
        recall=1.0, demand=StepCost(0.041, 0.040, 0.010), prefetch=StepCost(0.044, 0.040, 0.012),
        prompts=(PromptCost(32, 0.5, 0.1, 150), PromptCost(128, 1.5, 0.2, 160)),
    )  # fmt: skip
    return replace(plain, **changes)
