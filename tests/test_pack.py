from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import raw_gguf as raw
from tiny import TinyModel, write_tiny

from sluice import pack as pack_module
from sluice.errors import InputError, ModelFileError, ReadError
from sluice.ggml import GgmlType, Library, load_library
from sluice.gguf import GgufFile, open_gguf
from sluice.pack import pack

T = gguf.GGMLQuantizationType
SMALL = {"n_layers": 3, "n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff_exp": 96, "n_expert": 5,
         "expert_type": (T.Q5_0, T.F16), "down_type": T.Q8_0, "dense_layers": (1,)}  # fmt: skip
RETOLD = ("general.alignment", "split.", "sluice.pack.")


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library()


@pytest.fixture
def model(tmp_path: Path) -> TinyModel:
    return write_tiny(tmp_path / "m.gguf", **SMALL)


def read(file: GgufFile, number: int, offset: int, n: int) -> bytes:
    with open(file.paths[number], "rb") as f:
        f.seek(offset)
        return f.read(n)


def assert_same_model(stock: GgufFile, packed: GgufFile) -> int:
    """Each expert and each other tensor has the same bytes in both; returns how many experts there are."""
    n_experts = 0
    is_expert = {name for name in stock.tensors if "_exps." in name}
    for name in set(stock.tensors) - is_expert:
        ours, theirs = packed.tensors[name], stock.tensors[name]
        assert (ours.type, ours.shape, ours.n_bytes) == (theirs.type, theirs.shape, theirs.n_bytes)
        assert read(packed, 0, ours.offset, ours.n_bytes) == read(stock, theirs.file, theirs.offset, theirs.n_bytes)
    layers = {name.split(".")[1] for name in is_expert}
    assert set(packed.tensors) - set(stock.tensors) == {f"blk.{layer}.ffn_exps.packed" for layer in layers}
    assert not is_expert & set(packed.tensors)
    for layer in range(8):
        stock_parts, packed_parts = stock.expert_parts(layer), packed.expert_parts(layer)
        assert (stock_parts is None) == (packed_parts is None)
        if stock_parts is None or packed_parts is None:
            continue
        count = stock.tensors[f"blk.{layer}.ffn_down_exps.weight"].shape[2]
        assert packed.tensors[f"blk.{layer}.ffn_exps.packed"].shape == (packed_parts[0].stride, count, 1, 1)
        n_experts += count
        for ours, theirs in zip(packed_parts, stock_parts, strict=True):
            assert (ours.role, ours.type, ours.n_in, ours.n_out, ours.n_bytes) == (
                theirs.role, theirs.type, theirs.n_in, theirs.n_out, theirs.n_bytes)  # fmt: skip
            assert ours.offset % 512 == 0 and ours.stride % 4096 == 0
            for e in range(count):
                assert read(packed, 0, ours.offset + e * ours.stride, ours.n_bytes) == read(
                    stock, theirs.file, theirs.offset + e * theirs.stride, theirs.n_bytes)  # fmt: skip
        gate, up, down = packed_parts
        assert gate.offset % 4096 == 0
        assert gate.offset + gate.n_bytes <= up.offset < up.offset + up.n_bytes <= down.offset
        assert down.offset + down.n_bytes <= gate.offset + gate.stride
    assert all(info.offset % 4096 == 0 for info in packed.tensors.values())
    return n_experts


def only_files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"split": 3}, {"split": 2, "fused": True, "shuffled": True},
                                     {"split": 4, "empty_first_shard": True}, {"alignment": 8}, {"arch": "llama"}],
                         ids=str)  # fmt: skip
