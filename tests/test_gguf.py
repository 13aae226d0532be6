from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import raw_gguf as raw
from tiny import TinyModel, write_tiny

from sluice.errors import ModelFileError
from sluice.ggml import GgmlType, Library, load_library
from sluice.gguf import PACK_VERSION, ExpertPart, GgufFile, open_gguf, shard_paths

T = gguf.GGMLQuantizationType
SMALL = {"n_layers": 2, "n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff_exp": 96, "n_expert": 5,
         "expert_type": T.Q5_0, "down_type": T.Q8_0}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library()


def expert_bytes(file: GgufFile, part: ExpertPart, expert: int) -> bytes:
    with open(file.paths[part.file], "rb") as f:
        f.seek(part.offset + expert * part.stride)
        return f.read(part.n_bytes)


def assert_same_experts(model: TinyModel, file: GgufFile) -> None:
    """Every expert's bytes, dequantised by the gguf package, are the rows of the tensors that were written."""
    config = model.config
    for layer in range(config.n_layers):
        parts = file.expert_parts(layer)
        assert parts is not None
        assert [part.role for part in parts] == ["gate", "up", "down"]
        for part in parts:
            if config.fused and part.role != "down":
                both = model.weights[f"blk.{layer}.ffn_gate_up_exps.weight"]
                half = config.n_ff_exp
                whole = both[:, :half] if part.role == "gate" else both[:, half:]
            else:
                whole = model.weights[f"blk.{layer}.ffn_{part.role}_exps.weight"]
            assert whole.shape == (config.n_expert, part.n_out, part.n_in)
            for expert in range(config.n_expert):
                stored = np.frombuffer(expert_bytes(file, part, expert), np.uint8).reshape(part.n_out, -1)
                np.testing.assert_array_equal(gguf.quants.dequantize(stored, T(part.type)), whole[expert])


def refusal(path: Path, library: Library) -> str:
    """What opening `path` and asking for its experts says is wrong with it."""
    with pytest.raises(ModelFileError) as caught:
        open_gguf(path, library).expert_parts(0)
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and text.isprintable(), text
    assert str(path.parent) in text and text.count(": ") >= 2, f"no cause and remedy: {text}"
    return text


@pytest.mark.parametrize("alignment", [8, 16, 32, 64, 4096])
def test_metadata_and_tensors_are_what_the_gguf_package_reads(tmp_path: Path, library: Library, alignment: int) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL, alignment=alignment, shuffled=True, dense_layers=(1,))
    file, reader = open_gguf(model.path, library), gguf.GGUFReader(model.path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert dict(file.metadata) == expected
    assert list(file.tensors) == [t.name for t in reader.tensors]
    for theirs in reader.tensors:
        ours = file.tensors[theirs.name]
        assert (ours.type, ours.offset, ours.n_bytes, ours.file) == (
            theirs.tensor_type, theirs.data_offset, theirs.n_bytes, 0)  # fmt: skip
        assert ours.shape == (*theirs.shape.tolist(), *[1] * (4 - len(theirs.shape)))
        assert ours.offset % alignment == 0
    assert file.expert_parts(1) is None
    assert file.expert_parts(7) is None
    assert not file.packed
    assert file.n_bytes == model.path.stat().st_size


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("split", [1, 3])
def test_an_experts_bytes(tmp_path: Path, library: Library, fused: bool, shuffled: bool, split: int) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL, fused=fused, shuffled=shuffled, split=split)
    assert_same_experts(model, open_gguf(model.path, library))


@pytest.mark.parametrize("type", list(GgmlType), ids=lambda t: t.name)
def test_every_tensor_type(tmp_path: Path, library: Library, type: GgmlType) -> None:
    if int(type) in set(map(int, T)):
        block, size = gguf.GGML_QUANT_SIZES[T(type)]
    else:  # newer than the package
        block, size = library.ggml_blck_size(type), library.ggml_type_size(type)
    if type == GgmlType.Q8_1:
        size = 36  # two f16 and 32 bytes in ggml-common.h; the package still has the two f32 of old
    rng = np.random.default_rng(int(type))
    described, data, written = [], b"", {}
    for role, (n_in, n_out) in {"gate": (2 * block, 3), "up": (2 * block, 3), "down": (block, 5)}.items():
        described.append(raw.tensor(f"blk.0.ffn_{role}_exps.weight", (n_in, n_out, 4), type, len(data)))
        written[role] = [rng.bytes(n_out * n_in // block * size) for _ in range(4)]
        data += b"".join(written[role])
        data += bytes(-len(data) % 32)
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.file_bytes([], described, data))
    file = open_gguf(path, library)
    parts = file.expert_parts(0)
    assert parts is not None
    for part in parts:
        assert part.type == type
        assert part.n_in == (block if part.role == "down" else 2 * block)
        assert [expert_bytes(file, part, expert) for expert in range(4)] == written[part.role]


@pytest.mark.parametrize("given", [0, 1, 2, 3])
def test_a_split_model_opens_by_any_shard(tmp_path: Path, library: Library, given: int) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL, split=4, empty_first_shard=True)
    file = open_gguf(model.paths[given], library)
    assert file.paths == model.paths
    assert not [info for info in file.tensors.values() if info.file == 0]
    assert set(file.tensors) == set(model.stored)
    assert file.metadata["general.architecture"] == "qwen3moe"
    assert_same_experts(model, file)


