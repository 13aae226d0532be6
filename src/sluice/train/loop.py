"""The steps of a run: gradients, weights, checkpoints, metrics, and an end that can be gone on from.

Knows an objective by its loss and its parameters alone: no model, no text. A run that was stopped and goes on has the
weights and metrics of one that was not, bit for bit, on a CPU with as many threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from sluice.errors import InputError, SluiceError
from sluice.train import processes, sharding
from sluice.train.checkpoint import RunFolder, load, step_of
from sluice.train.divergence import DivergedError, Watch
from sluice.train.metrics import Means, Metrics
from sluice.train.objective import Batches, Objective, to_device
from sluice.train.settings import Settings

__all__ = ["Batches", "DivergedError", "Objective", "Settings", "Stopped", "fit"]

Progress = Callable[[float, float], None]  # (steps done, steps)
Report = Callable[[Mapping[str, Any]], None]  # a line of metrics
Stop = Callable[[], object]


class Stopped(SluiceError):
    """Training was asked to stop, and did; the text says where its checkpoint is."""

    def __init__(self, step: int, checkpoint: Path) -> None:
        super().__init__(f"stopped after step {step}, saved in {checkpoint}: the same command goes on from there")
        self.step, self.checkpoint = step, checkpoint


def fit(
    objective: Objective, batches: Batches, settings: Settings, out: str | Path, *, recipe: Mapping[str, Any],
    branch: Path | None = None, progress: Progress | None = None, report: Report | None = None,
    stop: Stop = lambda: False,
) -> dict[str, Any]:  # fmt: skip
    """Train until `settings.steps` steps are done, in the folder `out`; returns what `out/result.json` then holds.

    `recipe`, JSON-like, is all that decides the outcome: a folder of another recipe is refused, one of the same goes on
    from its last checkpoint, and a finished one's result is returned at once. `branch` is another run's checkpoint,
    with which this one begins: what that had done counts as done, its time too. `stop` is asked after each step; when
    it says so, a checkpoint is saved and Stopped raised. Raises InputError for a checkpoint of another model or of
    other batches, DivergedError when losses or loads have gone wrong.
    """
    here = processes.place()
    if here.first:
        RunFolder(out, recipe)
    processes.wait()
    run = RunFolder(out, recipe, write=False)
    if (result := run.result) is not None:
        return result
    return _Fit(objective, batches, settings, run, branch).go(progress, report, stop)


class _Fit:
    """One call of `fit`: what a checkpoint holds, and the steps."""

    def __init__(
        self, objective: Objective, batches: Batches, settings: Settings, run: RunFolder, branch: Path | None
    ) -> None:  # fmt: skip
        self.objective, self.batches, self.settings, self.run = objective, batches, settings, run
        self.here = processes.place()
        self.parameters = objective.trainable()
        if not self.parameters:
            raise InputError("nothing is there to be trained: name what is to learn")
        self.optimizer = _adamw(objective, self.parameters, settings)
        self.watch, self.means = Watch(), Means()
        self.done, self.elapsed_s = 0, 0.0
        self.valid: dict[str, float] = {}  # the last held-out figures
        self.best: dict[str, Any] | None = None  # step and held-out loss of the best checkpoint
        torch.manual_seed(settings.seed + self.here.rank)
        if steps := run.steps():
            self._restore(run.folder(steps[-1]), "remove it, to go on from the one before")
        elif branch is not None:
            if step_of(branch) >= settings.steps:
                raise InputError(f"{branch}: has {step_of(branch)} steps done and the run {settings.steps} in all: "
                                 "name an earlier checkpoint, or give the run more steps")  # fmt: skip
            self._restore(branch, "name another checkpoint")
            self.best = None  # its checkpoint is in the other run's folder

    # --- steps

    def go(self, progress: Progress | None, report: Report | None, stop: Stop) -> dict[str, Any]:
        settings, began, before_s = self.settings, perf_counter(), self.elapsed_s
        steps, stepping_s = 0, 0.0  # since the last line of metrics
        with ExitStack() as stack:
            metrics = stack.enter_context(Metrics(self.run.path, self.done)) if self.here.first else None

            def write(line: dict[str, Any]) -> None:
                if metrics is not None:
                    metrics.write(line)
                    if report is not None:
                        report(line)

            while self.done < settings.steps:
                step_began = perf_counter()
                self._step()
                steps, stepping_s = steps + 1, stepping_s + perf_counter() - step_began
                if self.done % settings.log_every == 0 or self.done == settings.steps:
                    self.elapsed_s = before_s + perf_counter() - began
                    write(self._line(steps, stepping_s))
                    steps, stepping_s = 0, 0.0
                better = self._validate(write)
                self.elapsed_s = before_s + perf_counter() - began
                if processes.averages({"stop": float(bool(stop()))})["stop"] and self.done < settings.steps:
                    raise Stopped(self.done, self._save())
                if better or self.done % settings.save_every == 0 or self.done == settings.steps:
                    self._save()
                if progress is not None:
                    progress(self.done, settings.steps)
        return self._finish()

    def _step(self) -> None:
        settings, objective = self.settings, self.objective
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr_at(self.done) * group["scale"]
        objective.begin_step(self.done, settings.steps)
        batch = to_device(self.batches.next(), self.here.device)
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss, figures = objective.loss(batch)
        seen = processes.averages({"loss": float(loss.detach()), **figures})
        # the whole loss has parts that schedules move; what text costs is judged where it is known
        judged = seen.get("cross_entropy", seen["loss"]) if math.isfinite(seen["loss"]) else seen["loss"]
        if cause := self.watch.loss(judged, seen.get("load_entropy")):
            raise self._diverged(cause)
        loss.backward()
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        processes.average(g for g in gradients if not sharding.is_part(g))
        length = sharding.norm(gradients)
        norm = float(length)
        if not norm < float("inf"):
            raise self._diverged(f"the gradient of {self._first_bad()} is not finite")
        sharding.clip(self.parameters.values(), settings.clip, length)
        self.optimizer.step()
        objective.end_step()
        self.means.add({**seen, "grad_norm": norm})
        self.done += 1

    def _autocast(self) -> AbstractContextManager[Any]:
        device = self.here.device
        dtype = self.settings.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
        return torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()

    def _line(self, steps: int, took_s: float) -> dict[str, Any]:
        tokens = self.settings.tokens_per_step
        return {
            "step": self.done,
            "tokens": self.done * tokens,
            **self.means.take(),
            "lr": self.settings.lr_at(self.done - 1),
            "tok_per_s": steps * tokens / took_s if took_s > 0 else None,
            "elapsed_s": self.elapsed_s,
        }

    def _validate(self, write: Callable[[dict[str, Any]], None]) -> bool:
        """Look at held-out text where it is time to; whether this is the best so far."""
        every = self.settings.valid_every
        if self.done != self.settings.steps and not (every and self.done % every == 0):
            return False
        with torch.no_grad(), self._autocast():
            self.valid = processes.averages(self.objective.validate())
        if not self.valid:
            return False
        write({"step": self.done, "valid": self.valid})
        loss = self.valid.get("loss", math.inf)
        if not loss < (math.inf if self.best is None else self.best["loss"]):
            return False
        self.best = {"step": self.done, "loss": loss}
        return True

    def _first_bad(self) -> str:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and not bool(torch.isfinite(sharding.joined(parameter.grad)).all()):
                return name
        return "all parameters together"

    def _diverged(self, cause: str) -> DivergedError:
        steps = self.run.steps()
        good = f"the last good checkpoint is {self.run.folder(steps[-1])}" if steps else "there is no checkpoint yet"
        return DivergedError(f"{self.run.path}: training diverged in step {self.done + 1}: {cause}; {good}: go on with "
                             "a lower learning rate in another folder")  # fmt: skip

    # --- checkpoints

    def _save(self) -> Path:
        weights = {name: sharding.joined(one.detach()) for name, one in self.parameters.items()}
        settled = {
            "optimizer": _joined(self.optimizer.state_dict()["state"]),
            "objective": dict(self.objective.state()),
            "batches": self.batches.state(),
            "watch": self.watch.state(),
            "means": self.means.state(),
            "valid": self.valid,
            "best": self.best,
            "elapsed_s": self.elapsed_s,
            "rng": processes.gather(_rng_state()),
        }
        if self.here.first:
            self.run.save(self.done, weights, settled)
            best = None if self.best is None else self.best["step"]
            self.run.tidy(self.settings.keep, self.settings.save_every, best)
        processes.wait()
        return self.run.folder(self.done)

    def _restore(self, folder: Path, remedy: str) -> None:
        """Take a checkpoint's place. Raises InputError, naming the `remedy`, where it can't be taken."""
        weights, state = load(folder, remedy)
        _load(self.parameters, weights, folder)
        try:
            known = self.optimizer.state_dict()
            self.optimizer.load_state_dict({**known, "state": self._parts(state["optimizer"])})
            self.objective.restore(state["objective"])
            self.batches.restore(state["batches"])
            self.watch.restore(state["watch"])
            self.means = Means(state["means"])
            self.valid, self.best, self.elapsed_s = state["valid"], state["best"], state["elapsed_s"]
            if len(state["rng"]) == self.here.world:
                _set_rng_state(state["rng"][self.here.rank])
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            said = f"{type(error).__name__} {error}".splitlines()[0][:120]
            raise InputError(f"{folder}: has no state of this run ({said}): {remedy}") from None
        self.done = step_of(folder)

    def _parts(self, state: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
        """What this process keeps of an optimizer's state, which numbers parameters as its groups have them."""
        members = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {
            i: {
                key: sharding.part_of(value, members[i]) if value.shape == members[i].shape else value
                for key, value in one.items()
            }
            for i, one in state.items()
        }

    def _finish(self) -> dict[str, Any]:
        tokens = self.done * self.settings.tokens_per_step
        result = {
            "run": str(self.run.path),
            "steps": self.done,
            "tokens": tokens,
            "valid": self.valid,
            "best": self.best,
            "elapsed_s": self.elapsed_s,
            "tok_per_s": tokens / self.elapsed_s if self.elapsed_s > 0 else None,
            "parameters": sum(p.numel() for p in self.parameters.values()),
            "processes": self.here.world,
            "split": self.here.split,
            "threads": torch.get_num_threads(),
            "device": self.here.device.type,
        }
        self.objective.save_final(self.run.path)
        if self.here.first:
            self.run.finish(result)
        processes.wait()
        return result


