"""Reads a trace in batches of rows, each checked against what the file says of itself; trusts no file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sluice.errors import InputError
from sluice.trace.schema import MAX_EXPERTS, MAX_LAYERS, MAX_STEP, METADATA_KEY, PHASES, TraceInfo, pyarrow

# Of one row group, which is read as a whole: what writers make by default is far below.
MAX_GROUP_ROWS, MAX_GROUP_BYTES = 1 << 22, 1 << 30
MAX_DOMAINS, MAX_LABEL = 4096, 1024  # labels, and characters of one
MAX_METADATA_BYTES = 16 << 20

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TraceBatch:
    """Consecutive rows of a trace as arrays. Row i's experts and weights are [offsets[i], offsets[i + 1]) of theirs."""

    step: Array  # [n] int64
    sequence: Array  # [n] int32
    position: Array  # [n] int32
    decode: Array  # [n] bool
    layer: Array  # [n] int16
    offsets: Array  # [n + 1] int64
    experts: Array  # [offsets[-1]] int16
    weights: Array | None  # [offsets[-1]] float32, None unless wanted and there
    scores: Array | None  # [n, n_expert] float32, None unless wanted and there
    domain: Array  # [n] int32, index into the trace's `domains`, -1: none

    def __len__(self) -> int:
        return len(self.step)


class _Last(NamedTuple):
    """Where the rows before a batch ended."""

    order: int = -1  # step × MAX_LAYERS + layer
    decode: bool = False