PATTERNS = ["m-{}-of-{}.gguf", "m-{:02d}-of-{}.gguf", "m-{:07d}-of-{:03d}.gguf", "-{:05d}-of-{:05d}.gguf"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_shard_numbers_have_any_width(tmp_path: Path, library: Library, pattern: str) -> None:
    paths = [tmp_path / pattern.format(i + 1, 12) for i in range(12)]
    for i, path in enumerate(paths):
        entries = [raw.entry("split.no", raw.U16, i), raw.entry("split.count", raw.U16, 12)]
        path.write_bytes(raw.file_bytes(entries, [raw.tensor(f"t{i}", (8,), 0, 0)], bytes(32)))
    for given in (0, 1, 8, 9, 11):
        file = open_gguf(paths[given], library)
        assert list(file.paths) == paths
        assert [info.file for info in file.tensors.values()] == list(range(12))


def test_names_that_are_not_a_shards_stand_alone() -> None:
    for name in (
        "m.gguf",
        "m-0-of-3.gguf",
        "m-4-of-3.gguf",
        "m-1-of-3.bin",
        "m-1-of-99999.gguf",
        "m-x-of-3.gguf",
        "m-²-of-3.gguf",
    ):
        assert shard_paths(Path(name)) == (Path(name),)


def test_a_file_merged_by_gguf_split(tmp_path: Path, library: Library) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.moe_bytes(entries=[raw.entry("split.count", raw.U16, 0), raw.entry("split.no", raw.U16, 2),
                                            raw.entry("split.tensors.count", raw.I32, 3)]))  # fmt: skip
    assert len(open_gguf(path, library).tensors) == 3


def test_every_kind_of_metadata_value(tmp_path: Path, library: Library) -> None:
    numbers = {raw.U8: 255, raw.I8: -128, raw.U16: 65535, raw.I16: -32768, raw.U32: 2**32 - 1, raw.I32: -(2**31),
               raw.F32: 1.5, raw.BOOL: True, raw.U64: 2**64 - 1, raw.I64: -(2**63), raw.F64: 0.1}  # fmt: skip
    entries = [raw.entry(f"one.{kind}", kind, number) for kind, number in numbers.items()]
    entries += [raw.array(f"some.{kind}", kind, [number, 0, number]) for kind, number in numbers.items()]
    entries += [raw.array(f"none.{kind}", kind, []) for kind in (*numbers, raw.STRING)]
    entries += [
        raw.entry("text", raw.STRING, "naïve\n\0end"),
        raw.entry("broken", raw.STRING, b"\xff|"),
    ]
    entries += [raw.array("texts", raw.STRING, ["", "a", "\0b", "日本", b"\xc3"]), raw.entry("ключ", raw.U8, 1)]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.file_bytes(entries))
    metadata = open_gguf(path, library).metadata
    expected = {f"one.{kind}": number for kind, number in numbers.items()}
    expected |= {f"some.{kind}": [number, 0, number] for kind, number in numbers.items()}
    expected |= {f"none.{kind}": [] for kind in (*numbers, raw.STRING)}
    expected |= {"text": "naïve\n\0end", "broken": "\ufffd|", "texts": ["", "a", "\0b", "日本", "\ufffd"], "ключ": 1}
    assert metadata == expected
    assert isinstance(metadata["one.7"], bool)


def test_strings_longer_than_a_read(tmp_path: Path, library: Library) -> None:
    texts = ["x" * 700_000, "é" * 900_000, "z"]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.file_bytes([raw.array("texts", raw.STRING, texts), raw.entry("text", raw.STRING, texts[1])]))
    metadata = open_gguf(path, library).metadata
    assert metadata["texts"] == texts and metadata["text"] == texts[1]


