"""What a machine was measured to do with a model, as a frozen value and a JSON file; measures and predicts nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from sluice.errors import InputError

FORMAT = 2
MAX_FILE_BYTES = 1 << 20
MAX_LAYERS, MAX_EXPERTS = 1 << 12, 1 << 15


@dataclass(frozen=True)
class StepCost:
    """A decode step of one token whose experts are all resident, seconds."""

    segments_s: float  # arithmetic outside of routed experts: attention, routers, shared experts, head
    experts_s: float  # arithmetic of the routed experts
    host_s: float  # Python, sampling not included


@dataclass(frozen=True)
class PromptCost:
    """A prompt step of `tokens` tokens, seconds; `experts` it met, over all layers."""

    tokens: int
    compute_s: float
    host_s: float
    experts: int


@dataclass(frozen=True)
class MachineProfile:
    """What `sluice plan` measured. Rates in bytes a second.

    An expert load costs a + b × its share of cold experts: `load_a_s` + `load_b_s` × cold, `load_error_s` apart (root
    mean square). `read_beside` and `compute_beside` are the shares of their own speed that reading and arithmetic keep
    while both go on. `prefetch` is None where the engine read nothing ahead. Memory that is touched for the first time
    costs `fresh_host_s` more an expert where reads are begun, and `fresh_load_s` more of its load.
    """

    fingerprint: str  # of the model
    machine: str
    threads: int
    reader: str
    ggml: str
    taken: str  # when, UTC
    moe_layers: int
    n_expert: int
    top_k: int
    expert_bytes: float  # the mean over layers
    dense_bytes: int
    ram_bytes_per_s: float
    raw_bytes_per_s: float  # plain reading at the size of the model's reads
    raw_depth: int
    load_a_s: float
    load_b_s: float
    load_error_s: float
    read_beside: float
    compute_beside: float
    fresh_host_s: float
    fresh_load_s: float
    host_read_s: float  # Python an expert read
    sampling_s: float  # Python a token outside of its step
    recall: float | None  # share of a layer's experts that the engine's predictor names
    demand: StepCost
    prefetch: StepCost | None
    prompts: tuple[PromptCost, ...]
    format: int = FORMAT

    @property
    def token_experts(self) -> int:
        """Experts that one token uses, over all layers."""
        return self.moe_layers * self.top_k

    def check(self, path: Path, *, fingerprint: str, machine: str, threads: int, ggml: str) -> None:
        """Raise InputError, naming the difference, unless the profile is of this model, machine and way to run it."""
        for name, value in (("model", fingerprint), ("machine", machine), ("thread count", threads), ("ggml", ggml)):
            own = getattr(self, {"model": "fingerprint", "thread count": "threads"}.get(name, name))
            if own != value:
                detail = "" if name == "model" else f" ({own}, now {value})"
                raise InputError(
                    f"{path}: the profile is of another {name}{detail}: measure again (plan --force), or name another"
                )


def save(profile: MachineProfile, path: Path, *, force: bool = False) -> None:
    """Write a profile. Raises InputError where the file exists and not `force`, or can't be written."""
    if path.exists() and not force:
        raise InputError(f"{path} exists: name another file, or give --force")
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(asdict(profile), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path}: can't be written ({error.strerror or error}): name another file") from None


def load(path: Path) -> MachineProfile:
    """Read a profile. Raises InputError, naming what is wrong, for a file that is no whole profile."""
    try:
        if path.exists() and not path.is_file():  # opening a named pipe would wait for ever
            raise InputError(f"{path}: can't be read (not a regular file): name a profile")
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror or error}): name a profile") from None
    try:
        if len(raw) > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
        value = json.loads(raw)
        if isinstance(value, dict) and value.get("format") != FORMAT:
            raise ValueError(f"format {str(value.get('format'))[:20]}, this version reads {FORMAT}")
        return _checked(_build(MachineProfile, value, "the file"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: no whole machine profile ({error}): measure again (plan --force)") from None


def _build(kind: type, value: Any, where: str) -> Any:
    """`value` as a dataclass of the type `kind`. Raises ValueError naming the field that isn't as it should be."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is no object")
    hints = get_type_hints(kind)
    if unknown := sorted(set(value) - set(hints)):
        raise ValueError(f"{unknown[0][:40]!r} is unknown")
    given = {}
    for each in fields(kind):
        if each.name not in value:
            raise ValueError(f"{each.name} is missing")
        given[each.name] = _field(hints[each.name], value[each.name], each.name)
    return kind(**given)


def _field(hint: Any, value: Any, name: str) -> Any:
    if hint in (StepCost, StepCost | None):
        return None if value is None and hint != StepCost else _build(StepCost, value, name)
    if hint == tuple[PromptCost, ...]:
        if not isinstance(value, list) or not value:
            raise ValueError(f"{name} is no list")
        return tuple(_build(PromptCost, each, name) for each in value)
    if hint == float | None and value is None:
        return None
    if hint is str:
        right = isinstance(value, str)
    elif hint is int:
        right = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53
    else:
        right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not right:
        raise ValueError(f"{name} is {str(value)[:40]!r}")
    return float(value) if hint in (float, float | None) else value


def _checked(profile: MachineProfile) -> MachineProfile:
    """`profile`, if its figures can be divided by and compared. Raises ValueError naming one that can't."""
    for name in (
        "threads", "moe_layers", "n_expert", "top_k", "expert_bytes", "ram_bytes_per_s", "raw_bytes_per_s", "load_b_s",
        "read_beside", "compute_beside", "raw_depth",
    ):  # fmt: skip
        if not getattr(profile, name) > 0:
            raise ValueError(f"{name} is 0")
    for name in ("read_beside", "compute_beside", "recall"):
        if (getattr(profile, name) or 0) > 1:
            raise ValueError(f"{name} is more than 1")
    if profile.moe_layers > MAX_LAYERS or profile.n_expert > MAX_EXPERTS:
        raise ValueError("moe_layers or n_expert is more than any model has")
    if profile.top_k > profile.n_expert:
        raise ValueError("top_k is more than n_expert")
    if any(prompt.tokens < 1 or prompt.experts < 1 for prompt in profile.prompts):
        raise ValueError("prompts has one without tokens")
    return profile
