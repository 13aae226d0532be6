"""Heads in PyTorch against their definition, their files, and the files of `sluice prerouter init`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from routing.made_heads import defined_logits, made_file, made_info, made_tensors
from tiny import T, write_tiny
from tiny_moe import EXPERTS, TOP_K, WIDTH, tiny_model

from sluice.errors import InputError
from sluice.ggml import load_library
from sluice.gguf import open_gguf
from sluice.models import family_of as served_family
from sluice.models.fingerprint import fingerprint
from sluice.routing import init_prerouter, open_prerouter
from sluice.train.families import family_of
from sluice.train.heads import Heads, fingerprints

torch.set_num_threads(1)


@pytest.mark.parametrize("skip_bias", [True, False])
def test_heads_of_a_file_compute_what_they_are_defined_to(tmp_path: Path, skip_bias: bool) -> None:
    info = made_info()
    tensors = made_tensors(info, skip_bias=skip_bias)
    made_file(tmp_path / "h", info, tensors)
    heads = Heads.open(tmp_path / "h")
    rng = np.random.default_rng(1)
    h = rng.standard_normal((6, info.n_embd)).astype(np.float32)
    here, before = (np.stack([rng.permutation(8)[:2] for _ in range(6)]) for _ in range(2))
    assert list(heads) == ["0", "2", "3"]
    for owner in info.owners:
        reads = info.reads_before(owner)
        with torch.no_grad():
            ours = heads.head(owner)(
                torch.from_numpy(h), torch.from_numpy(here), torch.from_numpy(before) if reads else None
            )
        wanted = defined_logits(tensors, owner, 8, h, here, before if reads else None)
        np.testing.assert_allclose(ours.numpy(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_file_read_and_written_again_is_the_same(tmp_path: Path, dtype: Any) -> None:
    info = made_info(owners=(2, 3), first_predicted=3)
    first = made_file(tmp_path / "a", info, dtype=dtype)
    heads = Heads.open(tmp_path / "a")
    heads.save(tmp_path / "b", {"stages": ["prerouter"]}, type="f32" if dtype == np.float32 else "f16")
    again = open_prerouter(tmp_path / "b")
    assert again.info == replace(info, training={"stages": ["prerouter"]})
    assert Heads.open(tmp_path / "b").stages == ("prerouter",)
    for name, tensor in first.tensors.items():
        read = tensor.read()
        if name == "blk.2.fc1.weight":  # layer 1 has no experts: the columns that would read its are never used
            read[:, 24 + 8 :] = 0
        np.testing.assert_array_equal(again.tensors[name].read(), read)
    with pytest.raises(InputError, match="exists already"):
        heads.save(tmp_path / "b", {})


def test_heads_that_go_unused_are_left_out(tmp_path: Path) -> None:
    made_file(tmp_path / "a", made_info(owners=(0, 2, 3, 4), first_predicted=3))
    heads = Heads.open(tmp_path / "a")
    assert list(heads) == ["2", "3"]
    heads.save(tmp_path / "b", {})
    assert open_prerouter(tmp_path / "b").info.owners == (2, 3)


def test_numbers_that_no_head_can_have_are_not_written(tmp_path: Path) -> None:
    made_file(tmp_path / "a")
    heads = Heads.open(tmp_path / "a")
    for wrong in (float("nan"), float("inf"), 70000.0):
        with torch.no_grad():
            heads.head(2).fc2.weight[1, 2] = wrong
        with pytest.raises(InputError, match=r"blk\.2\.fc2\.weight .*diverged"):
            heads.save(tmp_path / "b", {})
    assert not (tmp_path / "b").exists()
    with pytest.raises(InputError, match="choose from f32, f16"):
        heads.save(tmp_path / "b", {}, type="bf16")


def test_untrained_heads_are_the_next_layers_routers() -> None:
    model = tiny_model()
    heads = Heads.untrained(model, hidden=12, seed=3, name="tiny")
    info = heads.info
    assert (info.owners, info.first_predicted, info.top_k, info.name) == ((0, 1, 2), 1, TOP_K, "tiny")
    assert info.training == {"stages": [], "seed": 3} and heads.stages == ()
    h, ids = torch.randn(5, WIDTH), torch.randint(0, EXPERTS, (5, TOP_K))
    with torch.no_grad():
        for owner, router in list(family_of(model).routers(model).items())[1:]:
            head = heads.head(owner - 1)
            assert torch.equal(head(h, ids, None if owner == 1 else ids), router(h)[0])
            assert head.fc1.out_features == 12 and bool(head.fc1.weight.abs().max() > 0)
    again, other = (Heads.untrained(model, hidden=12, seed=seed) for seed in (3, 4))
    assert torch.equal(again.head(1).before, heads.head(1).before)  # type: ignore[arg-type]
    assert not torch.equal(other.head(1).here, heads.head(1).here)


def test_sizes_out_of_range_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(InputError, match="width 0"):
        Heads.untrained(model, hidden=0)
    with pytest.raises(InputError, match="choose from head, router"):
        Heads.untrained(model, weights="both")
    with pytest.raises(InputError, match="nothing to predict from"):
        Heads.untrained(tiny_model("qwen3_moe", mlp_only_layers=[0, 1, 2], intermediate_size=16))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A GGUF file, and a model of transformers' with its routers."""
    stored = write_tiny(
        tmp_path_factory.mktemp("heads") / "m.gguf", expert_type=T.Q8_0, n_layers=4, n_embd=WIDTH, n_head=2,
        n_head_kv=1, head_dim=16, n_ff_exp=32, n_expert=EXPERTS, top_k=TOP_K,
    )  # fmt: skip
    model = tiny_model()
    with torch.no_grad():
        for layer, router in family_of(model).routers(model).items():
            weight = stored.weights[f"blk.{layer}.ffn_gate_inp.weight"]
            router.weight.copy_(torch.from_numpy(np.array(weight)))  # type: ignore[operator]
    return stored.path, model


