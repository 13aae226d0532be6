"""The order of the three stages, and what a heads' file says of those it has been through. Knows no losses.

A heads file's `training` holds `stages`, those done in their order, and under each one's name what it was done with.
Heads alone imitate routers first: trained on text from the start they drown, and the text of heads that only imitate
repeats itself. So each stage asks for the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice.errors import InputError
from sluice.train.heads import Heads

STAGES = ("prerouter", "recover", "onpolicy")
HEADS, ADAPTER, ADAPTER_GGUF = "heads.safetensors", "adapter", "adapter.gguf"  # in a run's folder


def check_order(stage: str, heads: Heads, path: str | Path, *, force: bool = False) -> None:
    """Raise InputError unless it is `stage`'s turn for `heads`, read from `path`; `force` lets any order pass."""
    at = STAGES.index(stage)
    later = [name for name in heads.stages if name in STAGES[at + 1 :]]
    if force:
        return
    if later:
        raise InputError(f"{path}: these heads have been through {later[-1]}, which {stage} would undo: give heads "
                         "from before it, or --force")  # fmt: skip
    if at and STAGES[at - 1] not in heads.stages:
        before = STAGES[at - 1]
        raise InputError(f"{path}: these heads have not been through {before}, and {stage} comes after it: run `sluice "
                         f"train {before}` first, or start here anyway with --force")  # fmt: skip


def trained(stage: str, heads: Heads, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the file of `heads` says of training once `stage` is done: that, and all it said before."""
    done = [name for name in heads.stages if name != stage]
    return {**heads.info.training, "stages": [*done, stage], stage: dict(facts)}