class TraceReader:
    """A trace, opened: `info`, `n_rows`, and its rows in batches. A context manager.

    `domains` are the labels met so far. Raises InputError, naming what is wrong, for a file that is no whole trace;
    `batches` does for rows that can't be.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._pa = pa = pyarrow()
        # what pyarrow and Python raise for a file that isn't what it says
        self._refusals = (pa.ArrowException, OSError, ValueError, TypeError, LookupError, OverflowError, MemoryError)
        self.path = Path(os.path.expanduser(path))  # noqa: PTH111  (Path's raises for an unknown user)
        self.domains: list[str] = []
        self._label_numbers: dict[str, int] = {}
        if not self.path.is_file():  # opening a pipe would wait for its writer
            what = "not a regular file: name a trace" if self.path.exists() else "no such file: name a trace"
            raise InputError(f"{self.path}: {what}")
        try:
            self._source = pa.OSFile(os.fspath(self.path), "rb")
        except OSError as error:
            raise InputError(f"{self.path}: can't be read ({error.strerror or error}): check its permissions") from None
        try:
            try:
                self._file = pa.parquet.ParquetFile(
                    self._source, read_dictionary=["phase", "domain"], page_checksum_verification=True
                )
                columns = self._file.schema_arrow
                self._groups = [self._file.metadata.row_group(i) for i in range(self._file.num_row_groups)]
            except self._refusals:
                raise InputError(f"{self.path}: {self._why()}") from None
            self._check_columns(columns)
            self.info = self._info((self._file.metadata.metadata or {}).get(METADATA_KEY))
            self.n_rows: int = sum(group.num_rows for group in self._groups)
        except BaseException:
            self._source.close()
            raise

    def _why(self) -> str:
        with self.path.open("rb") as file:
            head = file.read(4)
        if not head:
            return "empty: record the trace again"
        if head == b"PAR1":
            return "the trace was not finished, is cut short or damaged: record it again"
        return "no trace: give a Parquet file that `sluice trace record` or `import` wrote"

    def _check_columns(self, have: Any) -> None:
        pa = self._pa
        plain = {"step": pa.int64(), "sequence": pa.int32(), "position": pa.int32(), "layer": pa.int16()}
        lists = {"experts": pa.int16(), "weights": pa.float32(), "scores": pa.float32()}
        for name in (*plain, *lists, "phase", "domain"):
            if have.get_field_index(name) < 0:
                raise InputError(f"{self.path}: no trace: there is not one column {name}")
            type = have.field(name).type
            if name in plain:
                right = type == plain[name]
            elif name in lists:
                right = (pa.types.is_list(type) or pa.types.is_large_list(type)) and type.value_type == lists[name]
            else:
                text = type.value_type if pa.types.is_dictionary(type) else type
                right = pa.types.is_string(text) or pa.types.is_large_string(text)
            if not right:
                raise InputError(f"{self.path}: no trace: column {name} is {str(type)[:80]}")

    def _info(self, text: bytes | None) -> TraceInfo:
        if text is None:
            raise InputError(f"{self.path}: no trace of Sluice's: it lacks the metadata that `sluice trace` writes")
        if len(text) > MAX_METADATA_BYTES:
            raise InputError(f"{self.path}: the trace's metadata is damaged ({len(text)} bytes): record it again")
        try:
            return TraceInfo.from_json(text)
        except (ValueError, TypeError, RecursionError) as error:
            cause = str(error).splitlines()[0][:200]
            raise InputError(f"{self.path}: the trace's metadata is damaged ({cause}): record it again") from None

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """May be called again."""
        self._source.close()

    def batches(self, *, weights: bool = False, scores: bool = False) -> Iterator[TraceBatch]:
        """Row groups in order, checked. Raises InputError for rows that the trace's own metadata rules out."""
        columns = ["step", "sequence", "position", "phase", "layer", "experts", "domain"]
        columns += ["weights"] * weights + ["scores"] * scores
        last = _Last()
        for i, group in enumerate(self._groups):
            self._check_size(i, group)
            try:
                table = self._file.read_row_group(i, columns=columns).combine_chunks()
            except self._refusals as error:
                cause = (str(error).splitlines() or [type(error).__name__])[0][:200]
                raise self._damaged(i, cause) from None
            if table.num_rows:
                batch = self._batch(i, table, weights, scores)
                last = self._check_order(i, batch, last)
                yield batch

    def _damaged(self, i: int, what: str) -> InputError:
        return InputError(f"{self.path}: the trace is damaged (row group {i}: {what}): record it again")

    def _check_size(self, i: int, group: Any) -> None:
        """Refuse a row group that would take more memory than any that is written, before it is read.

        Columns' own metadata isn't looked at: where it is damaged, pyarrow ends the process instead of raising.
        """
        rows = group.num_rows
        if not 0 <= rows <= MAX_GROUP_ROWS or not 0 <= group.total_byte_size <= MAX_GROUP_BYTES:
            size = f"{rows} rows, {group.total_byte_size >> 20} MiB"
            raise InputError(f"{self.path}: row group {i} is too large ({size}): write it with smaller row groups")

    # --- columns

    def _batch(self, i: int, table: Any, weights: bool, scores: bool) -> TraceBatch:
        info, n = self.info, table.num_rows
        plain = {
            name: self._column(i, table, name).to_numpy(zero_copy_only=False)
            for name in ("step", "sequence", "position", "layer")
        }
        moe = np.zeros(MAX_LAYERS, np.bool_)
        moe[list(info.moe_layers)] = True
        if int(plain["layer"].min()) < 0 or not moe[plain["layer"]].all():
            raise self._damaged(i, "a layer that has no experts")
        if min(int(plain[name].min()) for name in ("step", "sequence", "position")) < 0:
            raise self._damaged(i, "a negative step, sequence or position")
        if int(plain["step"].max()) >= MAX_STEP:
            raise self._damaged(i, f"step {int(plain['step'].max())}")
        experts, offsets = self._flat(i, table, "experts")
        if int(offsets[-1]) == 0 or int(np.diff(offsets).min()) < 1:
            raise self._damaged(i, "a row without experts")
        if int(experts.min()) < 0 or int(experts.max()) >= info.n_expert:
            raise self._damaged(i, f"an expert beyond the {info.n_expert} of a layer")
        if _repeats(experts, offsets):
            raise self._damaged(i, "an expert twice in a row")
        weight = score = None
        if weights and not self._absent(i, table, "weights"):
            weight, of_weights = self._flat(i, table, "weights")
            if not np.array_equal(of_weights, offsets):
                raise self._damaged(i, "weights for other experts than it names")
        if scores and not self._absent(i, table, "scores"):
            flat, of_scores = self._flat(i, table, "scores")
            if not np.array_equal(of_scores, np.arange(n + 1) * info.n_expert):
                raise self._damaged(i, f"scores of other than {info.n_expert} experts")
            score = flat.reshape(n, info.n_expert)
        return TraceBatch(
            **plain, offsets=offsets, experts=experts, weights=weight, scores=score,
            decode=self._phases(i, table), domain=self._domains(i, table),
        )  # fmt: skip

    def _column(self, i: int, table: Any, name: str, *, nulls: bool = False) -> Any:
        column = table.column(name)
        if column.num_chunks != 1:
            raise self._damaged(i, f"column {name} is too large")
        array = column.chunk(0)
        if array.null_count and not nulls:
            raise self._damaged(i, f"column {name} has nulls")
        return array

    def _absent(self, i: int, table: Any, name: str) -> bool:
        """Whether an optional column has nothing. Raises InputError where it has something for some rows only."""
        n = table.column(name).null_count
        if n not in (0, table.num_rows):
            raise self._damaged(i, f"{name} for some rows only")
        return n > 0

    def _flat(self, i: int, table: Any, name: str) -> tuple[Array, Array]:
        """The values of a column of lists, and where each list begins and the last ends."""
        array = self._column(i, table, name)
        values = array.flatten()
        if values.null_count:
            raise self._damaged(i, f"column {name} has nulls")
        lengths = array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        return values.to_numpy(zero_copy_only=False), np.concatenate([[0], np.cumsum(lengths)])

    def _coded(self, i: int, table: Any, name: str, *, nulls: bool) -> tuple[list[Any], Array]:
        """The distinct values of a column of text, and which each row has: -1 for null."""
        array = self._column(i, table, name, nulls=nulls)
        if not self._pa.types.is_dictionary(array.type):
            array = array.dictionary_encode()
        if len(array.dictionary) > MAX_DOMAINS:
            raise self._damaged(i, f"{len(array.dictionary)} different values of {name}")
        try:
            names = array.dictionary.to_pylist()
        except UnicodeDecodeError:
            raise self._damaged(i, f"a {name} that is no text") from None
        codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        if int(codes.min()) < -1 or int(codes.max()) >= len(names):  # pyarrow does not look
            raise self._damaged(i, f"a {name} that is not there")
        return names, codes

    def _phases(self, i: int, table: Any) -> Array:
        names, codes = self._coded(i, table, "phase", nulls=False)
        if unknown := [name for name in names if name not in PHASES]:
            raise self._damaged(i, f"phase {str(unknown[0])[:40]!r}")
        return np.array([name == PHASES[1] for name in names])[codes]

    def _domains(self, i: int, table: Any) -> Array:
        names, codes = self._coded(i, table, "domain", nulls=True)
        if any(name is None or len(name) > MAX_LABEL for name in names):
            raise self._damaged(i, f"a domain of more than {MAX_LABEL} characters")
        for name in names:
            if name not in self._label_numbers:
                self._label_numbers[name] = len(self.domains)
                self.domains.append(name)
        if len(self.domains) > MAX_DOMAINS:
            raise self._damaged(i, f"more than {MAX_DOMAINS} domains")
        places = np.array([self._label_numbers[name] for name in names] + [-1], np.int32)
        return places[codes]  # code -1, null, is the last

    def _check_order(self, i: int, batch: TraceBatch, last: _Last) -> _Last:
        """Steps ascend, within one its layers do, and it has one phase."""
        order = batch.step * MAX_LAYERS + batch.layer
        if int(order[0]) < last.order or (np.diff(order) < 0).any():
            raise self._damaged(i, "rows out of order")
        same = batch.step[1:] == batch.step[:-1]
        goes_on = int(batch.step[0]) == last.order // MAX_LAYERS and last.order >= 0
        if (batch.decode[1:] != batch.decode[:-1])[same].any() or (goes_on and bool(batch.decode[0]) != last.decode):
            raise self._damaged(i, "a step of two phases")
        return _Last(int(order[-1]), bool(batch.decode[-1]))


def _repeats(experts: Array, offsets: Array) -> bool:
    """Whether a row names an expert twice."""
    lengths = np.diff(offsets)
    k = int(lengths[0])
    if (lengths == k).all():
        rows = np.sort(experts.reshape(-1, k), axis=1)
        return bool((rows[:, 1:] == rows[:, :-1]).any())
    keyed = np.sort(np.repeat(np.arange(len(lengths)), lengths) * MAX_EXPERTS + experts)
    return bool((keyed[1:] == keyed[:-1]).any())
