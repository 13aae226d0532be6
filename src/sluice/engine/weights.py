"""Reads a model's dense tensors into memory, or a device's, past the page cache; knows no experts and no graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sluice.ggml import Buffer, Context, Device, DeviceTensors, Library, Tensor
from sluice.ggml.backend import ALIGNMENT
from sluice.gguf import GgufFile, TensorInfo
from sluice.io.aligned import AlignedBuffer
from sluice.io.files import ModelFiles
from sluice.models.spec import ModelSpec

EXPERTS = ("_exps.weight", "_exps.packed")
PIECE_BYTES = 8 << 20
PAGE_BYTES = 4096


def dense_tensors(file: GgufFile, spec: ModelSpec) -> list[TensorInfo]:
    """Every tensor that stays resident: all but the routed experts' matrices and what the model is run without."""
    left = set(spec.skipped)
    return [info for name, info in file.tensors.items() if not name.endswith(EXPERTS) and name not in left]


def dense_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Memory that `tensors` take, each starting as far into a page as in its file."""
    return sum(-(-(info.offset % PAGE_BYTES + info.n_bytes) // PAGE_BYTES) * PAGE_BYTES for info in tensors)


class DenseWeights:
    """The tensors by name, with their data; a context manager."""

    def __init__(self, library: Library, tensors: list[TensorInfo]) -> None:
        self.n_bytes = max(PAGE_BYTES, dense_bytes(tensors))
        self._memory = AlignedBuffer(self.n_bytes)
        self._buffer = Buffer(library, self._memory.address, self.n_bytes)
        self._context = Context(library, len(tensors))
        self.tensors: dict[str, Tensor] = {}
        self._places: list[tuple[TensorInfo, int]] = []
        at = 0
        for info in sorted(tensors, key=lambda t: (t.file, t.offset)):
            # as far into a page as in the file, so that pages are read into place, unless ggml's alignment forbids it
            skew = info.offset % PAGE_BYTES
            dest = at + (skew if info.offset % ALIGNMENT == 0 else 0)
            tensor = self._context.tensor(info.type, *info.shape)
            assert tensor.n_bytes == info.n_bytes, f"{info} is not {tensor!r}"
            self._buffer.place(tensor, dest)
            self.tensors[info.name] = tensor
            self._places.append((info, dest))
            at += -(-(skew + info.n_bytes) // PAGE_BYTES) * PAGE_BYTES

    def load(self, files: ModelFiles, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every tensor's data; `progress(done, total)` in bytes. Raises ReadError."""
        done = 0
        with AlignedBuffer(PIECE_BYTES) as scratch:
            for info, dest in self._places:
                self._load(files, info, dest, scratch)
                done += info.n_bytes
                if progress:
                    progress(done, self.n_bytes)

    def _load(self, files: ModelFiles, info: TensorInfo, dest: int, scratch: AlignedBuffer) -> None:
        view, skew = self._memory.view, info.offset % PAGE_BYTES
        if dest % PAGE_BYTES != skew or PAGE_BYTES % files[info.file].block:
            files.read_exact(info.file, info.offset, view[dest : dest + info.n_bytes], scratch)
            return
        start, end = dest - skew, dest + info.n_bytes
        for at in range(start, end, PIECE_BYTES):
            n = min(PIECE_BYTES, -(-(end - at) // PAGE_BYTES) * PAGE_BYTES)
            got = files.read_into(info.file, info.offset - skew + at - start, view[at : at + n])
            if at + got < min(at + n, end):
                raise files.short(info.file, info.offset, info.n_bytes, max(0, at + got - dest))

    def __enter__(self) -> DenseWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._context.close()
        self._buffer.close()
        self._memory.close()


class DeviceWeights:
    """The tensors by name in a device's memory; a context manager."""

    def __init__(self, device: Device, tensors: list[TensorInfo]) -> None:
        self._tensors = sorted(tensors, key=lambda t: (t.file, t.offset))
        self._context = Context(device.library, len(tensors))
        self.tensors: dict[str, Tensor] = {
            info.name: self._context.tensor(info.type, *info.shape) for info in self._tensors
        }
        self._memory = DeviceTensors(device, self._context, weights=True)
        self.n_bytes = self._memory.n_bytes

    def load(self, files: ModelFiles) -> None:
        """Read every tensor's data, a piece at a time, through the host. Raises ReadError."""
        with AlignedBuffer(PIECE_BYTES) as scratch, AlignedBuffer(PIECE_BYTES) as piece:
            for info in self._tensors:
                for at in range(0, info.n_bytes, PIECE_BYTES):
                    view = piece.view[: min(PIECE_BYTES, info.n_bytes - at)]
                    files.read_exact(info.file, info.offset + at, view, scratch)
                    self._memory.write(self.tensors[info.name], view, at)
                    view.release()

    def __enter__(self) -> DeviceWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._context.close()
        self._memory.close()
