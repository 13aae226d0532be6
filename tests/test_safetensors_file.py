"""safetensors files: what other libraries write is read and the other way round; what is damaged is refused."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice import safetensors_file
from sluice.errors import InputError
from sluice.safetensors_file import MAX_HEADER_BYTES, MadeTensor, read_safetensors, write_safetensors

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def raw_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file of any header: an object, or its very bytes. `length` is what it says that the header has."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def described(shape: list[int], begin: int, end: int, kind: str = "F32") -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


# --- with other libraries


def test_what_the_reference_writes_is_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {
        "plain": torch.randn(3, 5), "half": torch.randn(2, 3, 4).half(), "brain": torch.randn(7, 3).bfloat16(),
        "number": torch.tensor(1.5), "vector": torch.randn(9),
    }  # fmt: skip
    save_file(tensors, str(tmp_path / "a.safetensors"), {"who": "ä", "what": "{}"})
    metadata, read = read_safetensors(tmp_path / "a.safetensors")
    assert metadata == {"who": "ä", "what": "{}"}
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        values = read[name].read()
        assert values.shape == read[name].shape == tuple(tensor.shape)
        assert values.dtype == read[name].dtype == (np.float16 if name == "half" else np.float32)
        assert np.array_equal(values.astype(np.float32), tensor.float().numpy())
        assert read[name].n_bytes == tensor.nbytes


def test_what_is_written_the_reference_reads(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    made: list[str] = []

    def make() -> np.ndarray:
        made.append("z")
        return np.full((2, 2), 3, np.float16)

    later, one = MadeTensor((2, 2), np.dtype(np.float16), make), np.array(7, np.float32)
    tensors = {"y": X, "turned": X.T, "z": later, "one": one}
    n_bytes = write_safetensors(tmp_path / "a.safetensors", tensors, {"k": "v\n"})
    assert n_bytes == (tmp_path / "a.safetensors").stat().st_size and made == ["z"]
    loaded = load_file(tmp_path / "a.safetensors")
    metadata, read = read_safetensors(tmp_path / "a.safetensors")
    assert metadata == {"k": "v\n"} and list(read) == list(tensors)
    for name, expected in (("y", X), ("turned", X.T), ("z", np.full((2, 2), 3)), ("one", np.array(7))):
        assert np.array_equal(loaded[name], expected) and np.array_equal(read[name].read(), expected)


def test_rows_are_read_alone(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"before": X, "x": X, "v": X[:, 1].copy()}, {})
    _, read = read_safetensors(tmp_path / "a.safetensors")
    assert np.array_equal(read["x"].read(1, 2), X[1:])
    assert np.array_equal(read["x"].read(0, 1), X[:1])
    assert np.array_equal(read["v"].read(2, 1), X[2:, 1])


def test_a_file_cut_short_after_opening_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": X}, {})
    _, read = read_safetensors(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(InputError, match="became shorter"):
        read["x"].read()
    path.unlink()
    with pytest.raises(InputError, match="can't be read"):
        read["x"].read()


# --- writing


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        write_safetensors(path, {"x": X}, {})
    with pytest.raises(InputError, match="made from"):
        write_safetensors(path, {"x": X}, {}, force=True, keep=[path])
    assert path.read_text() == "mine"
    write_safetensors(path, {"x": X}, {}, force=True)
    assert np.array_equal(read_safetensors(path)[1]["x"].read(), X)


@pytest.mark.parametrize(("name", "complaint"), [("", "names no file"), ("no/a", "no directory")])
def test_places_that_take_no_file(tmp_path: Path, name: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        write_safetensors(tmp_path / name, {"x": X}, {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device")
def test_devices_are_left_alone() -> None:
    with pytest.raises(InputError, match="not a regular file"):
        write_safetensors("/dev/full", {"x": X}, {}, force=True)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail() -> np.ndarray:
        raise InputError("stopped")

    with pytest.raises(InputError, match="stopped"):
        write_safetensors(tmp_path / "a", {"x": X, "y": MadeTensor((1,), np.dtype(np.float32), fail)}, {})
    assert not list(tmp_path.iterdir())


# --- damage

DAMAGED: dict[str, tuple[Any, str]] = {
    "no object": (b"[1, 2]", "no JSON object"),
    "no JSON": (b'{"x"}', "no JSON at byte"),
    "no text": (b'{"\xff": 1}', "its header is no text"),
    "nested": (b'{"a":' + b"[" * 100_000, "its header is no list"),
    "twice": (b'{"__metadata__": {"a": "1", "a": "2"}}', "'a' is in its header twice"),
    "NaN": (b'{"x": NaN}', "NaN in its header"),
    "many digits": (b'{"x": ' + b"9" * 5000 + b"}", "damaged"),
    "metadata a number": ({"__metadata__": {"a": 1}}, "holds not only texts"),
    "metadata a list": ({"__metadata__": ["a"]}, "holds not only texts"),
    "metadata long": ({"__metadata__": {"a": "x" * (1 << 20)}}, "longer than 1024 KiB"),
    "tensor a number": ({"x\n": 3}, r"'x\\n' is no tensor"),
    "a field more": ({"x": described([1], 0, 4) | {"more": 1}}, "'x' is no tensor with"),
    "a field less": ({"x": {"dtype": "F32", "shape": [1]}}, "'x' is no tensor with"),
    "whole numbers": ({"x": described([1], 0, 8, "I64")}, "'x' is of type 'I64', and Sluice reads F32, F16, BF16"),
    "type a list": ({"x": described([1], 0, 8) | {"dtype": ["F32"]}}, "'x' is of type"),
    "shape a number": ({"x": described([1], 0, 4) | {"shape": 1}}, "impossible shape 1"),
    "shape zero": ({"x": described([0], 0, 0)}, r"impossible shape \[0\]"),
    "shape negative": ({"x": described([-1, -1], 0, 4)}, "impossible shape"),
    "shape a fraction": ({"x": described([1], 0, 4) | {"shape": [1.0]}}, "impossible shape"),
    "shape true": ({"x": described([1], 0, 4) | {"shape": [True]}}, "impossible shape"),
    "shape huge": ({"x": described([1 << 41], 0, 4)}, "impossible shape"),
    "many dimensions": ({"x": described([1] * 9, 0, 4)}, "impossible shape"),
    "product huge": ({"x": described([1 << 40] * 8, 0, 4)}, "has 4 bytes, not"),
    "offsets three": ({"x": described([1], 0, 4) | {"data_offsets": [0, 4, 8]}}, "impossible offsets"),
    "offsets negative": ({"x": described([1], -4, 0)}, "impossible offsets"),
    "offsets reversed": ({"x": described([1], 4, 0)}, "begins at byte 4 and not 0"),
    "offsets huge": ({"x": described([1], 0, 1 << 63)}, "impossible offsets"),
    "too few bytes": ({"x": described([2], 0, 4)}, r"'x', F32 \[2\], has 4 bytes, not 8"),
    "overlap": ({"x": described([1], 0, 4), "y": described([1], 0, 4)}, "'y' begins at byte 0 and not 4"),
    "gap": ({"x": described([1], 4, 8)}, "'x' begins at byte 4 and not 0"),
    "beyond the end": ({"x": described([3], 0, 12)}, "8 bytes of tensors, and its header describes 12"),
    "before the end": ({"x": described([1], 0, 4)}, "8 bytes of tensors, and its header describes 4"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_named_in_one_line(tmp_path: Path, kind: str) -> None:
    header, complaint = DAMAGED[kind]
    path = raw_file(tmp_path / "a.safetensors", header, bytes(8))
    with pytest.raises(InputError, match=complaint) as refusal:
        read_safetensors(path)
    text = str(refusal.value)
    assert text.startswith(str(path)) and text.isprintable() and len(text) < len(str(path)) + 400


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "only 0 bytes"),
        (b"\x02\0\0\0\0\0\0", "only 7 bytes"),
        (bytes(8) + b"{}", "header of 0 bytes"),
        (b"\x03" + bytes(7) + b"{}", "header of 3 bytes follows, and 2 bytes do"),
        (b"\xff" * 8 + b"{}", "header of 18446744073709551615 bytes"),
        (b"GGUF\x03\0\0\0" + bytes(100), "header of"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=f"no safetensors file .*{complaint}"):
        read_safetensors(tmp_path / "a")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_safetensors(tmp_path / "a")
    with pytest.raises(InputError, match="not a regular file"):
        read_safetensors(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(InputError, match="not a regular file"):
            read_safetensors(tmp_path / "pipe")


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "a", b"{", length=MAX_HEADER_BYTES + 1)
    os.truncate(path, 1 << 40)
    with pytest.raises(InputError, match="more than 32 MiB"):
        read_safetensors(path)


@pytest.mark.parametrize("piece", [b'"":{},', b"[],", b"0,"])
def test_headers_of_too_many_values_are_refused_before_they_are_made(
    tmp_path: Path, piece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "MAX_TENSORS", 10)
    monkeypatch.setattr(safetensors_file.json, "loads", lambda *args, **more: pytest.fail("parsed"))
    with pytest.raises(InputError, match="more than 10 tensors"):
        read_safetensors(raw_file(tmp_path / "a", b'{"x":[' + piece * 100 + b"0]}"))


# --- fuzzing, in a process of its own whose memory is bounded

EXTREMES = (0, 1, -1, 2, 4, 7, 8, 255, 2**31, 2**32, 2**40, 2**40 + 1, 2**62, 2**63, 2**64, 10**30, 1.0, 1e999, True,
            None, "", "F32", "F16", "BF16", "U8", [], [1], {}, "\ud800", "\0")  # fmt: skip
SPARSE_BYTES = 1 << 42


def mutant(seed: int) -> tuple[bytes, int]:
    """A file that is often wrong in one place or a few, and the size to extend it to with zeros."""
    rng = random.Random(seed)
    header: dict[str, Any] = {"__metadata__": {"k": "v"}} if rng.random() < 0.5 else {}
    at = 0
    for i in range(rng.randrange(4)):
        kind, shape = rng.choice(("F32", "F16", "BF16")), [rng.randrange(1, 5) for _ in range(rng.randrange(4))]
        size = (4 if kind == "F32" else 2) * int(np.prod(shape))
        header[f"t{i}"] = described(shape, at, at + size, kind)
        at += size
    for _ in range(rng.choice((0, 0, 1, 1, 2))):  # in the values
        name = rng.choice([*header, "new"])
        place = header.setdefault(name, described([1], at, at + 4))
        field = rng.choice(("dtype", "shape", "data_offsets", "k"))
        if rng.random() < 0.2 or not isinstance(place, dict):
            header[name] = rng.choice(EXTREMES)
        elif rng.random() < 0.5 and isinstance(inner := place.get(field), list) and inner:
            inner[rng.randrange(len(inner))] = rng.choice(EXTREMES)
        else:
            place[field] = rng.choice(EXTREMES)
    text = json.dumps(header).encode()
    if rng.random() < 0.05:
        depth = rng.choice((10, 300, 900, 1000, 3000, 100_000))
        text = text[:-1] + b', "d": ' + b"[" * depth + b"]" * depth + b"}"
    length = rng.choice((*(n for n in EXTREMES if type(n) is int and 0 <= n < 2**64), len(text) + 1, len(text) - 1))
    data = bytearray((length if rng.random() < 0.1 else len(text)).to_bytes(8, "little") + text + bytes(at))
    for _ in range(rng.choice((0, 0, 0, 1, 2))):  # in the bytes
        where = rng.randrange(len(data) - 1)
        if rng.random() < 0.6:
            data[where] ^= 1 << rng.randrange(8)
        elif rng.random() < 0.5:
            del data[where + 1 : where + rng.randrange(2, 20)]
        else:
            data[where:where] = data[: rng.randrange(40)]
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data) + 1)]
    return bytes(data), SPARSE_BYTES if rng.random() < 0.1 else len(data)


def open_mutants(folder: Path, count: int) -> dict[str, int]:
    counts = {"opened": 0, "refused": 0}
    for seed in range(count):
        content, size = mutant(seed)
        path = folder / "m"
        path.write_bytes(content)
        os.truncate(path, max(size, len(content)))
        try:
            _, tensors = read_safetensors(path)
        except InputError as e:
            assert str(e).isprintable() and len(str(e)) < 2 * len(str(path)) + 400, (seed, e)
            counts["refused"] += 1
            continue
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
        end = len(content) - sum(tensor.n_bytes for tensor in tensors.values())
        for tensor in tensors.values():
            assert tensor.offset == end, seed
            end += tensor.n_bytes
            assert tensor.read().shape == tensor.shape
        assert end == path.stat().st_size, seed
        counts["opened"] += 1
    return counts


def largest_header(folder: Path) -> dict[str, int]:
    """The costliest header: as long as may be, of as many objects and values as may be."""
    n = safetensors_file.MAX_TENSORS
    one = b'"%07d":{"":[[' + b",".join([b"-1e111"] * 6) + b"]]}"
    text = b"{" + b",".join([one % i for i in range(n)]) + b"}"
    text = text.ljust(MAX_HEADER_BYTES)
    with pytest.raises(InputError, match="is no tensor"):
        read_safetensors(raw_file(folder / "m", text))
    return {"opened": 0, "refused": 1}


def run(*arguments: object) -> dict[str, int]:
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_mutated_files_never_crash_and_need_little_memory(tmp_path: Path) -> None:
    counts = run(tmp_path, 5000)
    assert counts["opened"] > 500 and counts["refused"] > 2000
    assert counts["peak_bytes"] < 64 << 20


def test_the_largest_header_needs_bounded_memory(tmp_path: Path) -> None:
    assert run(tmp_path, "largest")["peak_bytes"] < 512 << 20


def main(folder: Path, what: str) -> None:
    try:
        import resource
    except ImportError:  # Windows: memory is not measured
        resource = None
    start = 0
    if resource is not None and sys.platform == "linux":
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), in_use + (1 << 30)))
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = largest_header(folder) if what == "largest" else open_mutants(folder, int(what))
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) if start and resource else 0
    print(json.dumps({**counts, "peak_bytes": peak}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
