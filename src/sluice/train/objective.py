"""What the loop asks of a thing to train and of a source of batches; knows neither."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

Metrics = dict[str, float]


class Batches(Protocol):
    """Batches in an order that its seed decides. `state` is JSON-like; `restore` of it gives the same batches again."""

    def next(self) -> Any:
        """The next batch: tensors, arrays, or tuples and lists of such; this process's part of it."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Objective(Protocol):
    """What is trained and by what loss. Subclass it to get the defaults of what most need not say."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """What learns, by names that its checkpoints keep; float32, the same on every call, no parameter twice."""
        ...

    def loss(self, batch: Any) -> tuple[Tensor, Metrics]:
        """The loss of a batch, a scalar, and what else is worth a line of metrics. Gradients are the loop's business.

        `load_entropy` in the metrics lets the loop notice routers that collapse: evenness of the least even layer's
        load, 0 where every token takes the same experts and 1 where all experts are used alike.
        """
        ...

    def validate(self) -> Metrics:
        """Figures on held-out text, by name; `loss` of them decides which checkpoint is the best."""
        ...

    def save_final(self, folder: Path) -> None:
        """Write what the run was for, into the run's folder. Called once, when all steps are done.

        All processes call it, to put together what they have parts of; the first one alone writes.
        """
        ...

    def begin_step(self, step: int, steps: int) -> None:
        """Called before the loss of step `step` (from 0) of `steps`: for what is annealed."""

    def end_step(self) -> None:
        """Called when the step has changed the weights: for what isn't learned by gradients."""

    def lr_scale(self, name: str) -> float:
        """The learning rate of a parameter, as a multiple of the run's."""
        return 1.0

    def state(self) -> dict[str, Tensor]:
        """What else a checkpoint has to keep."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch's tensors on `device`, and its arrays as such."""
    if isinstance(batch, np.ndarray):
        batch = torch.from_numpy(batch)
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(one, device) for one in batch)
    return batch
