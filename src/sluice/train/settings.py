"""How long, how fast and in what numbers a run of training goes; knows no model and no loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from sluice.errors import InputError

SCHEDULES = ("cosine", "wsd", "constant")
DTYPES = ("auto", "float32", "bfloat16")
MAX_POSITIONS = 1 << 26  # of a step: more than any run of text takes, and than memory can hold the ids of
WSD_DECAY = 0.2  # the last part of a run, in which a wsd schedule's rate falls


@dataclass(frozen=True)
class Settings:
    """Of one run. `batch` sequences of `length` positions a step, all processes together.

    The learning rate rises to `lr` over `warmup` steps, then falls to `lr` × `final_lr`: over all the run (`cosine`),
    linearly over its last fifth (`wsd`), or never (`constant`). `weight_decay` is for matrices alone. Gradients longer
    than `clip` are shortened to it. A metrics line every `log_every` steps, a checkpoint every `save_every`, of which
    the last `keep` stay, and held-out figures every `valid_every` (0: at the end only). `dtype` of matrix products:
    `auto` is bfloat16 on an accelerator that has it and float32 elsewhere; weights are float32 always.
    """

    steps: int
    batch: int
    length: int
    lr: float = 1e-3
    warmup: int = 0
    schedule: str = "cosine"
    final_lr: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0
    log_every: int = 10
    save_every: int = 200
    valid_every: int = 200
    keep: int = 2
    dtype: str = "auto"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or isinstance(value, bool)):
                raise InputError(f"{field.name} is {value!r}: give a whole number")
            if field.type == "float":
                if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
                    raise InputError(f"{field.name} is {value!r}: give a number")
                if value < 0:
                    raise InputError(f"{field.name} is {value:g}: give a number of at least 0")
        for name in ("steps", "batch", "length", "log_every", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: give a whole number of at least 1")
        if self.tokens_per_step > MAX_POSITIONS:
            raise InputError(f"a batch of {self.batch} rows of {self.length} is more than {MAX_POSITIONS >> 20} Mi "
                             "tokens a step: give fewer rows, or shorter ones")  # fmt: skip
        if self.warmup < 0 or self.valid_every < 0 or self.seed < 0:
            raise InputError("warmup, valid_every and seed must be at least 0")
        if self.clip == 0 or max(self.beta1, self.beta2) >= 1:
            raise InputError("clip must be more than 0, beta1 and beta2 less than 1")
        if self.schedule not in SCHEDULES:
            raise InputError(f"schedule {self.schedule!r} is unknown: choose from {', '.join(SCHEDULES)}")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype {self.dtype!r} is unknown: choose from {', '.join(DTYPES)}")

    @property
    def tokens_per_step(self) -> int:
        """Positions that a step learns from."""
        return self.batch * self.length

    def lr_at(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        first = self.warmup if self.schedule == "cosine" else max(self.warmup, round(self.steps * (1 - WSD_DECAY)))
        done = min(1.0, max(0.0, (step - first) / max(1, self.steps - first)))
        left = (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return self.lr * (self.final_lr + (1 - self.final_lr) * left)