def test_a_scalar_and_a_vector(tmp_path: Path, library: Library) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.file_bytes([], [raw.tensor("s", (), 0, 0), raw.tensor("v", (5,), 1, 32)], bytes(64)))
    file = open_gguf(path, library)
    assert (file.tensors["s"].shape, file.tensors["s"].n_bytes) == ((1, 1, 1, 1), 4)
    assert (file.tensors["v"].shape, file.tensors["v"].n_bytes) == ((5, 1, 1, 1), 10)


def test_a_file_without_its_last_padding_is_whole(tmp_path: Path, library: Library) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.file_bytes([], [raw.tensor("v", (3,), 0, 0)], bytes(12)))
    assert open_gguf(path, library).tensors["v"].n_bytes == 12


def test_no_cut_file_opens(tmp_path: Path, library: Library) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL)
    content = model.path.read_bytes()
    start = open_gguf(model.path, library).tensors["token_embd.weight"].offset
    path = tmp_path / "cut.gguf"
    for cut in sorted(
        {
            *range(1, 64),
            *range(64, start, 211),
            start - 1,
            start,
            *range(start, len(content), 100_003),
            len(content) - 33,
        }
    ):
        path.write_bytes(content[:cut])
        text = refusal(path, library)
        assert "incomplete" in text or cut < 4, (cut, text)


