"""Traces: what is written is read back, in bounded memory, and a file that is no whole trace is refused in one line."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.errors import InputError
from sluice.trace import TraceBatch, TraceInfo, TraceReader, TraceWriter, same_model, schema
from sluice.trace.reader import MAX_DOMAINS, MAX_GROUP_ROWS

INFO = TraceInfo(
    fingerprint="ab", architecture="qwen3moe", name="tiny", n_layers=4, moe_layers=(1, 3), n_expert=8, top_k=2,
    expert_bytes=(100, 200), source="test",
)  # fmt: skip


class Written:
    """Random steps given to a writer, and what each row should read."""

    def __init__(self, seed: int = 0, *, scores: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.scores = scores
        self.rows: list[dict[str, Any]] = []
        self.step = -1

    def add(
        self, writer: TraceWriter, phase: str, columns: list[tuple[int, int]], last: list[int] | None = None
    ) -> None:
        """A step of `columns`, (sequence, position) each; layer 3 runs for the columns `last` only."""
        self.step += 1
        sequences, positions = (np.array(values, np.int32) for values in zip(*columns, strict=True))
        writer.begin_step(self.step, phase, sequences, positions)
        for layer, chosen in ((1, None), (3, last)):
            mine = list(range(len(columns))) if chosen is None else chosen
            experts = np.argsort(self.rng.random((len(mine), 8)), axis=1)[:, :2].astype(np.int32)
            weights = self.rng.random((len(mine), 2), dtype=np.float32)
            scores = self.rng.random((len(mine), 8), dtype=np.float32)
            writer.chose(layer, experts, scores if self.scores else None, None if chosen is None else np.array(chosen))
            writer.weighed(weights)
            for i, column in enumerate(mine):
                sequence, position = columns[column]
                row = {"step": self.step, "sequence": sequence, "position": position, "phase": phase, "layer": layer}
                row |= {"experts": experts[i].tolist(), "weights": weights[i].tolist()}
                row |= {"scores": scores[i].tolist() if self.scores else None, "domain": writer.domains.get(sequence)}
                self.rows.append(row)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def batches(path: Path, **wanted: bool) -> tuple[list[TraceBatch], list[str]]:
    with TraceReader(path) as reader:
        return list(reader.batches(**wanted)), reader.domains


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("block_bytes", [1, 700, 1 << 20])
def test_what_is_written_is_read_back(tmp_path: Path, scores: bool, block_bytes: int) -> None:
    out, given = tmp_path / "t.parquet", Written(scores=scores)
    with TraceWriter(out, INFO, scores=scores, block_bytes=block_bytes, least_rows=1) as writer:
        writer.domains |= {0: "code", 2: "prose"}
        given.add(writer, "prefill", [(0, i) for i in range(7)], [6])
        given.add(writer, "prefill", [(1, 0), (2, 0), (2, 1)], [0, 2])
        for i in range(9):
            given.add(writer, "decode", [(0, 7 + i), (2, 2 + i)])
        assert not out.exists()
    assert rows_of(out) == given.rows
    assert not list(tmp_path.glob("*.partial"))
    assert writer.n_rows == len(given.rows)

    found, domains = batches(out, weights=True, scores=True)
    assert len(found) > 1 or block_bytes > 1000
    again = []
    for batch in found:
        assert batch.weights is not None
        for i in range(len(batch)):
            part = slice(batch.offsets[i], batch.offsets[i + 1])
            again.append({
                "step": batch.step[i], "sequence": batch.sequence[i], "position": batch.position[i],
                "phase": "decode" if batch.decode[i] else "prefill", "layer": batch.layer[i],
                "experts": batch.experts[part].tolist(), "weights": batch.weights[part].tolist(),
                "scores": None if batch.scores is None else batch.scores[i].tolist(),
                "domain": None if batch.domain[i] < 0 else domains[batch.domain[i]],
            })  # fmt: skip
    assert again == given.rows
    unwanted, _ = batches(out)
    assert all(batch.weights is None and batch.scores is None for batch in unwanted)
    with TraceReader(out) as reader:
        assert (reader.info, reader.n_rows) == (INFO, len(given.rows))


def test_a_step_that_fails_leaves_its_whole_layers(tmp_path: Path) -> None:
    out, given = tmp_path / "t.parquet", Written()
    with pytest.raises(ZeroDivisionError), TraceWriter(out, INFO) as writer:
        given.add(writer, "decode", [(0, 0)])
        writer.begin_step(1, "decode", np.zeros(1, np.int32), np.ones(1, np.int32))
        writer.chose(1, np.array([[3, 4]]))
        raise ZeroDivisionError  # before its weights are known
    assert rows_of(out) == given.rows


def test_a_step_after_one_that_failed_does_not_inherit_its_layer(tmp_path: Path) -> None:
    out, given = tmp_path / "t.parquet", Written()
    with TraceWriter(out, INFO) as writer:
        writer.begin_step(0, "decode", np.zeros(1, np.int32), np.zeros(1, np.int32))
        writer.chose(1, np.array([[3, 4]]))
        given.add(writer, "decode", [(0, 0)])
    assert rows_of(out) == given.rows


def test_a_trace_without_weights(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    with TraceWriter(out, INFO, weights=False) as writer:
        writer.begin_step(0, "decode", np.zeros(1, np.int32), np.zeros(1, np.int32))
        writer.chose(1, np.array([[3, 4]]))
        writer.weighed()
    assert rows_of(out)[0]["weights"] is None
    [batch], _ = batches(out, weights=True)
    assert batch.weights is None and batch.experts.tolist() == [3, 4]


def test_nothing_recorded_is_no_file(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    out.write_bytes(b"mine")
    with TraceWriter(out, INFO, force=True):
        pass
    assert out.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [out]


def test_what_is_abandoned_is_gone(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.parquet", INFO) as writer:
        Written().add(writer, "decode", [(0, 0)])
        writer.abandon()
    writer.close()
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    out.write_bytes(b"mine")
    with pytest.raises(InputError, match=r"exists already: .* --force"):
        TraceWriter(out, INFO)
    assert out.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [out]
    with TraceWriter(out, INFO, force=True) as writer:
        Written().add(writer, "decode", [(0, 0)])
    assert len(rows_of(out)) == 2


def test_a_file_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    writer = TraceWriter(out, INFO)
    Written().add(writer, "decode", [(0, 0)])
    out.write_bytes(b"mine")
    with pytest.raises(InputError, match=r"appeared .*t\.parquet\.partial"):
        writer.close()
    assert out.read_bytes() == b"mine"
    assert len(rows_of(tmp_path / "t.parquet.partial")) == 2


@pytest.mark.parametrize("name", [".", "none/t.parquet", "\0"])
def test_a_place_that_can_not_be_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises((InputError, ValueError)) as caught:
        TraceWriter(tmp_path / name, INFO, force=True)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on files' sizes")
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    import resource

    writer, given = TraceWriter(tmp_path / "t.parquet", INFO, block_bytes=1, least_rows=1), Written()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(InputError, match=r"t\.parquet: can't be written \(File too large\): free space, or"):
            for i in range(50):
                given.add(writer, "decode", [(0, i)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.close()
    assert not list(tmp_path.iterdir())


def test_a_killed_process_leaves_only_the_part(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    script = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[2]); from test_trace import *; "
        "writer, given = TraceWriter(sys.argv[1], INFO, block_bytes=1, least_rows=1), Written()\n"
        "for i in range(50): given.add(writer, 'decode', [(0, i)])\n"
        "os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(out), str(Path(__file__).parent)], check=False)
    assert done.returncode == 9
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet.partial"]
    with pytest.raises(InputError, match=r"was not finished|is empty|empty:"):
        TraceReader(tmp_path / "t.parquet.partial")
    with TraceWriter(out, INFO) as writer:  # the next recording does not stumble over it
        Written().add(writer, "decode", [(0, 0)])
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.parquet", INFO, block_bytes=64 << 10) as writer:
        sizes = {name: block.nbytes for name, block in writer._blocks().items()}
        one = np.zeros(1, np.int32)
        for i in range(20_000):
            writer.begin_step(i, "decode", one, one + i)
            writer.chose(1, np.array([[i % 8, (i + 1) % 8]]))
            writer.weighed(np.ones((1, 2), np.float32))
        assert {name: block.nbytes for name, block in writer._blocks().items()} == sizes
        assert sum(sizes.values()) <= 64 << 10
    with TraceReader(writer.path) as reader:
        assert reader.n_rows == 20_000
        assert max(len(batch) for batch in reader.batches()) < 3000


def test_traces_of_two_models_are_told_apart() -> None:
    imported = replace(INFO, fingerprint="", architecture="")
    same_model([INFO, imported, INFO], "abc")
    with pytest.raises(InputError, match=r"c was recorded on another model than a \(fingerprint\)"):
        same_model([INFO, imported, replace(INFO, fingerprint="cd")], "abc")
    with pytest.raises(InputError, match="n_expert"):
        same_model([imported, replace(INFO, n_expert=9)], "ab")


# --- files that are no traces


def table(n: int = 4, **changed: Any) -> pa.Table:
    """Rows of one decode step each in layer 1; `changed` columns instead."""
    columns: dict[str, Any] = {
        "step": pa.array(range(n), pa.int64()), "sequence": pa.array([0] * n, pa.int32()),
        "position": pa.array(range(n), pa.int32()), "phase": pa.array(["decode"] * n),
        "layer": pa.array([1] * n, pa.int16()), "experts": pa.array([[1, 2]] * n, pa.list_(pa.int16())),
        "weights": pa.array([[0.5, 0.5]] * n, pa.list_(pa.float32())),
        "scores": pa.array([None] * n, pa.list_(pa.float32())), "domain": pa.array([None] * n, pa.string()),
    }  # fmt: skip
    return pa.table(columns | changed, metadata={b"sluice.trace": INFO.to_json().encode()})


def made(path: Path, rows: pa.Table, **options: Any) -> Path:
    pq.write_table(rows, path, **options)
    return path


def with_info(**changed: Any) -> pa.Table:
    fields = {name: value for name, value in (asdict(INFO) | changed).items() if value is not None}
    return table().replace_schema_metadata({b"sluice.trace": json.dumps(fields).encode()})


def i16(*rows: list[int] | None) -> pa.Array:
    return pa.array(rows, pa.list_(pa.int16()))


def f32(*rows: Sequence[float | None] | None) -> pa.Array:
    return pa.array(rows, pa.list_(pa.float32()))


REFUSED: dict[str, tuple[Callable[[], pa.Table], str]] = {
    "no metadata": (lambda: table().replace_schema_metadata(None), "lacks the metadata"),
    "metadata is no JSON": (lambda: table().replace_schema_metadata({b"sluice.trace": b"{"}), "metadata is damaged"),
    "metadata is deep": (lambda: table().replace_schema_metadata({b"sluice.trace": b"[" * 99999}), "is damaged"),
    "metadata is a list": (lambda: table().replace_schema_metadata({b"sluice.trace": b"[]"}), "no object"),
    "metadata is no UTF-8": (lambda: table().replace_schema_metadata({b"sluice.trace": b'"\xff"'}), "is damaged"),
    "later format": (lambda: with_info(format=2), "format 2, this version reads 1"),
    "missing field": (lambda: with_info(n_expert=None), "n_expert is None"),
    "text for a number": (lambda: with_info(top_k="8"), "top_k is '8'"),
    "truth for a number": (lambda: with_info(top_k=True), "top_k is True"),
    "long text for a number": (lambda: with_info(top_k="\n" * 10**6), "top_k is"),
    "unknown field": (lambda: with_info(zebra=1), "'zebra' is unknown"),
    "too many experts": (lambda: with_info(n_expert=1 << 40), "experts"),
    "an endless number": (lambda: table().replace_schema_metadata(
        {b"sluice.trace": INFO.to_json().replace('"top_k": 2', f'"top_k": {"9" * 5000}').encode()}), "is damaged"),
    "more chosen than there are": (lambda: with_info(top_k=9), "top_k 9"),
    "no layers": (lambda: with_info(moe_layers=[], expert_bytes=[]), "moe_layers"),
    "layers twice": (lambda: with_info(moe_layers=[1, 1]), "moe_layers"),
    "layers beyond": (lambda: with_info(moe_layers=[1, 4]), "more than the 4 layers"),
    "sizes of other layers": (lambda: with_info(expert_bytes=[1]), "expert_bytes"),
    "negative sizes": (lambda: with_info(expert_bytes=[1, -1]), "expert_bytes"),
    "missing column": (lambda: table().drop_columns(["layer"]), "not one column layer"),
    "column twice": (lambda: table().append_column("step", pa.array(range(4))), "not one column step"),
    "other type": (lambda: table(step=pa.array(range(4), pa.int32())), "column step is int32"),
    "no lists": (lambda: table(experts=pa.array([1] * 4, pa.int16())), "column experts is int16"),
    "lists of text": (lambda: table(experts=pa.array([["1"]] * 4)), "column experts is list"),
    "phase is a number": (lambda: table(phase=pa.array(range(4))), "column phase is int64"),
    "nulls": (lambda: table(step=pa.array([0, 1, None, 3], pa.int64())), "nulls"),
    "null experts": (lambda: table(experts=i16([1, 2], None, [1, 2], [1, 2])), "nulls"),
    "null phase": (lambda: table(phase=pa.array(["decode", None, "decode", "decode"])), "nulls"),
    "no experts": (lambda: table(experts=i16([1, 2], [], [1, 2], [1, 2])), "without experts"),
    "none at all": (lambda: table(experts=i16([], [], [], [])), "without experts"),
    "expert beyond": (lambda: table(experts=i16([1, 2], [1, 8], [1, 2], [1, 2])), "beyond the 8"),
    "negative expert": (lambda: table(experts=i16([1, 2], [1, -1], [1, 2], [1, 2])), "beyond the 8"),
    "expert twice": (lambda: table(experts=i16([1, 2], [3, 3], [1, 2], [1, 2])), "twice"),
    "expert twice, other lengths": (lambda: table(experts=i16([1], [3, 4, 3], [1, 2], [1, 2])), "twice"),
    "a huge list": (lambda: table(experts=i16([1, 2], [1] * 10**6, [1, 2], [1, 2])), "an expert twice"),
    "layer without experts": (lambda: table(layer=pa.array([1, 1, 2, 1], pa.int16())), "a layer that has no experts"),
    "negative layer": (lambda: table(layer=pa.array([1, 1, -1, 1], pa.int16())), "a layer that has no experts"),
    "negative position": (lambda: table(position=pa.array([0, -1, 2, 3], pa.int32())), "negative"),
    "huge step": (lambda: table(step=pa.array([0, 1, 2, (1 << 63) - 1], pa.int64())), "step 9223372036854775807"),
    "out of order": (lambda: table(step=pa.array([0, 2, 1, 3], pa.int64())), "out of order"),
    "layers out of order": (
        lambda: table(step=pa.array([0] * 4, pa.int64()), layer=pa.array([1, 3, 1, 1], pa.int16())), "out of order"),
    "a step of two phases": (
        lambda: table(step=pa.array([0, 0, 1, 2], pa.int64()), phase=pa.array(["decode", *["prefill"] * 3])),
        "two phases"),
    "unknown phase": (lambda: table(phase=pa.array(["decode", "x\n", "decode", "decode"])), "phase 'x"),
    "weights of other experts": (lambda: table(weights=f32([1, 1], [1], [1, 1], [1, 1])), "weights for other"),
    "weights for some": (lambda: table(weights=f32([1, 1], None, [1, 1], [1, 1])), "weights for some rows only"),
    "scores for some": (lambda: table(scores=f32([1] * 8, None, [1] * 8, [1] * 8)), "scores for some rows only"),
    "scores of fewer": (lambda: table(scores=f32(*[[1] * 7] * 4)), "scores of other than 8"),
    "a weight is null": (lambda: table(weights=f32(*[[None, 1]] * 4)), "nulls"),
    "too many domains": (
        lambda: table(MAX_DOMAINS + 1, domain=pa.array(map(str, range(MAX_DOMAINS + 1)))), "values of domain"),
    "a long label": (lambda: table(domain=pa.array(["x" * 5000] * 4)), "a domain of more than"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_trace_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    make, expected = REFUSED[name]
    path = made(tmp_path / "t.parquet", make())
    with pytest.raises(InputError) as caught:
        batches(path, weights=True, scores=True)
    said = str(caught.value)
    assert str(path) in said and expected in said
    assert said.isprintable() and len(said) < 400


def test_what_a_batch_before_ended_with_counts(tmp_path: Path) -> None:
    later = table(step=pa.array([3, 4, 5, 6], pa.int64()), phase=pa.array(["prefill"] * 4))
    for rows, expected in ((table(), "out of order"), (later, "two phases")):
        path = made(tmp_path / "t.parquet", pa.concat_tables([table(), rows]), row_group_size=4)
        with pytest.raises(InputError, match=rf"row group 1: .*{expected}"):
            batches(path)


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", "empty"), (b"PAR1", "not finished"), (b"GGUF" * 9, "no trace"), (b"PAR1" + bytes(99) + b"PAR1", "damaged")],
)
def test_what_is_no_parquet_is_refused(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(data)
    with pytest.raises(InputError, match=expected):
        TraceReader(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        TraceReader(tmp_path / "t.parquet")
    with pytest.raises(InputError, match="not a regular file"):
        TraceReader(tmp_path)


def test_a_row_group_beyond_any_memory_is_refused_unread(tmp_path: Path) -> None:
    n = MAX_GROUP_ROWS + 1
    zeros = pa.repeat(pa.scalar(0, pa.int32()), n)
    rows = table(
        n, sequence=zeros, position=zeros, phase=pa.repeat("decode", n), layer=pa.repeat(pa.scalar(1, pa.int16()), n),
        step=pa.repeat(pa.scalar(0, pa.int64()), n), experts=pa.repeat(pa.scalar([1], pa.list_(pa.int16())), n),
        weights=pa.nulls(n, pa.list_(pa.float32())), scores=pa.nulls(n, pa.list_(pa.float32())),
        domain=pa.nulls(n, pa.string()),
    )  # fmt: skip
    path = made(tmp_path / "t.parquet", rows, row_group_size=n)
    with pytest.raises(InputError, match=r"too large .*smaller row groups"):
        batches(path)
    assert len(batches(made(path, rows, row_group_size=1 << 20))[0]) == 5


@pytest.mark.parametrize("seed", range(4))
def test_damage_anywhere_is_refused_or_harmless(tmp_path: Path, seed: int) -> None:
    path, given = tmp_path / "t.parquet", Written()
    with TraceWriter(path, INFO, block_bytes=1, least_rows=16) as writer:
        writer.domains[0] = "code"
        for i in range(30):
            given.add(writer, "decode", [(0, i), (1, i)])
    whole, rng = path.read_bytes(), random.Random(seed)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            # most of what can go wrong is in the footer
            at = rng.randrange(len(data) // 2, len(data)) if rng.random() < 0.7 else rng.randrange(len(data))
            data[at] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            batches(path, weights=True, scores=True)
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 50


def test_a_flipped_bit_in_the_rows_is_noticed(tmp_path: Path) -> None:
    path, given = tmp_path / "t.parquet", Written()
    with TraceWriter(path, INFO) as writer:
        for i in range(200):
            given.add(writer, "decode", [(0, i), (1, i)])
    whole, rng = path.read_bytes(), random.Random(5)
    expected = [batch.experts.tolist() for batch in batches(path)[0]]
    for _ in range(100):
        data = bytearray(whole)
        data[rng.randrange(len(data) // 2)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with suppress(InputError):
            assert [batch.experts.tolist() for batch in batches(path)[0]] == expected


def test_a_trace_that_another_program_has_rewritten_is_read(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    path, given = tmp_path / "t.parquet", Written(scores=True)
    with TraceWriter(path, INFO, scores=True) as writer:
        writer.domains[0] = "code"
        for i in range(20):
            given.add(writer, "decode", [(0, i), (1, i)])
    again = tmp_path / "again.parquet"
    metadata = {"sluice.trace": INFO.to_json()}
    polars.read_parquet(path).filter(polars.col("layer") == 3).write_parquet(again, metadata=metadata)
    found, _ = batches(again, weights=True, scores=True)
    assert sum(map(len, found)) == 40
    assert rows_of(again) == [row for row in given.rows if row["layer"] == 3]


def test_the_schema_is_the_documented_one() -> None:
    assert [f"{field.name} {field.type}" for field in schema(INFO)] == [
        "step int64", "sequence int32", "position int32", "phase string", "layer int16", "experts list<item: int16>",
        "weights list<item: float>", "scores list<item: float>", "domain string",
    ]  # fmt: skip
