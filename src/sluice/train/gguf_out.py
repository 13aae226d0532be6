"""Writes a Hugging Face model directory as one GGUF file that llama.cpp and Sluice run. It trains and runs nothing.

Tensors are read, stored and written one matrix at a time, so memory holds the largest of them, not the model. Types
other than F32 are ggml's own quantiser's, without an importance matrix.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np

from sluice.errors import InputError
from sluice.ggml import GgmlType, Library
from sluice.ggml.tensor import row_bytes
from sluice.new_file import appearing, check_out
from sluice.routing.stored import Converter
from sluice.train.gguf_keys import add_hyper_parameters
from sluice.train.gguf_types import FILE_TYPES, FileType, TypeRule
from sluice.train.gguf_vocab import Vocab, read_vocab
from sluice.train.hf_config import HfConfig
from sluice.train.hf_directory import HfDirectory, open_directory
from sluice.train.names import Experts, Weight, weights

PIECE_NUMBERS = 1 << 22  # of rows that are stored at once

Progress = Callable[[float, float], None]  # (done, total), in numbers of weights


@dataclass(frozen=True)
class Exported:
    """What was written. `types` say what each tensor became; `fell_back` of which the rows don't fit the type that the
    kind of file gives them: that type. `skipped` are the tensors that were left out, `doubt` says where the file's
    tokenizer may give other ids than the folder's."""

    path: Path
    n_bytes: int
    architecture: str
    name: str
    file_type: str
    n_parameters: int
    types: Mapping[str, GgmlType]
    fell_back: Mapping[str, GgmlType]
    skipped: tuple[str, ...]
    doubt: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": str(self.path),
            "bytes": self.n_bytes,
            "architecture": self.architecture,
            "name": self.name,
            "type": self.file_type,
            "parameters": self.n_parameters,
            "types": dict(Counter(type.name for type in self.types.values())),
            "tensors": {name: type.name for name, type in self.types.items()},
            "fell_back": {
                name: {"wanted": wanted.name, "became": self.types[name].name}
                for name, wanted in self.fell_back.items()
            },
            "skipped": list(self.skipped),
            "tokenizer_doubt": self.doubt,
        }


def export_gguf(
    folder: Path, out: Path, library: Library, *, type: str = "f32", name: str | None = None, force: bool = False,
    progress: Progress = lambda done, total: None,
) -> Exported:  # fmt: skip
    """Write the model in `folder` to `out`, which appears whole or not at all. `name` is the folder's unless given.

    Raises InputError for a type that isn't one of FILE_TYPES, a path that can't be written, and as `open_directory` and
    `read_vocab` do; for a tensor with numbers that are not finite too.
    """
    if type not in FILE_TYPES:
        raise InputError(f"--type {ascii(type)[:60]} is no kind of GGUF file: choices are {', '.join(FILE_TYPES)}")
    check_out(out, force=force, made="the GGUF file")
    source = open_directory(folder)
    c = source.config
    vocab = read_vocab(folder, c.said, c.n_vocab)
    all = weights(c)
    rule = TypeRule(
        FILE_TYPES[type], c.n_layers, c.n_expert, c.n_head // c.n_head_kv, c.tied, library.ggml_blck_size
    )  # fmt: skip
    chosen = {it.name: rule.chosen(it.name, it.shape) for it in all}
    types = {it: became for it, (became, _) in chosen.items()}
    called = (name or folder.resolve().name or "model").encode(errors="replace").decode()
    keep = [*source.files, folder / "tokenizer.json"]
    with appearing(out, "gguf", force=force, keep=keep, made="the GGUF file") as temporary:
        writer = _started(temporary, source, vocab, rule.file_type, called, all, types, library)
        try:
            with Converter(library) as converter:
                _write_tensors(writer, source, all, types, converter, progress)
            n_bytes = _finished(writer)
        finally:
            writer.close()
    return Exported(
        path=out,
        n_bytes=n_bytes,
        architecture=c.architecture,
        name=called,
        file_type=type,
        n_parameters=sum(math.prod(it.shape) for it in all),
        types=types,
        fell_back={it: wanted for it, (became, wanted) in chosen.items() if became != wanted},
        skipped=tuple(source.skipped),
        doubt=vocab.doubt,
    )


def _started(
    path: Path, source: HfDirectory, vocab: Vocab, file_type: FileType, name: str, all: list[Weight | Experts],
    types: Mapping[str, GgmlType], library: Library,
) -> gguf.GGUFWriter:  # fmt: skip
    """A writer at whose file all but the tensors' numbers has been written."""
    c = source.config
    writer = gguf.GGUFWriter(path, c.architecture)
    try:
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(name)
        writer.add_size_label(_size_label(c, all))
        add_hyper_parameters(writer, c)
        writer.add_file_type(file_type.number)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        vocab.write(writer)
        for it in all:
            kind = types[it.name]
            n_bytes = math.prod(it.shape[:-1]) * row_bytes(library, kind, it.shape[-1])
            raw = gguf.GGMLQuantizationType(kind)
            writer.add_tensor_info(it.name, it.shape, np.dtype(np.float32), n_bytes, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    except BaseException:
        writer.close()
        raise
    return writer


def _size_label(c: HfConfig, all: list[Weight | Experts]) -> str:
    """As llama.cpp's converter has it: experts × what a model with one expert would have."""
    routed = sum(math.prod(it.shape) for it in all if isinstance(it, Experts)) // c.n_expert
    shared = sum(math.prod(it.shape) for it in all if not isinstance(it, Experts))
    return gguf.size_label(shared + routed * c.n_expert, shared, routed, c.n_expert)


def _write_tensors(
    writer: gguf.GGUFWriter, source: HfDirectory, all: list[Weight | Experts], types: Mapping[str, GgmlType],
    converter: Converter, progress: Progress,
) -> None:  # fmt: skip
    assert writer.fout is not None
    file: BinaryIO = writer.fout[0]
    done, total = 0, sum(math.prod(it.shape) for it in all)
    for it in all:
        writer.write_padding(file, file.tell())
        for matrix in _matrices(source, it):
            if not np.isfinite(matrix).all():
                raise InputError(f"{source.folder}: {it.source} holds numbers that are not finite: train it again")
            for rows in _pieces(matrix):
                file.write(converter.stored(types[it.name], rows))
                done += rows.size
                progress(done, total)
    writer.write_padding(file, file.tell())


def _matrices(source: HfDirectory, it: Weight | Experts) -> Iterator[np.ndarray]:
    """A tensor's numbers as matrices [n_out, n_in] one after the other, float32; a vector is one row."""
    if isinstance(it, Experts):
        for expert in range(it.shape[0]):
            yield source.read_expert(it, expert)
    else:
        yield source.read(it).reshape(-1, it.shape[-1])


def _pieces(matrix: np.ndarray) -> Iterator[np.ndarray]:
    n = max(1, PIECE_NUMBERS // matrix.shape[1])
    for first in range(0, len(matrix), n):
        yield matrix[first : first + n]


def _finished(writer: gguf.GGUFWriter) -> int:
    assert writer.fout is not None
    file = writer.fout[0]
    file.flush()
    os.fsync(file.fileno())
    return file.tell()
