"""Opens mutated headers in a process of its own, so that a crash is a failed test and its memory can be bounded.

By hand: `python tests/test_gguf_fuzz.py FOLDER FIRST_SEED COUNT` leaves the file that it died on in FOLDER.
"""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import raw_gguf as raw

from sluice.errors import ModelFileError
from sluice.ggml import GgmlType, Library, load_library
from sluice.gguf import GgufFile, open_gguf

EXTREMES = (0, 1, 2, 3, 4, 8, 9, 12, 31, 32, 33, 63, 64, 255, 256, 4096, 65535, 65536, 2**21, 2**24, 2**26, 2**30,
            2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**46, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32,
            2**64 - 1)  # fmt: skip
KNOWN_KEYS = ("general.alignment", "split.count", "split.no", "split.tensors.count", "sluice.pack.version",
              "sluice.pack.blk.0", "general.architecture", "tokenizer.ggml.tokens")  # fmt: skip
KNOWN_NAMES = tuple(f"blk.0.ffn_{role}_exps.weight" for role in ("gate", "up", "down", "gate_up"))
PACKED = [12, 256, 2, 0, 288, 12, 256, 2, 512, 288, 0, 2, 256, 1024, 2048]
SPARSE_BYTES = 1 << 42  # far more than any machine's memory; costs no disk


def _value(rng: random.Random, key: str) -> bytes:
    """A metadata entry of any kind."""
    kind = rng.choice([*raw.FORMATS, raw.STRING, raw.ARRAY])
    if kind == raw.ARRAY:
        inner = rng.choice([*raw.FORMATS, raw.STRING])
        n = rng.choice((0, 1, 5, 15))
        contents = [f"t{i}" if inner == raw.STRING else i & 1 for i in range(n)]
        if key.startswith("sluice.pack.blk") and inner == raw.U64:
            contents = list(PACKED)
            if rng.random() < 0.7:
                contents[rng.randrange(15)] = rng.choice(EXTREMES)
        return raw.array(key, inner, contents, rng.choice(EXTREMES) if rng.random() < 0.1 else None)
    if kind == raw.STRING:
        return raw.entry(key, kind, rng.choice(("", "x", "a\0b", "\n" * 99, b"\xff\xfe")))
    return raw.entry(key, kind, rng.choice((0, 1, 32)))


