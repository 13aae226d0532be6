"""A model's fingerprint is that of its routers: the same in every form of its file, another for another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import T, write_tiny

from sluice.errors import ReadError
from sluice.ggml import load_library
from sluice.gguf import open_gguf
from sluice.models import family_of, fingerprint
from sluice.pack import pack

SMALL: dict[str, Any] = {"n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff_exp": 96}


def of(path: Path) -> str:
    file = open_gguf(path, load_library())
    return fingerprint.fingerprint(file, family_of(file).read_spec(file))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("fingerprint") / "m.gguf", expert_type=T.Q8_0, **SMALL).path


def test_stock_packed_and_split_files_have_one(stock: Path, tmp_path: Path) -> None:
    packed = pack(stock, tmp_path / "p.gguf", load_library()).path
    split = write_tiny(tmp_path / "s.gguf", expert_type=T.Q8_0, split=3, shuffled=True, **SMALL).path
    assert len(of(stock)) == 64
    assert of(packed) == of(split) == of(stock)


@pytest.mark.parametrize("piece", [512, 4096, 100_000])
def test_pieces_do_not_matter(stock: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = of(stock)
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", max(piece, 4096))
    assert of(stock) == expected


@pytest.mark.parametrize(
    "more", [{"seed": 1}, {"n_expert": 9}, {"n_layers": 2}, {"dense_layers": (0,)}, {"arch": "llama"}]
)
def test_another_model_has_another(stock: Path, tmp_path: Path, more: dict) -> None:
    assert of(write_tiny(tmp_path / "m.gguf", expert_type=T.Q8_0, **SMALL, **more).path) != of(stock)


def test_other_experts_under_the_same_routers_do_not_count(tmp_path: Path) -> None:
    one, other = (
        write_tiny(tmp_path / f"{t.name}.gguf", expert_type=t, dense_type=t, **SMALL) for t in (T.Q8_0, T.Q4_0)
    )
    assert of(one.path) == of(other.path)


def test_a_file_cut_short_is_named(stock: Path, tmp_path: Path) -> None:
    file = open_gguf(stock, load_library())
    spec = family_of(file).read_spec(file)
    whole = stock.read_bytes()
    try:
        stock.write_bytes(whole[: file.tensors["blk.0.ffn_gate_inp.weight"].offset + 100])
        with pytest.raises(ReadError, match=stock.name):
            fingerprint.fingerprint(file, spec)
    finally:
        stock.write_bytes(whole)
