"""The loop: resumed is uninterrupted, divergence is named, a run's folder is one recipe's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sluice.errors import InputError
from sluice.train.divergence import UNEVEN_STEPS, WINDOW, DivergedError, Watch
from sluice.train.loop import Settings, Stopped, fit
from sluice.train.objective import Objective

torch.set_num_threads(1)


class Numbers:
    """Batches of random numbers; the n-th is decided by n alone."""

    def __init__(self) -> None:
        self.given = 0

    def next(self) -> tuple[Tensor, Tensor]:
        self.given += 1
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.given))
        return x, x.sum(1, keepdim=True)

    def state(self) -> dict[str, Any]:
        return {"given": self.given}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]


class Fitted(Objective):
    """A small network, with noise of torch's own generator in its loss and a state of its own."""

    def __init__(self, *, bad_at: int = -1, poison: str = "", evenness: float = 1.0) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
        self.bad_at, self.poison, self.evenness = bad_at, poison, evenness
        self.seen = torch.zeros(())
        self.finals = 0
        self.step = 0

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    def begin_step(self, step: int, steps: int) -> None:
        self.step = step

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, float]]:
        x, y = batch
        loss = (self.net(x + 0.1 * torch.randn_like(x)) - y).square().mean()
        if self.step >= self.bad_at >= 0 and self.poison == "loss":
            loss = loss * math.nan
        if self.step >= self.bad_at >= 0 and self.poison == "jump":
            loss = loss * 1e3 + 1e3
        if self.step >= self.bad_at >= 0 and self.poison == "gradient":
            loss = loss + (self.net[2].weight * 0).sqrt().sum()  # type: ignore[operator]
        return loss, {"load_entropy": self.evenness}

    def end_step(self) -> None:
        self.seen = self.seen + 1

    def validate(self) -> dict[str, float]:
        x = torch.linspace(-1, 1, 32).view(8, 4)
        return {"loss": float((self.net(x) - x.sum(1, keepdim=True)).square().mean())}

    def save_final(self, folder: Path) -> None:
        self.finals += 1
        (folder / "final.txt").write_text(str(int(self.seen)))

    def state(self) -> dict[str, Tensor]:
        return {"seen": self.seen}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.seen = state["seen"]


def settings(**changed: Any) -> Settings:
    base: dict[str, Any] = {
        "steps": 40, "batch": 8, "length": 1, "lr": 1e-2, "warmup": 5, "log_every": 7, "save_every": 10,
        "valid_every": 9, "seed": 1,
    }  # fmt: skip
    return Settings(**(base | changed))


def run(out: Path, objective: Fitted | None = None, *, stop_at: int | None = None, **changed: Any) -> dict[str, Any]:
    """Train; `stop_at` asks for the end when so many steps are done."""
    done = 0

    def progress(now: float, total: float) -> None:
        nonlocal done
        done = int(now)

    asked = settings(**changed)
    return fit(
        objective or Fitted(), Numbers(), asked, out, recipe={"lr": asked.lr, "steps": asked.steps},
        progress=progress, stop=lambda: stop_at is not None and done + 1 >= stop_at,
    )  # fmt: skip