def test_the_same_bytes_in_other_places(tmp_path: Path, library: Library, options: dict) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL, **options)
    calls: list[tuple[int, int]] = []
    out = tmp_path / "out.gguf"
    report = pack(model.paths[-1], out, library, progress=lambda *numbers: calls.append(numbers))
    stock, packed = open_gguf(model.path, library), open_gguf(out, library)
    assert packed.packed and not stock.packed
    assert assert_same_model(stock, packed) == report.n_experts == 10
    assert (report.path, report.n_layers) == (out, 2)
    assert report.n_bytes == packed.n_bytes == out.stat().st_size
    assert report.source_bytes == sum(path.stat().st_size for path in model.paths)
    assert calls == sorted(calls) and {total for _, total in calls} == {report.n_bytes}
    assert calls[-1] == (report.n_bytes, report.n_bytes)
    assert only_files(tmp_path) == {path.name for path in (*model.paths, out)}


@pytest.mark.parametrize("split", [1, 3])
def test_metadata_is_kept_to_the_bit(tmp_path: Path, library: Library, split: int) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL, split=split)
    pack(model.path, tmp_path / "out.gguf", library)
    ours, theirs = gguf.GGUFReader(tmp_path / "out.gguf"), gguf.GGUFReader(model.path)
    kept = [name for name in theirs.fields if not name.startswith((*RETOLD, "GGUF."))]
    assert [name for name in ours.fields if not name.startswith((*RETOLD, "GGUF."))] == kept
    for name in kept:
        mine, field = ours.fields[name], theirs.fields[name]
        assert mine.types == field.types, name
        assert b"".join(part.tobytes() for part in mine.parts) == b"".join(part.tobytes() for part in field.parts)
    assert not [name for name in ours.fields if name.startswith("split.")]
    assert ours.fields["general.alignment"].contents() == 4096
    assert ours.fields["sluice.pack.version"].types == [gguf.GGUFValueType.UINT32]
    stock = {t.name: t for t in theirs.tensors}
    for tensor in ours.tensors:
        if tensor.name in stock:
            np.testing.assert_array_equal(tensor.data, stock[tensor.name].data)


def test_metadata_that_no_python_value_stands_for(tmp_path: Path, library: Library) -> None:
    odd = [
        raw.entry("broken", raw.STRING, b"\xff\0\xfe"),
        raw.array("none", raw.I16, []),
        raw.array("texts", raw.STRING, ["", "\0", b"\xc3"]),
        raw.entry("sluice.pack.blk.0", raw.U8, 1),  # left by who knows what; ours replaces it
        raw.entry("nan", raw.F32, float("nan")),
    ]
    source, out = tmp_path / "m.gguf", tmp_path / "out.gguf"
    source.write_bytes(raw.moe_bytes(entries=odd))
    pack(source, out, library)
    content = out.read_bytes()
    assert all((entry in content) == (b"sluice" not in entry) for entry in odd)
    assert_same_model(open_gguf(source, library), open_gguf(out, library))


def test_dimensions_of_one_are_kept(tmp_path: Path, library: Library) -> None:
    shapes = {"gate": (8, 4, 1), "up": (8, 4, 1), "down": (4, 8, 1)}
    tensors = [
        raw.tensor(f"blk.0.ffn_{role}_exps.weight", dims, 0, 128 * i) for i, (role, dims) in enumerate(shapes.items())
    ]
    tensors += [raw.tensor("column", (1, 8, 1), 0, 384), raw.tensor("scalar", (), 0, 416)]
    source, out = tmp_path / "m.gguf", tmp_path / "out.gguf"
    source.write_bytes(raw.file_bytes([], tensors, bytes(range(256)) * 2))
    pack(source, out, library)
    assert raw.tensor("column", (1, 8, 1), 0, 0)[:-8] in out.read_bytes()
    assert raw.tensor("scalar", (), 0, 4096)[:-8] in out.read_bytes()
    assert_same_model(open_gguf(source, library), open_gguf(out, library))