def test_fingerprints_are_the_engines(both: tuple[Path, torch.nn.Module]) -> None:
    path, model = both
    file = open_gguf(path, load_library())
    spec = served_family(file).read_spec(file)
    assert fingerprints(model)["F32"] == fingerprint(file, spec)
    assert fingerprints(model.to(torch.float32))["BF16"] != fingerprint(file, spec)


def test_heads_of_the_command_are_those_made_here(both: tuple[Path, torch.nn.Module], tmp_path: Path) -> None:
    path, model = both
    init_prerouter(path, tmp_path / "theirs", load_library(), hidden=8)
    theirs, ours = Heads.open(tmp_path / "theirs"), Heads.untrained(model, hidden=8)
    theirs.check_model(model)
    assert replace(theirs.info, name="", training={}) == replace(ours.info, training={})
    for owner in ours.info.owners:
        assert torch.equal(theirs.head(owner).skip.weight, ours.head(owner).skip.weight)
        assert theirs.head(owner).fc1.weight.shape == ours.head(owner).fc1.weight.shape


def test_heads_of_other_models_are_refused_with_the_difference(tmp_path: Path) -> None:
    model = tiny_model()
    heads = Heads.untrained(model)
    heads.check_model(model)
    with torch.no_grad():
        next(iter(family_of(model).routers(model).values())).weight.mul_(2)  # type: ignore[operator]
    with pytest.raises(InputError, match="same shape, but with other router weights"):
        heads.check_model(model)
    for other, difference in (
        (tiny_model("olmoe"), "architecture qwen3moe, the file has olmoe"),
        (tiny_model(num_hidden_layers=3), "layers 4, the file has 3"),
        (tiny_model(hidden_size=64), "width 32, the file has 64"),
        (tiny_model(num_experts=6), "experts a layer 8, the file has 6"),
        (tiny_model(mlp_only_layers=[1], intermediate_size=16), r"layers with experts \[0, 1, 2, 3\], the file has"),
        (tiny_model(num_experts_per_tok=1), "experts a token 2, the file has 1"),
    ):
        with pytest.raises(InputError, match=f"heads for another model: {difference}"):
            heads.check_model(other, "the file")


def test_routers_stored_in_sixteen_bits_are_known(tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        for router in family_of(model).routers(model).values():
            router.weight.copy_(router.weight.bfloat16().float())  # type: ignore[operator]
    heads = Heads.untrained(model)
    heads.info = replace(heads.info, fingerprint=fingerprints(model)["BF16"])
    heads.check_model(model)
    assert len(set(fingerprints(model).values())) == 3
    assert json.loads(json.dumps(fingerprints(model))) == fingerprints(model)