F32 = 0
ONE = [raw.tensor("a", (8,), F32, 0)]
DATA = bytes(4096)
BAD = {
    "empty": (b"", "empty"),
    "html": (b"<html>not found</html>" * 5, "not a GGUF file"),
    "old ggml": (b"ggjt" + bytes(100), "not a GGUF file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
    "version 0": (raw.file_bytes(version=0), "GGUF version 0"),
    "version 1": (raw.file_bytes(version=1), "GGUF version 1"),
    "version 4": (raw.file_bytes(version=4), "GGUF version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many tensors": (raw.file_bytes(n_tensors=2**63), "claims"),
    "many keys": (raw.file_bytes(n_entries=2**40), "claims"),
    "more keys than there are": (raw.file_bytes(n_entries=9, data=bytes(8)), "can't be a name"),
    "empty key": (raw.file_bytes([raw.entry("", raw.U8, 0)]), "can't be a name"),
    "binary key": (raw.file_bytes([raw.entry(b"\xff\xfe", raw.U8, 0)]), "can't be a name"),
    "key of two lines": (raw.file_bytes([raw.entry("a\nb", raw.U8, 0)]), "can't be a name"),
    "key with a NUL": (raw.file_bytes([raw.entry("a\0b", raw.U8, 0)]), "can't be a name"),
    "long key": (raw.file_bytes([raw.entry("k" * 70_000, raw.U8, 0)]), "has 70000 bytes"),
    "key twice": (raw.file_bytes([raw.entry("a", raw.U8, 0), raw.entry("a", raw.STRING, "")]), "given twice"),
    "long string": (raw.file_bytes([raw.string("a") + struct.pack("<IQ", raw.STRING, 2**64 - 1)]), "ends inside"),
    "value type 13": (raw.file_bytes([raw.string("a") + struct.pack("<I", 13) + DATA]), "unknown type 13"),
    "long array": (raw.file_bytes([raw.array("a", raw.U64, [], 2**61)]), "impossible array"),
    "many elements": (raw.file_bytes([raw.array(f"a{i}", raw.U8, bytes(2**20)) for i in range(3)]), "impossible array"),
    "array of arrays": (raw.file_bytes([raw.array("a", raw.ARRAY, [], 1)], data=DATA), "impossible array"),
    "array cut short": (raw.file_bytes([raw.array("a", raw.STRING, ["x"], 1000)], data=b"\xff" * 90), "ends inside"),
    "alignment 0": (raw.file_bytes([raw.entry("general.alignment", raw.U32, 0)], ONE, DATA), "power of two"),
    "alignment 24": (raw.file_bytes([raw.entry("general.alignment", raw.U32, 24)], ONE, DATA), "power of two"),
    "alignment u64": (raw.file_bytes([raw.entry("general.alignment", raw.U64, 32)], ONE, DATA), "power of two"),
    "alignment array": (raw.file_bytes([raw.array("general.alignment", raw.U32, [32])], ONE, DATA), "power of two"),
    "huge alignment": (raw.file_bytes([raw.entry("general.alignment", raw.U32, 2**31)], ONE, DATA), "incomplete"),
    "empty name": (raw.file_bytes([], [raw.tensor("", (8,), F32, 0)], DATA), "can't be a name"),
    "long name": (raw.file_bytes([], [raw.tensor("n" * 64, (8,), F32, 0)], DATA), "has 64 bytes"),
    "name twice": (raw.file_bytes([], ONE * 2, DATA), "given twice"),
    "5 dimensions": (raw.file_bytes([], [raw.tensor("a", (1,) * 5, F32, 0)], DATA), "5 dimensions"),
    "2**32-1 dimensions": (raw.file_bytes([], [raw.tensor("a", (), F32, 0, 2**32 - 1)], DATA), "dimensions"),
    "zero dimension": (raw.file_bytes([], [raw.tensor("a", (8, 0), F32, 0)], DATA), "impossible shape"),
    "negative dimension": (raw.file_bytes([], [raw.tensor("a", (2**64 - 8,), F32, 0)], DATA), "incomplete"),
    "overflow": (raw.file_bytes([], [raw.tensor("a", (2**32, 2**32, 4, 4), F32, 0)], DATA), "incomplete"),
    "overflow to 32": (raw.file_bytes([], [raw.tensor("a", (2**62 + 8,), F32, 0)], DATA), "incomplete"),
    "half a block": (raw.file_bytes([], [raw.tensor("a", (128,), GgmlType.Q4_K, 0)], DATA), "impossible shape"),
    "block across rows": (raw.file_bytes([], [raw.tensor("a", (16, 2), GgmlType.Q8_0, 0)], DATA), "impossible shape"),
    "unknown type": (raw.file_bytes([], [raw.tensor("a", (8,), 99, 0)], DATA), "unknown type 99"),
    "removed type": (raw.file_bytes([], [raw.tensor("a", (32,), 4, 0)], DATA), "unknown type 4"),
    "negative type": (raw.file_bytes([], [raw.tensor("a", (8,), 2**32 - 1, 0)], DATA), "unknown type"),
    "gap": (raw.file_bytes([], [*ONE, raw.tensor("b", (8,), F32, 64)], DATA), "lies at 64, not at 32"),
    "overlap": (raw.file_bytes([], [*ONE, raw.tensor("b", (8,), F32, 0)], DATA), "lies at 0, not at 32"),
    "unaligned": (raw.file_bytes([], [*ONE, raw.tensor("b", (8,), F32, 33)], DATA), "lies at 33"),
    "huge offset": (raw.file_bytes([], [raw.tensor("a", (8,), F32, 2**64 - 32)], DATA), "lies at"),
    "past the end": (raw.file_bytes([], [raw.tensor("a", (2048,), F32, 0)], DATA), "incomplete"),
    "one of 3 shards": (raw.moe_bytes(entries=[raw.entry("split.count", raw.U16, 3)]), "3 shards"),
    "split.count text": (raw.moe_bytes(entries=[raw.entry("split.count", raw.STRING, "a\nb" * 99)]), "shards"),
    "split.count array": (raw.moe_bytes(entries=[raw.array("split.count", raw.U16, [1] * 999)]), "shards"),
    "split.no": (raw.moe_bytes(entries=[raw.entry("split.no", raw.U16, 1)]), "number 1"),
    "split.tensors.count": (raw.moe_bytes(entries=[raw.entry("split.tensors.count", raw.STRING, "\n")]), "not of one"),
    "gate only": (raw.moe_bytes({"gate": (8, 4, 2)}), "instead of gate, up and down"),
    "no down": (raw.moe_bytes({"gate": (8, 4, 2), "up": (8, 4, 2)}), "instead of"),
    "no gate": (raw.moe_bytes({"up": (8, 4, 2), "down": (4, 8, 2)}), "instead of"),
    "fused and separate": (raw.moe_bytes({**raw.F32_EXPERTS, "gate_up": (8, 8, 2)}), "instead of"),
    "counts disagree": (raw.moe_bytes({**raw.F32_EXPERTS, "up": (8, 4, 3)}), "disagree"),
    "four dimensions": (raw.moe_bytes({**raw.F32_EXPERTS, "up": (8, 4, 2, 2)}), "disagree"),
    "odd fused rows": (raw.moe_bytes({"gate_up": (8, 7, 2), "down": (4, 8, 2)}), "odd number of rows"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(tmp_path: Path, library: Library, case: str) -> None:
    content, cause = BAD[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert cause in refusal(path, library)


def _packed_bytes(numbers: list[int], kind: int = raw.U64, dims: tuple[int, ...] = (4096, 2), type: int = 24) -> bytes:
    entries = [raw.entry("sluice.pack.version", raw.U32, PACK_VERSION), raw.array("sluice.pack.blk.0", kind, numbers)]
    return raw.file_bytes(entries, [raw.tensor("blk.0.ffn_exps.packed", dims, type, 0)], bytes(8192 * 4))


PACKED = [0, 8, 4, 0, 128, 0, 8, 4, 512, 128, 0, 4, 8, 1024, 128]  # F32 parts at 0, 512 and 1024


def _with(at: int, number: int) -> list[int]:
    return [*PACKED[:at], number, *PACKED[at + 1 :]]


def test_a_packed_layer(tmp_path: Path, library: Library) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(_packed_bytes(PACKED))
    file = open_gguf(path, library)
    start = file.tensors["blk.0.ffn_exps.packed"].offset
    assert file.packed
    assert file.expert_parts(1) is None
    assert file.expert_parts(0) == (
        ExpertPart("gate", GgmlType.F32, 8, 4, 0, start, 4096, 128),
        ExpertPart("up", GgmlType.F32, 8, 4, 0, start + 512, 4096, 128),
        ExpertPart("down", GgmlType.F32, 4, 8, 0, start + 1024, 4096, 128),
    )


@pytest.mark.parametrize(
    "content",
    [
        _packed_bytes(PACKED[:14]),
        _packed_bytes(PACKED, raw.F32),
        _packed_bytes(PACKED, type=0),
        _packed_bytes(PACKED, dims=(1024, 2)),
        _packed_bytes(PACKED, dims=(4096, 2, 2)),
        _packed_bytes(_with(0, 4)),  # a type that ggml removed
        _packed_bytes(_with(0, GgmlType.Q4_K)),  # rows of 8 are no whole blocks of that
        _packed_bytes(_with(1, 0)),
        _packed_bytes(_with(2, 2**64 - 4)),
        _packed_bytes(_with(3, 4096)),
        _packed_bytes(_with(4, 127)),
        _packed_bytes(_with(8, 0)),  # over the matrix before it
        _packed_bytes(_with(8, 520)),  # where no writer puts it
        _packed_bytes(_with(4, 2**63)),
        _packed_bytes(PACKED).replace(struct.pack("<II", raw.U32, PACK_VERSION), struct.pack("<II", raw.U32, 99)),
        _packed_bytes(PACKED).replace(b"sluice.pack.blk.0", b"sluice.pack.blk.1"),
    ],
)
def test_bad_packed_files_are_refused(tmp_path: Path, library: Library, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert "pack the model again" in refusal(path, library)


def test_paths_that_are_no_model_file(tmp_path: Path, library: Library) -> None:
    assert "no such file" in refusal(tmp_path / "none.gguf", library)
    assert "no such file" in refusal(tmp_path / "none.gguf" / "m.gguf", library)
    (tmp_path / "folder.gguf").mkdir()
    assert "a directory" in refusal(tmp_path / "folder.gguf", library)
    (tmp_path / "link.gguf").symlink_to(tmp_path / "gone.gguf")
    assert "no such file" in refusal(tmp_path / "link.gguf", library)
    for path in (tmp_path / "a\0b", tmp_path / ("long" * 1000)):
        with pytest.raises(ModelFileError):
            open_gguf(path, library)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path, library: Library) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refusal(tmp_path / "pipe.gguf", library)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may read everything")
def test_no_permission(tmp_path: Path, library: Library) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.moe_bytes())
    path.chmod(0)
    assert "permissions" in refusal(path, library)


def test_a_big_endian_file_of_the_gguf_package(tmp_path: Path, library: Library) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "big-endian" in refusal(tmp_path / "m.gguf", library)


def test_shards_that_do_not_belong_together(tmp_path: Path, library: Library) -> None:
    model = write_tiny(tmp_path / "m.gguf", **SMALL, split=3)
    contents = [path.read_bytes() for path in model.paths]
    first, second, third = model.paths

    second.unlink()
    assert "(2 of 3) is missing" in refusal(third, library)
    second.write_bytes(contents[2])
    assert "says it is number 2 from 0" in refusal(first, library)
    second.write_bytes(contents[1][: len(contents[1]) // 2])
    assert "incomplete" in refusal(first, library)
    second.write_bytes(raw.file_bytes())  # a sound file without the tensors that the first shard promises
    assert "not of one model" in refusal(first, library)
    second.write_bytes(contents[0].replace(b"split.no", b"split.nn"))
    assert "in two shards" in refusal(first, library)
    second.write_bytes(contents[1])
    third.rename(tmp_path / "m-00003-of-00002.gguf")
    first, second = (path.rename(tmp_path / f"m-{i + 1}-of-2.gguf") for i, path in enumerate((first, second)))
    assert "says it is one of 3 shards" in refusal(second, library)