def test_parts_larger_than_a_piece(tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny(tmp_path / "m.gguf", **{**SMALL, "n_ff_exp": 512, "down_type": T.Q4_0})
    stock = open_gguf(model.path, library)
    pack(model.path, tmp_path / "one.gguf", library)
    monkeypatch.setattr(pack_module, "_PIECE_BYTES", 12288)
    pack(model.path, tmp_path / "many.gguf", library)
    parts = stock.expert_parts(0)
    assert parts is not None and parts[0].n_bytes > 12288
    assert_same_model(stock, open_gguf(tmp_path / "many.gguf", library))
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "many.gguf").read_bytes()


def test_every_layer_keeps_its_types(tmp_path: Path, library: Library, model: TinyModel) -> None:
    pack(model.path, tmp_path / "out.gguf", library)
    packed = open_gguf(tmp_path / "out.gguf", library)
    types = [[part.type for part in packed.expert_parts(layer) or ()] for layer in range(3)]
    assert types == [[GgmlType.Q5_0, GgmlType.Q5_0, GgmlType.Q8_0], [], [GgmlType.Q5_0, GgmlType.Q5_0, GgmlType.Q8_0]]


def refusal(source: Path, out: Path, library: Library, *, force: bool = False) -> str:
    before = only_files(out.parent) if out.parent.is_dir() else set()
    with pytest.raises(InputError) as caught:
        pack(source, out, library, force=force)
    assert (only_files(out.parent) if out.parent.is_dir() else set()) == before
    text = str(caught.value)
    assert text.isprintable() and text.count(": ") >= 2, f"no cause and remedy: {text}"
    return text


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path, library: Library, model: TinyModel) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"precious")
    assert "--force" in refusal(model.path, out, library)
    assert out.read_bytes() == b"precious"
    pack(model.path, out, library, force=True)
    assert open_gguf(out, library).packed
    dangling = tmp_path / "link.gguf"
    dangling.symlink_to(tmp_path / "nowhere")
    assert "--force" in refusal(model.path, dangling, library)


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path, library: Library, model: TinyModel) -> None:
    out = tmp_path / "out.gguf"

    def progress(done: int, total: int) -> None:
        out.write_bytes(b"precious")

    with pytest.raises(InputError, match="appeared while packing"):
        pack(model.path, out, library, progress=progress)
    assert out.read_bytes() == b"precious"
    assert only_files(tmp_path) == {"m.gguf", "out.gguf"}


def test_the_source_is_never_overwritten(tmp_path: Path, library: Library) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL, split=3)
    whole = hashlib.sha256(model.paths[1].read_bytes()).digest()
    link, hard = tmp_path / "link.gguf", tmp_path / "hard.gguf"
    link.symlink_to(model.paths[1])
    hard.hardlink_to(model.paths[1])
    for out in (link, hard):
        assert "is what the packed model is made from" in refusal(model.path, out, library, force=True)
    assert "the name of a shard" in refusal(model.path, model.paths[1], library, force=True)
    single = write_tiny(tmp_path / "single.gguf", **SMALL).path
    there = tmp_path / "." / "single.gguf"
    assert "is what the packed model is made from" in refusal(single, there, library, force=True)
    assert hashlib.sha256(model.paths[1].read_bytes()).digest() == whole


def test_what_can_not_be_packed(tmp_path: Path, library: Library, model: TinyModel) -> None:
    dense = write_tiny(tmp_path / "dense.gguf", **{**SMALL, "dense_layers": (0, 1, 2)}).path
    assert "nothing to pack" in refusal(dense, tmp_path / "out.gguf", library)
    packed = pack(model.path, tmp_path / "packed.gguf", library).path
    assert "already packed" in refusal(packed, tmp_path / "out.gguf", library)
    (tmp_path / "bad.gguf").write_bytes(raw.moe_bytes({"gate": (8, 4, 2), "up": (8, 4, 2)}))
    with pytest.raises(ModelFileError, match="instead of"):
        pack(tmp_path / "bad.gguf", tmp_path / "out.gguf", library)
    with pytest.raises(ModelFileError, match="no such file"):
        pack(tmp_path / "none.gguf", tmp_path / "out.gguf", library)