def lines(out: Path) -> list[dict[str, Any]]:
    """Metrics without the clock's."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("tok_per_s", "elapsed_s")} for line in found]


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "checkpoints" / "step-000040" / "model.safetensors")


@pytest.mark.parametrize("at", [(1,), (10,), (13, 27), (39,)])
def test_resumed_is_uninterrupted(tmp_path: Path, at: tuple[int, ...]) -> None:
    whole = run(tmp_path / "whole")
    for step in at:
        with pytest.raises(Stopped, match=f"step-{step:06d}.*the same command"):
            run(tmp_path / "parts", stop_at=step)
    result = run(tmp_path / "parts")
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert (result["valid"], result["best"], result["tokens"]) == (whole["valid"], whole["best"], 320)
    assert (tmp_path / "parts" / "final.txt").read_text() == "40"


def test_a_crash_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    run(tmp_path / "whole")

    class Crash(Exception):
        pass

    class Crashing(Fitted):
        def begin_step(self, step: int, steps: int) -> None:
            if step == 26:
                raise Crash
            super().begin_step(step, steps)

    with pytest.raises(Crash):
        run(tmp_path / "parts", Crashing())
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')  # killed while writing
    run(tmp_path / "parts")
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_training_learns_and_says_so(tmp_path: Path) -> None:
    seen: list[Mapping[str, Any]] = []
    result = fit(Fitted(), Numbers(), settings(steps=300), tmp_path / "run", recipe={}, report=seen.append)
    logged = [line for line in seen if "loss" in line]
    assert logged[0]["loss"] > 3 * logged[-1]["loss"]
    assert [line["step"] for line in logged] == [*range(7, 300, 7), 300]
    assert [line["step"] for line in seen if "valid" in line] == [*range(9, 300, 9), 300]
    assert result["valid"]["loss"] == seen[-1]["valid"]["loss"]


def test_last_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    class Worse(Fitted):
        def validate(self) -> dict[str, float]:
            return {"loss": abs(float(self.seen) - 9)}

    result = run(tmp_path / "run", Worse())
    kept = sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-000009", "step-000030", "step-000040"]
    assert result["best"] == {"step": 9, "loss": 0.0}


def test_an_interruption_costs_no_checkpoint_that_is_to_stay(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(tmp_path / "run", stop_at=13, keep=3, valid_every=0)
    with pytest.raises(Stopped):
        run(tmp_path / "run", stop_at=25, keep=3, valid_every=0)
    run(tmp_path / "run", keep=3, valid_every=0)
    kept = sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-000020", "step-000030", "step-000040"]


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = run(tmp_path / "run")
    again = Fitted()
    assert run(tmp_path / "run", again) == first and again.finals == 0


def test_another_recipe_is_refused_by_name(tmp_path: Path) -> None:
    run(tmp_path / "run")
    with pytest.raises(InputError, match=r"another recipe: lr is 0\.01 there and 0\.02 here"):
        run(tmp_path / "run", lr=2e-2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match=r"no recipe\.json"):
        run(tmp_path / "mine")


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(tmp_path / "run", stop_at=12)
    other = Fitted()
    other.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    with pytest.raises(InputError, match=r"another model: 0\.weight is of shape \[16, 4\] there.*\[8, 4\]"):
        run(tmp_path / "run", other)


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(tmp_path / "run", stop_at=12)
    state = tmp_path / "run" / "checkpoints" / "step-000012" / "state.pt"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(InputError, match=r"step-000012: is no whole checkpoint"):
        run(tmp_path / "run")


@pytest.mark.parametrize(
    ("poison", "cause"), [("loss", "the loss is nan"), ("gradient", r"the gradient of 2\.weight is not finite")]
)
def test_what_is_no_number_stops_before_the_weights_are_spoilt(tmp_path: Path, poison: str, cause: str) -> None:
    objective = Fitted(bad_at=25, poison=poison)
    with pytest.raises(DivergedError, match=rf"in step 26: {cause}.*checkpoint is .*step-000020"):
        run(tmp_path / "run", objective)
    assert all(bool(torch.isfinite(p).all()) for p in objective.trainable().values())


def test_a_loss_that_jumped_and_stays_stops(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"above 2 times its median .* for 20 steps; the last good checkpoint"):
        run(tmp_path / "run", Fitted(bad_at=WINDOW + 30, poison="jump"), steps=400)


def test_load_that_collapsed_stops(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=rf"in step {UNEVEN_STEPS}: the load has collapsed"):
        run(tmp_path / "run", Fitted(evenness=0.01), steps=400)


def test_a_single_outlier_is_no_divergence() -> None:
    watch = Watch()
    for i in range(3 * WINDOW):
        assert watch.loss(1e6 if i % 50 == 49 else 1.0, 0.05 if i % 250 else 0.5) is None


def test_learning_rates() -> None:
    cosine = settings(steps=105, warmup=5, final_lr=0.1, lr=1.0)
    assert [cosine.lr_at(step) for step in (0, 4, 5)] == [0.2, 1.0, 1.0]
    assert cosine.lr_at(55) == pytest.approx(0.55)
    assert cosine.lr_at(105) == pytest.approx(0.1)
    wsd = settings(steps=100, schedule="wsd", final_lr=0.0, lr=1.0)
    assert wsd.lr_at(79) == 1.0 and wsd.lr_at(90) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"lr": -1.0}, "lr is -1"),
        ({"schedule": "sawtooth"}, "cosine, wsd, constant"),
        ({"dtype": "int8"}, "auto, float32, bfloat16"),
        ({"batch": 2.5}, "whole number"),
        ({"batch": 10**9, "length": 8}, "Mi tokens a step: give fewer rows"),
        ({"beta2": 1.0}, "less than 1"),
    ],
)
def test_settings_are_checked(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        settings(**changed)


def test_a_checkpoint_without_its_state_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(tmp_path / "run", stop_at=12)
    torch.save({"optimizer": {}}, tmp_path / "run" / "checkpoints" / "step-000012" / "state.pt")
    with pytest.raises(InputError, match=r"step-000012: has no state of this run \(KeyError"):
        run(tmp_path / "run")


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with pytest.raises(Stopped):
        run(tmp_path / "run", stop_at=20)
    run(tmp_path / "run")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("loss")}
    assert shown == pytest.approx({line["step"]: line["loss"] for line in lines(tmp_path / "run") if "loss" in line})
    held_out = {event.step: event.value for event in events.Scalars("valid/loss")}
    assert held_out == pytest.approx({x["step"]: x["valid"]["loss"] for x in lines(tmp_path / "run") if "valid" in x})
