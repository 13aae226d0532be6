"""`sluice prerouter`: init writes heads, show checks them and says what they are, refusals are one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import Cli
from tiny import write_tiny

from sluice.routing import head_bytes, open_prerouter, write_prerouter


@pytest.fixture
def heads(cli: Cli, tiny_path: Path, tmp_path: Path) -> Path:
    path = tmp_path / "heads.safetensors"
    made = cli("prerouter", "init", tiny_path, path, "--hidden", 16)
    assert (made.code, made.err) == (0, "") and "2 heads" in made.out
    return path


def test_show_says_what_a_file_is(cli: Cli, heads: Path, tiny_path: Path) -> None:
    facts = cli("prerouter", "show", heads, "--json").json
    assert facts["predicts"] == [[0, 1], [1, 2]] and facts["first_predicted"] == 1
    assert (facts["n_embd"], facts["n_expert"], facts["top_k"], facts["hidden"]) == (256, 8, 2, [16])
    assert facts["bytes"] == heads.stat().st_size
    assert facts["head_bytes"] == head_bytes(open_prerouter(heads))
    assert facts["training"] == {"stage": "init", "seed": 0} and facts["weights"] == "head"
    assert facts["fits"] is None
    assert cli("prerouter", "show", heads, tiny_path, "--json").json == facts | {"fits": True}
    shown = cli("prerouter", "show", heads, tiny_path)
    assert shown.code == 0 and "layers 1–2 of 3" in shown.out and "the one given" in shown.out


def test_init_prints_what_it_wrote(cli: Cli, heads: Path, tiny_path: Path) -> None:
    words = ("prerouter", "init", tiny_path, heads, "--hidden", 4, "--seed", 3, "--type", "f16", "--json")
    refused = cli(*words)
    assert refused.code == 2 and "exists already" in refused.err and refused.err.count("\n") == 1
    facts = cli(*words, "--force").json
    assert (facts["hidden"], facts["types"], facts["training"]["seed"]) == ([4], ["F16"], 3)
    assert facts == cli("prerouter", "show", heads, "--json").json


def test_another_model_is_refused(cli: Cli, heads: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "o.gguf", n_layers=2).path
    refused = cli("prerouter", "show", heads, other)
    assert (refused.code, refused.out) == (2, "")
    assert "layers 3, this model has 2" in refused.err and refused.err.count("\n") == 1


def test_show_reads_every_number(cli: Cli, heads: Path) -> None:
    file = open_prerouter(heads)
    tensors = {name: tensor.read() for name, tensor in file.tensors.items()}
    tensors["blk.1.fc2.weight"][7, 15] = np.nan
    write_prerouter(heads, file.info, tensors, force=True)
    refused = cli("prerouter", "show", heads)
    assert refused.code == 2 and "tensor blk.1.fc2.weight has nan in row 7" in refused.err


def test_what_is_no_file_of_heads(cli: Cli, tiny_path: Path) -> None:
    refused = cli("prerouter", "show", tiny_path)
    assert refused.code == 2 and "no safetensors file" in refused.err and refused.err.count("\n") == 1
