"""Folders of models: opened as they were saved, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train.toys import toy_model

from sluice.errors import InputError
from sluice.train.opening import open_model

torch.set_num_threads(1)
ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    toy_model().save_pretrained(folder)
    return folder


def test_a_model_is_opened_as_it_was_saved(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = open_model(saved)
    assert not found.training
    for (name, mine), theirs in zip(found.state_dict().items(), toy_model().state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    said = capfd.readouterr()
    assert "Loading" not in said.out + said.err


def without_router(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[ROUTER]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def not_finite(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[ROUTER][3, 2] = torch.inf
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def of_another_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no model's folder"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json can't be used"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "nothing"}'), "config.json can't be used"),
        (of_another_family, "'llama' models can't be trained: choose one of mixtral"),
        (lambda folder: (folder / "model.safetensors").unlink(), "its weights can't be read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"nothing"), "its weights can't be read"),
        (without_router, f"its files lack {ROUTER}"),
        (not_finite, f"{ROUTER} has numbers that are not finite"),
    ],
)
def test_what_is_no_whole_model_is_refused_in_one_line(
    saved: Path, tmp_path: Path, spoil: Callable[[Path], object], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    spoil(folder)
    with pytest.raises(InputError) as caught:
        open_model(folder)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not capfd.readouterr().out