def _adamw(objective: Objective, parameters: Mapping[str, nn.Parameter], settings: Settings) -> torch.optim.AdamW:
    """AdamW, with groups by how fast a parameter learns and whether it decays: matrices alone do."""
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = settings.weight_decay if parameter.ndim >= 2 else 0.0
        groups.setdefault((objective.lr_scale(name), decay, sharding.is_part(parameter)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": decay, "scale": scale, "lr": settings.lr * scale}
            for (scale, decay, _), members in groups.items()
        ],
        betas=(settings.beta1, settings.beta2),
        fused=True,
    )


def _joined(state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """An optimizer's state with whole tensors."""
    return {
        i: {key: sharding.joined(value) if isinstance(value, Tensor) else value for key, value in one.items()}
        for i, one in state.items()
    }


def _load(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor], folder: Path) -> None:
    """Put a checkpoint's weights into the parameters. Raises InputError where they are of another model."""
    for name in {**parameters, **weights}:
        there, here = weights.get(name), parameters.get(name)
        if there is None or here is None or there.shape != here.shape:
            shape = "missing" if there is None else f"of shape {list(there.shape)}"
            wanted = "none" if here is None else f"one of shape {list(here.shape)}"
            raise InputError(f"{folder}: is a checkpoint of another model: {name} is {shape} there, and the model has "
                             f"{wanted}: name another run's folder")  # fmt: skip
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(sharding.part_of(weights[name], parameter))


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
