"""Files of heads come back as they were written, and what is wrong with one is refused by name in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_heads import Arrays, made_file, made_info, made_tensors
from tiny import write_tiny

from sluice.errors import InputError
from sluice.ggml import load_library
from sluice.gguf import open_gguf
from sluice.models import ModelSpec, family_of
from sluice.routing import PrerouterInfo, open_prerouter, write_prerouter
from sluice.safetensors_file import read_safetensors, write_safetensors


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    info = made_info(weights="router", training={"stage": "heads", "tokens": 10**6, "loss": 0.25, "text": "ä\n"})
    tensors = made_tensors(info, 5, skip_bias=False)
    tensors["blk.2.skip.weight"] = tensors["blk.2.skip.weight"].astype(np.float16)
    n_bytes = write_prerouter(tmp_path / "h.safetensors", info, tensors)
    file = open_prerouter(tmp_path / "h.safetensors")
    assert n_bytes == file.path.stat().st_size
    assert file.info == info
    assert list(file.tensors) == list(tensors)
    for name, values in tensors.items():
        assert file.tensors[name].dtype == values.dtype
        assert np.array_equal(file.tensors[name].read(), values)
    assert [file.hidden(owner) for owner in info.owners] == [5, 5, 5]
    file.check_numbers()


def test_the_file_is_as_documented(tmp_path: Path) -> None:
    """In other libraries' eyes."""
    from safetensors import safe_open

    made_file(tmp_path / "h.safetensors", hidden=16)
    with safe_open(str(tmp_path / "h.safetensors"), "numpy") as file:
        metadata = file.metadata()
        assert {key: metadata[key] for key in ("sluice.prerouter", "architecture", "moe_layers", "owners")} == {
            "sluice.prerouter": "1", "architecture": "qwen3moe", "moe_layers": "[0, 2, 3, 4]", "owners": "[0, 2, 3]",
        }  # fmt: skip
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == {
        f"blk.{owner}.{part}": shape
        for owner in (0, 2, 3)
        for part, shape in {
            "fc1.weight": (16, 24 + 2 * 8), "fc1.bias": (16,), "fc2.weight": (8, 16), "fc2.bias": (8,),
            "skip.weight": (8, 24), "skip.bias": (8,),
        }.items()
    }  # fmt: skip


def test_heads_may_differ_in_width(tmp_path: Path) -> None:
    info = made_info(owners=(2, 3), first_predicted=3)
    narrow, wide = made_tensors(info, 3), made_tensors(info, 9)
    mixed = {name: (narrow if name.startswith("blk.2.") else wide)[name] for name in narrow}
    file = made_file(tmp_path / "h.safetensors", info, mixed)
    assert (file.hidden(2), file.hidden(3)) == (3, 9)


@pytest.mark.parametrize(
    ("owners", "first", "predicts"),
    [
        ((0, 2, 3), 2, {0: 2, 2: 3, 3: 4}),
        ((2,), 3, {2: 3}),
        ((0, 3), 2, {0: 2, 3: 4}),
        ((0, 2, 3, 4), 3, {2: 3, 3: 4}),  # the first and the last go unused
    ],
)
def test_a_head_predicts_the_next_layer_with_experts(
    owners: tuple[int, ...], first: int, predicts: dict[int, int]
) -> None:
    assert made_info(owners=owners, first_predicted=first).predicts == predicts


# --- what is wrong with a file

Spoil = Callable[[dict[str, str], Arrays], None]


def field(name: str, value: Any) -> Spoil:
    def spoil(metadata: dict[str, str], tensors: Arrays) -> None:
        metadata[name] = value if isinstance(value, str) else json.dumps(value)

    return spoil


def lacking(name: str) -> Spoil:
    def spoil(metadata: dict[str, str], tensors: Arrays) -> None:
        del (tensors if name.startswith("blk.") else metadata)[name]

    return spoil


def shaped(name: str, *shape: int) -> Spoil:
    return lambda metadata, tensors: tensors.update({name: np.zeros(shape, np.float32)})


