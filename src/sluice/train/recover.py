"""Stage 2: heads and an adapter learn, on the path that is served, to write on as a teacher wrote. Knows no files.

The path: the quantised model's weights as they dequantise, the adapter beside them, predicted routes. The prompt of a
text and the first token after it are routed natively. Loss: the mean cross entropy of the teacher's tokens, and, times
a weight, KL(teacher ‖ student) on them, the teacher being the unquantised, natively routed model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sluice.errors import InputError
from sluice.train import processes
from sluice.train.heads import Heads
from sluice.train.lora import digest, factors, save_lora
from sluice.train.objective import Metrics, Objective
from sluice.train.prerouter import kl
from sluice.train.stages import ADAPTER, HEADS, trained
from sluice.train.student import Student
from sluice.train.texts import TextBatch

STAGE = "recover"
Export = Callable[[nn.Module, Path], Any]  # (the adapted model, the run's folder)


@dataclass(frozen=True)
class Served:
    """What stages 2 and 3 train: `model` with its adapter put in, and `heads`. `teacher` is the model unquantised.

    `heads_lr` is the heads' learning rate as a multiple of the adapter's. `facts` go into the heads' file; `export`
    writes what else the run's folder shall have.
    """

    model: nn.Module
    heads: Heads
    teacher: nn.Module | None
    held_out: Sequence[TextBatch]
    heads_lr: float = 1.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    export: Export | None = None


class OnStudentPath(Objective):
    """What stages 2 and 3 share: what learns, how it is measured on held-out text, what is written at the end."""

    stage: str

    def __init__(self, served: Served) -> None:
        """Raises InputError where there is no adapter, and for heads that can't learn or are for another model."""
        heads = served.heads
        if heads.info.weights != "head":
            raise InputError(
                f"{self.stage} trains heads through the routing weights that they give, and these give none (weights "
                f"{heads.info.weights!r}): make heads with `sluice train prerouter`"
            )
        self.adapter = factors(served.model)
        if not self.adapter:
            raise InputError("the model has no adapter to train: put one in")
        self.served, self.heads, self.teacher = served, heads, served.teacher
        self.student = Student(served.model, heads).eval()
        for name, parameter in served.model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        if self.teacher is not None:
            self.teacher.requires_grad_(False).eval()

    def trainable(self) -> dict[str, nn.Parameter]:
        named = {f"heads.{name}": parameter for name, parameter in self.heads.named_parameters()}
        return named | {f"adapter.{name}": parameter for name, parameter in self.adapter.items()}

    def lr_scale(self, name: str) -> float:
        return self.served.heads_lr if name.startswith("heads.") else 1.0

    @torch.no_grad()
    def validate(self) -> Metrics:
        """`loss` of the teacher's held-out tokens; with a teacher its own loss, `teacher_loss`, and `kl` from it."""
        sums: dict[str, float] = {}
        seen = 0
        for given in self.served.held_out:
            batch = given.to(self.device)
            logits, targets = self.student(batch.ids, batch.native).logits[batch.answered].float(), batch.targets
            found = {"loss": F.cross_entropy(logits, targets)}
            if self.teacher is not None:
                taught = self.taught(batch)
                found |= {"teacher_loss": F.cross_entropy(taught, targets), "kl": kl(taught, logits)}
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(targets)
            seen += len(targets)
        return {name: value / seen for name, value in sums.items()}

    def save_final(self, folder: Path) -> None:
        if not processes.place().first:
            return
        facts = {**self.served.facts, "adapter": digest(self.adapter)}
        self.heads.save(folder / HEADS, trained(self.stage, self.heads, facts), force=True)
        save_lora(self.served.model, folder / ADAPTER)
        if self.served.export is not None:
            self.served.export(self.served.model, folder)

    @property
    def device(self) -> torch.device:
        return next(self.student.model.parameters()).device

    def taught(self, batch: TextBatch) -> Tensor:
        """The teacher's logits [n_answered, V], float32."""
        assert self.teacher is not None
        with torch.no_grad():
            return self.teacher(input_ids=batch.ids, use_cache=False).logits[batch.answered].float()


class Recover(OnStudentPath):
    """Stage 2, on batches of a teacher's texts."""

    stage = STAGE

    def __init__(self, served: Served, kl_weight: float = 0.0) -> None:
        """Raises InputError as its base, and for a weight that asks for a teacher where there is none."""
        super().__init__(served)
        if not 0 <= kl_weight < float("inf"):
            raise InputError(f"a weight of {kl_weight} for the divergence is out of range: give 0 or more")
        if kl_weight and self.teacher is None:
            raise InputError("the divergence from a teacher has a weight, and there is no teacher: give one")
        self.kl_weight = kl_weight

    def loss(self, batch: TextBatch) -> tuple[Tensor, Metrics]:
        batch = batch.to(self.device)
        logits = self.student(batch.ids, batch.native).logits[batch.answered].float()
        share = processes.weight(len(batch.targets))
        entropy = share * F.cross_entropy(logits, batch.targets)
        if not self.kl_weight:
            return entropy, {}
        divergence = share * kl(self.taught(batch), logits)
        figures = {"text_loss": float(entropy.detach()), "kl": float(divergence.detach())}
        return entropy + self.kl_weight * divergence, figures