def mutant(seed: int) -> tuple[bytes, int]:
    """A file that is often wrong in one place or a few, and the size to extend it to with zeros."""
    rng = random.Random(seed)
    packed, alignment = rng.random() < 0.3, rng.choice((32, 32, 8, 4096))
    entries = [
        raw.entry("general.architecture", raw.STRING, "qwen3moe"),
        raw.entry("general.alignment", raw.U32, alignment),
    ]
    entries.append(raw.array("tokenizer.ggml.tokens", raw.STRING, [f"token{i}" for i in range(9)]))
    entries.append(raw.array("scores", raw.F32, [0.5] * 9))
    if packed:
        entries.append(raw.entry("sluice.pack.version", raw.U32, 1))
        entries.append(raw.array("sluice.pack.blk.0", raw.U64, PACKED))
    while rng.random() < 0.3:
        key = rng.choice((*KNOWN_KEYS, f"key{rng.randrange(9)}"))
        entry = _value(rng, key)
        entries = [e for e in entries if not e.startswith(raw.string(key))] if rng.random() < 0.8 else entries
        entries.insert(rng.randrange(len(entries) + 1), entry)

    shapes: dict[str, tuple[tuple[int, ...], int]] = {"blk.0.ffn_exps.packed": ((4096, 2), 24)} if packed else {
        "blk.0.ffn_gate_exps.weight": ((256, 2, 2), 12), "blk.0.ffn_up_exps.weight": ((256, 2, 2), 12),
        "blk.0.ffn_down_exps.weight": ((2, 256, 2), 0)}  # fmt: skip
    shapes["norm"] = ((8,), 0)
    tensors, offset = [], 0
    for name, (dims, type) in shapes.items():
        if rng.random() < 0.05:
            name = rng.choice(KNOWN_NAMES)
        if rng.random() < 0.05:
            type = rng.choice((*GgmlType, 4, 31, 36, 41, 99, 2**31, 2**32 - 1))
        if rng.random() < 0.1:
            dims = tuple(rng.choice((n, n, rng.choice(EXTREMES))) for n in (*dims, 1, 1)[: rng.randrange(6)])
        n_dims = rng.choice(EXTREMES) % 2**32 if rng.random() < 0.02 else None
        at = rng.choice((offset + 8, rng.choice(EXTREMES))) if rng.random() < 0.02 else offset
        tensors.append(raw.tensor(name, dims, type, at, n_dims))
        blocks = {12: (256, 144), 24: (1, 1)}.get(type, (1, 4))
        size = blocks[1]
        for n in dims:
            size *= n
        offset = (offset + -(-(size // blocks[0]) // alignment) * alignment) % 2**64
    if rng.random() < 0.05:
        tensors.append(rng.choice(tensors))
    n_tensors, n_entries = (rng.choice(EXTREMES) if rng.random() < 0.03 else None for _ in range(2))
    data = bytearray(
        raw.file_bytes(entries, tensors, b"", alignment=alignment, n_tensors=n_tensors, n_entries=n_entries)
    )
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        at = rng.randrange(len(data))
        choice = rng.random()
        if choice < 0.5:
            data[at] ^= 1 << rng.randrange(8)
        elif choice < 0.8:
            width, format = rng.choice(((4, "<I"), (8, "<Q")))
            data[at : at + width] = struct.pack(format, rng.choice(EXTREMES) % 2 ** (8 * width))
        elif choice < 0.9:
            del data[at : at + rng.randrange(1, 40)]
        else:
            data[at:at] = data[(start := rng.randrange(len(data))) : start + rng.randrange(1, 60)]
    if rng.random() < 0.2:
        return bytes(data[: rng.randrange(len(data) + 1)]), 0
    return bytes(data), SPARSE_BYTES if rng.random() < 0.1 else len(data) + 16384


def check(file: GgufFile, size: int) -> None:
    """What opened lies inside the file, one tensor after the other, and every expert inside its tensor."""
    end = 0
    for info in file.tensors.values():
        assert end <= info.offset <= info.offset + info.n_bytes <= size, info
        end = info.offset + info.n_bytes
    for part in file.expert_parts(0) or ():
        n = [i for i in file.tensors.values() if i.offset <= part.offset < i.offset + i.n_bytes]
        assert len(n) == 1 and part.n_bytes <= part.stride, part
        last = part.offset + (n[0].n_bytes // part.stride - 1) * part.stride
        assert last + part.n_bytes <= n[0].offset + n[0].n_bytes, part


def open_mutants(folder: Path, seeds: range, library: Library) -> dict[str, int]:
    counts = {"opened": 0, "refused": 0}
    path = folder / "m.gguf"
    for seed in seeds:
        content, size = mutant(seed)
        path.unlink(missing_ok=True)  # a file system may write out a file that is truncated and written anew
        with open(path, "wb") as f:
            f.write(content)
            f.truncate(max(size, len(content)))
        try:
            file = open_gguf(path, library)
            check(file, path.stat().st_size)
        except ModelFileError as e:
            text = str(e)
            assert text.isprintable() and len(text) < len(str(path)) * 2 + 400, (seed, text)
            assert "ggml can't" not in text, f"seed {seed} passed the walk and ggml refused it"
            counts["refused"] += 1
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
        else:
            counts["opened"] += 1
    return counts


def largest_header(path: Path, n_texts: int) -> None:
    """The costliest header for its size: strings too long to be kept inside a std::string."""
    head = raw.string("texts") + struct.pack("<IIQ", raw.ARRAY, raw.STRING, n_texts)
    path.write_bytes(raw.file_bytes([head + raw.string("x" * 20) * n_texts]))


def run(folder: Path, *arguments: object) -> dict[str, int]:
    command = [sys.executable, __file__, str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit {done.returncode}; see {folder}/m.gguf\n{done.stderr[-3000:]}"
    return json.loads(done.stdout)


def test_mutated_headers_never_crash_and_need_little_memory(tmp_path: Path) -> None:
    counts = run(tmp_path, 0, 4000)
    assert counts["opened"] > 200 and counts["refused"] > 1000
    assert counts["peak_bytes"] < 256 << 20  # the header of a huge file may claim one string of 64 MiB


def test_the_largest_header_needs_bounded_memory(tmp_path: Path) -> None:
    largest_header(tmp_path / "m.gguf", 1 << 21)
    counts = run(tmp_path, "largest")
    assert counts["opened"] == 1
    assert counts["peak_bytes"] < 768 << 20


def test_one_more_string_is_refused(tmp_path: Path) -> None:
    largest_header(tmp_path / "m.gguf", (1 << 21) + 1)
    with pytest.raises(ModelFileError, match="impossible array"):
        open_gguf(tmp_path / "m.gguf", load_library())


def main(folder: Path, first: str, *rest: str) -> None:
    library = load_library()
    try:
        import resource
    except ImportError:  # Windows: memory is not measured
        resource = None
    start = 0
    if resource is not None and sys.platform == "linux":
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 30), in_use + (1 << 30)))
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if first == "largest":
        counts = {"opened": len(open_gguf(folder / "m.gguf", library).metadata)}
    else:
        counts = open_mutants(folder, range(int(first), int(first) + int(rest[0])), library)
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) if start and resource else 0
    print(json.dumps({**counts, "peak_bytes": peak}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