MALFORMED: dict[str, tuple[Spoil, str]] = {
    "no heads": (lacking("sluice.prerouter"), "no prerouter heads"),
    "later format": (field("sluice.prerouter", "2"), "format '2', this version of Sluice reads 1"),
    "no owners": (lacking("owners"), "lacks owners"),
    "no fingerprint": (lacking("fingerprint"), "lacks fingerprint"),
    "no training": (lacking("training"), "lacks training"),
    "owners not JSON": (field("owners", "0, 2"), "owners is '0, 2'"),
    "owners no list": (field("owners", 3), "owners is no list"),
    "owners empty": (field("owners", []), "owners is no list of 1 to 5"),
    "owners not ascending": (field("owners", [2, 0, 3]), "owners isn't ascending"),
    "owner twice": (field("owners", [0, 2, 2]), "owners isn't ascending"),
    "owner dense": (field("owners", [0, 1, 3]), "layer 1 owns a head and has no experts"),
    "owner outside": (field("owners", [0, 2, 5]), "owners is 5, not a whole number from 0 to 4"),
    "owner a fraction": (field("owners", [0, 2.0, 3]), "owners is 2.0, not a whole"),
    "owner true": (field("owners", [True, 2, 3]), "owners is True, not a whole"),
    "owner without tensors": (field("owners", [0, 2, 3, 4]), "tensor blk.4.fc1.weight is missing"),
    "tensors without owner": (field("owners", [0, 2]), "tensor 'blk.3.fc1.bias' belongs to no head"),
    "layers huge": (field("n_layers", 10**9), "n_layers is 1000000000, not a whole number from 1 to 4096"),
    "experts huge": (field("n_expert", 1 << 40), "n_expert is 1099511627776"),
    "width zero": (field("n_embd", 0), "n_embd is 0, not"),
    "width infinite": (field("n_embd", "Infinity"), "n_embd is 'Infinity'"),
    "width beyond floats": (field("n_embd", "1e999"), "n_embd is '1e999'"),
    "width with too many digits": (field("n_embd", "9" * 5000), "n_embd is '999"),
    "nested": (field("training", "[" * 100_000), r"training is '\[\[\["),
    "training no object": (field("training", []), "training is no object"),
    "training not finite": (field("training", '{"loss": NaN}'), "training is"),
    "layers with experts outside": (field("moe_layers", [0, 2, 3, 9]), "moe_layers is 9"),
    "top_k too large": (field("top_k", 9), "top_k is 9, of 8 experts"),
    "other features": (field("features", "hidden state"), "features is 'hidden state', not"),
    "other weights": (field("weights", "both\n"), r"weights is 'both\\n', not one of head, router"),
    "first predicted unpredicted": (field("first_predicted", 0), "first_predicted is 0, a layer that no head predicts"),
    "nothing predicted": (field("first_predicted", 1), "first_predicted is 1, a layer that no head"),
    "missing fc1": (lacking("blk.2.fc1.weight"), "tensor blk.2.fc1.weight is missing"),
    "missing bias": (lacking("blk.3.fc2.bias"), "tensor blk.3.fc2.bias is missing"),
    "missing skip": (lacking("blk.0.skip.weight"), "tensor blk.0.skip.weight is missing"),
    "fc1 narrow": (shaped("blk.0.fc1.weight", 16, 32), r"blk.0.fc1.weight has the shape \[16, 32\], not \[16, 40\]"),
    "fc1 of one dimension": (shaped("blk.0.fc1.weight", 40), r"blk.0.fc1.weight has the shape \[40\], not \[40, 40\]"),
    "fc1 a number": (shaped("blk.0.fc1.weight"), r"blk.0.fc1.weight has the shape \[\], not \[1, 40\]"),
    "fc1 too wide": (shaped("blk.0.fc1.weight", 65537, 1), "has 65537 rows, more than 65536"),
    "fc1 bias": (shaped("blk.0.fc1.bias", 17), r"blk.0.fc1.bias has the shape \[17\], not \[16\]"),
    "fc2 turned": (shaped("blk.2.fc2.weight", 16, 8), r"blk.2.fc2.weight has the shape \[16, 8\], not \[8, 16\]"),
    "skip turned": (shaped("blk.2.skip.weight", 24, 8), r"blk.2.skip.weight has the shape \[24, 8\], not \[8, 24\]"),
    "skip bias": (shaped("blk.2.skip.bias", 8, 1), r"blk.2.skip.bias has the shape \[8, 1\], not \[8\]"),
    "another tensor": (shaped("blk.2.fc3.weight", 4), "tensor 'blk.2.fc3.weight' belongs to no head"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_files_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    spoil, complaint = MALFORMED[kind]
    path = made_file(tmp_path / "h.safetensors", hidden=16).path
    metadata, stored = read_safetensors(path)
    tensors = {name: tensor.read() for name, tensor in stored.items()}
    spoil(metadata, tensors)
    write_safetensors(path, tensors, metadata, force=True)
    with pytest.raises(InputError, match=complaint) as refusal:
        open_prerouter(path)
    text = str(refusal.value)
    assert text.startswith(str(path)) and text.isprintable() and len(text) < len(str(path)) + 400


def test_bfloat16_is_refused(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    info = made_info()
    path = made_file(tmp_path / "h.safetensors", info).path
    metadata, stored = read_safetensors(path)
    tensors = {name: torch.from_numpy(tensor.read()) for name, tensor in stored.items()}
    tensors["blk.2.fc2.weight"] = tensors["blk.2.fc2.weight"].bfloat16()
    save_file(tensors, str(path), metadata)
    with pytest.raises(InputError, match=r"blk\.2\.fc2\.weight is BF16, neither F32 nor F16"):
        open_prerouter(path)


def test_nothing_is_written_that_could_not_be_read(tmp_path: Path) -> None:
    info = made_info()
    path = tmp_path / "h.safetensors"
    tensors = made_tensors(info)
    with pytest.raises(ValueError, match="owners isn't ascending"):
        write_prerouter(path, replace(info, owners=(2, 0, 3)), tensors)
    with pytest.raises(ValueError, match="float64"):
        write_prerouter(path, info, tensors | {"blk.0.fc1.bias": np.zeros(16)})
    with pytest.raises(ValueError, match=r"blk\.0\.fc1\.bias is missing"):
        write_prerouter(path, info, {name: a for name, a in tensors.items() if name != "blk.0.fc1.bias"})
    assert not path.exists()


def test_files_are_overwritten_only_by_force(tmp_path: Path) -> None:
    info = made_info()
    path = made_file(tmp_path / "h.safetensors", info).path
    before = path.read_bytes()
    with pytest.raises(InputError, match="exists already"):
        write_prerouter(path, info, made_tensors(info, seed=1))
    assert path.read_bytes() == before
    write_prerouter(path, info, made_tensors(info, seed=1), force=True)
    assert path.read_bytes() != before
    assert [entry.name for entry in tmp_path.iterdir()] == ["h.safetensors"]


# --- which model it is for


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = write_tiny(tmp_path_factory.mktemp("spec") / "m.gguf", n_layers=5, dense_layers=(1,)).path
    file = open_gguf(path, load_library())
    return family_of(file).read_spec(file)


def info_of(spec: ModelSpec, **more: Any) -> PrerouterInfo:
    same = ("architecture", "n_layers", "n_embd", "n_expert", "moe_layers", "top_k")
    return made_info(**{name: getattr(spec, name) for name in same}, **more)


def test_the_model_it_was_made_for_is_taken(tmp_path: Path, spec: ModelSpec) -> None:
    file = made_file(tmp_path / "h.safetensors", info_of(spec))
    file.check_model(spec, fingerprint="ab" * 32, name="another name")
    file.check_model(replace(spec, top_k=1), fingerprint="ab" * 32, top_k=2)  # a lossy mode's own number


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "llama"}, "architecture 'qwen3moe', this model has 'llama'"),
    "layers": ({"n_layers": 6}, "layers 5, this model has 6"),
    "width": ({"n_embd": 64}, "width 256, this model has 64"),
    "experts": ({"n_expert": 16}, "experts a layer 8, this model has 16"),
    "number of MoE layers": ({"moe_layers": (0, 1, 2, 3, 4)}, "layers with experts 4, this model has 5"),
    "which MoE layers": ({"moe_layers": (0, 1, 2, 3)}, "other layers with experts"),
    "top_k": ({"top_k": 1}, "experts a token 2, this model has 1"),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_another_model_is_refused_by_the_difference(tmp_path: Path, spec: ModelSpec, kind: str) -> None:
    changes, complaint = DIFFERENCES[kind]
    file = made_file(tmp_path / "h.safetensors", info_of(spec))
    with pytest.raises(InputError, match=f"heads for another model .*: {complaint}"):
        file.check_model(replace(spec, **changes), fingerprint="ab" * 32, name="that one")


def test_other_router_weights_are_refused(tmp_path: Path, spec: ModelSpec) -> None:
    file = made_file(tmp_path / "h.safetensors", info_of(spec))
    complaint = r"'made'; this is 'x'.*other router weights .*'abababababab'…, .* cdcdcdcdcdcd…"
    with pytest.raises(InputError, match=complaint):
        file.check_model(spec, fingerprint="cd" * 32, name="x")


def test_every_field_is_checked_or_free(tmp_path: Path) -> None:
    """A field added to the format must come into a table above."""
    named = {field for field in asdict(made_info()) if any(field in kind[1] for kind in MALFORMED.values())}
    assert set(asdict(made_info())) - named == {"architecture", "name"}