def test_places_that_can_not_be_written(tmp_path: Path, library: Library, model: TinyModel) -> None:
    (tmp_path / "folder").mkdir()
    assert "a directory" in refusal(model.path, tmp_path / "folder", library, force=True)
    assert "no directory" in refusal(model.path, tmp_path / "none" / "out.gguf", library)
    assert "no directory" in refusal(model.path, model.path / "out.gguf", library)
    assert "can't be written" in refusal(model.path, tmp_path / ("x" * 300), library)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert "not a regular file" in refusal(model.path, tmp_path / "pipe", library, force=True)


def test_space_is_asked_for_first(
    tmp_path: Path, library: Library, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = pack(model.path, tmp_path / "out.gguf", library).n_bytes
    (tmp_path / "out.gguf").unlink()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    text = refusal(model.path, tmp_path / "out.gguf", library)
    assert f"needs {needed / 2**20:,.1f} MiB in {tmp_path}" in text and "free" in text
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=needed))
    assert pack(model.path, tmp_path / "out.gguf", library).n_bytes == needed


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_disk_that_fills_up(
    tmp_path: Path, library: Library, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pack_module._write

    def write(target, data: memoryview) -> int:
        if target.tell() < 100_000:
            return real(target, data)
        with open("/dev/full", "wb", buffering=0) as full:
            return real(full, data)

    monkeypatch.setattr(pack_module, "_write", write)
    text = refusal(model.path, tmp_path / "out.gguf", library)
    assert "No space left on device" in text and "packing needs" in text


@pytest.mark.skipif(sys.platform == "win32", reason="file sizes are limited on Unix only")
def test_a_file_that_may_not_grow(tmp_path: Path, model: TinyModel) -> None:
    program = """
import resource, sys
from sluice.errors import InputError
from sluice.ggml import load_library
from sluice.pack import pack
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    pack(sys.argv[1], sys.argv[2], load_library())
except InputError as e:
    print(e)
"""
    command = [sys.executable, "-c", program, str(model.path), str(tmp_path / "out.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "can't be written" in done.stdout and "packing needs" in done.stdout and done.stdout.count("\n") == 1
    assert only_files(tmp_path) == {"m.gguf"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("after", [1, 20, 10**9])
def test_an_interrupted_pack_leaves_nothing(
    tmp_path: Path, library: Library, model: TinyModel, error: type[BaseException], after: int
) -> None:
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        assert only_files(tmp_path) - {"m.gguf"}, "no temporary file is there to be removed"
        if calls == after or (done > total - 60_000 and after > 100):
            raise error

    with pytest.raises(error):
        pack(model.path, tmp_path / "out.gguf", library, progress=progress)
    assert only_files(tmp_path) == {"m.gguf"}


def test_ctrl_c_while_writing(tmp_path: Path, library: Library, model: TinyModel) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        pytest.skip("this process ignores Ctrl-C, as one in the background does")
    threads_before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        pack(model.path, tmp_path / "out.gguf", library, progress=lambda *_: signal.raise_signal(signal.SIGINT))
    assert only_files(tmp_path) == {"m.gguf"}
    assert threading.active_count() == threads_before


def test_a_source_that_changes_meanwhile(tmp_path: Path, library: Library, model: TinyModel) -> None:
    content = model.path.read_bytes()

    def touch(done: int, total: int) -> None:
        os.utime(model.path, ns=(0, 0))

    with pytest.raises(ReadError, match="changed"):
        pack(model.path, tmp_path / "out.gguf", library, progress=touch)
    model.path.write_bytes(content)

    def cut(done: int, total: int) -> None:
        os.truncate(model.path, len(content) // 2)

    with pytest.raises(ReadError, match=r"m\.gguf"):
        pack(model.path, tmp_path / "out.gguf", library, progress=cut)
    assert only_files(tmp_path) == {"m.gguf"}
