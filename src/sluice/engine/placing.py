"""Fills an engine's pool as a plan file says before its first step, and writes down what it holds; runs no steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from sluice.engine.weights import DenseWeights
from sluice.errors import InputError
from sluice.experts.policies import POLICIES
from sluice.gguf import GgufFile
from sluice.io.files import ModelFiles
from sluice.models.spec import ModelSpec
from sluice.plan_file import Placement, read_plan, write_plan
from sluice.store import ExpertStore

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Placed:
    """What a plan brought into the pool, and what that took."""

    name: str  # of the file
    policy: str
    pins: int
    loaded: int  # the pins included
    bytes_read: int
    seconds: float
    expected_hit_rate: float | None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form. It stands beside a result's `mode`, as a plan doesn't change the output."""
        return {
            "name": self.name,
            "policy": self.policy,
            "pins": self.pins,
            "loaded": self.loaded,
            "bytes_read": self.bytes_read,
            "load_s": self.seconds,
            "expected_hit_rate": self.expected_hit_rate,
        }


def model_of(file: GgufFile, spec: ModelSpec, fingerprint: str) -> dict[str, Any]:
    """What a plan says of the model that it is for."""
    name = file.metadata.get("general.name")
    return {
        "fingerprint": fingerprint,
        "architecture": spec.architecture,
        "name": name if isinstance(name, str) else "",
        "n_layers": spec.n_layers,
        "moe_layers": tuple(spec.moe_layers),
        "n_expert": spec.n_expert,
    }


def read_for(path: Path, model: Mapping[str, Any]) -> Placement:
    """The plan in `path`, if it was made for `model` (see `model_of`). Raises InputError."""
    plan = read_plan(path)
    plan.check_model(path, **model)
    if plan.policy not in POLICIES:
        raise InputError(
            f"{path}: leaves the rest to a cache policy {plan.policy[:40]!r}, which is unknown: plan again with one of "
            f"{', '.join(POLICIES)}"
        )
    return plan


def load(
    weights: DenseWeights, files: ModelFiles, store: ExpertStore, plan: Placement | None, path: Path | None,
    progress: Progress | None = None,
) -> Placed | None:  # fmt: skip
    """Read the resident weights, then the experts that the plan of the file `path`, fitted to the store, names.

    `progress(done, total)` in bytes of both. Raises ReadError.
    """
    if plan is None or path is None:
        weights.load(files, progress)
        return None
    keys = (*reversed(plan.pins), *plan.load)  # the hottest pin last, so that it would be the last pin to go
    n_experts = sum(store.expert_bytes(key.layer) for key in keys)
    total = weights.n_bytes + n_experts
    weights.load(files, progress and (lambda done, _: progress(done, total)))
    began = perf_counter()
    n_bytes = store.preload(keys, progress and (lambda done, _: progress(weights.n_bytes + done, total)))
    expected = None if plan.expected is None else plan.expected.get("hit_rate")
    return Placed(path.name, plan.policy, len(plan.pins), len(keys), n_bytes, perf_counter() - began, expected)


def save(
    path: Path, store: ExpertStore, model: Mapping[str, Any], *, policy: str, plan: Placement | None, force: bool,
    keep: Sequence[Path],
) -> int:  # fmt: skip
    """Write a plan that loads what `store` holds now and keeps `plan`'s pins: how many experts. Raises InputError."""
    while store.cache.reads_in_flight():  # of prefetches that nobody waited for
        store.arrived(block=True)
    pins = () if plan is None else plan.pins
    kept = frozenset(pins)
    load = tuple(key for key in store.cache.eviction_order() if key not in kept)
    saved = Placement(
        **model, slots=store.n_slots, policy=policy, pins=pins, load=load, expected=None,
        source="the experts resident at the end of a run",
    )  # fmt: skip
    write_plan(path, saved, force=force, keep=keep)
    return len(pins) + len(load)
