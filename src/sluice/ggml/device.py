"""Devices beside the CPU: who is there, memory of theirs that tensors lie in, backends that compute; knows no model.

A backend is a library beside ggml-base (`ggml-cuda`, `ggml-vulkan`, …), or a part of a library that holds all of ggml.
None is loaded before somebody asks for devices.
"""

from __future__ import annotations

import ctypes as C
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sluice.errors import GgmlError
from sluice.ggml.library import find_libraries, i32, ptr, size, text

if TYPE_CHECKING:
    from sluice.ggml.library import Library
    from sluice.ggml.tensor import Context, Graph, Tensor

__all__ = ["Device", "DeviceBackend", "DeviceTensors", "devices"]

# The name that a backend's library has after "ggml-", and the one in its function that lists devices.
BACKENDS = {"cuda": "cuda", "hip": "cuda", "musa": "cuda", "metal": "metal", "vulkan": "vk", "sycl": "sycl"}
KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accelerator"}  # enum ggml_backend_dev_type
AUTOMATIC = ("CUDA", "ROCm", "Vulkan")  # what `--device auto` takes: kinds that were run, or that share their code
PIECE_BYTES = 8 << 20  # of the host's memory at once, on the way between two places there
WEIGHTS = 1  # enum ggml_backend_buffer_usage: what is only read, which some backends place otherwise

_CALLS: dict[str, tuple] = {
    "ggml_backend_reg_dev_count": (size, ptr),
    "ggml_backend_reg_dev_get": (ptr, ptr, size),
    "ggml_backend_dev_name": (text, ptr),
    "ggml_backend_dev_description": (text, ptr),
    "ggml_backend_dev_type": (i32, ptr),
    "ggml_backend_dev_memory": (None, ptr, ptr, ptr),
    "ggml_backend_dev_buffer_type": (ptr, ptr),
    "ggml_backend_dev_init": (ptr, ptr, text),
    "ggml_backend_dev_supports_op": (C.c_bool, ptr, ptr),
    "ggml_backend_buft_get_max_size": (size, ptr),
    "ggml_backend_alloc_ctx_tensors_from_buft": (ptr, ptr, ptr),
    "ggml_backend_buffer_get_size": (size, ptr),
    "ggml_backend_buffer_set_usage": (None, ptr, i32),
    "ggml_backend_buffer_clear": (None, ptr, C.c_uint8),
    "ggml_backend_tensor_set": (None, ptr, ptr, size, size),
    "ggml_backend_tensor_get": (None, ptr, ptr, size, size),
    "ggml_backend_graph_compute_async": (i32, ptr, ptr),
    "ggml_backend_synchronize": (None, ptr),
    "ggml_graph_node": (ptr, ptr, i32),
    "ggml_op_desc": (text, ptr),
}


@dataclass(frozen=True)
class Device:
    """A device of a backend that ggml brings. `name` is ggml's, like "Vulkan0"; `kind` one of KINDS."""

    name: str
    description: str
    kind: str
    library: Library = field(repr=False, compare=False)
    ptr: int = field(repr=False, compare=False)

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and in all, as the device says now."""
        free, total = C.c_size_t(), C.c_size_t()
        self.library.ggml_backend_dev_memory(self.ptr, C.byref(free), C.byref(total))
        return free.value, total.value

    @property
    def buffer_type(self) -> int:
        return self.library.ggml_backend_dev_buffer_type(self.ptr)

    @property
    def max_tensor_bytes(self) -> int:
        """The most that one tensor may take."""
        return self.library.ggml_backend_buft_get_max_size(self.buffer_type)

    def unsupported(self, graph: Graph) -> str | None:
        """The name of an operation of `graph` that the device lacks; None if it has all of them."""
        library = self.library
        for i in range(library.ggml_graph_n_nodes(graph.ptr)):
            node = library.ggml_graph_node(graph.ptr, i)
            if not library.ggml_backend_dev_supports_op(self.ptr, node):
                return library.ggml_op_desc(node).decode(errors="replace")
        return None


def devices(library: Library) -> list[Device]:
    """The devices of every backend that `library` brings beside the CPU's, in ggml's order. Asked once."""
    if library.known_devices is None:
        library.declare(_CALLS)
        library.known_devices = [device for reg in _registries(library) for device in _devices_of(library, reg)]
    return list(library.known_devices)


def _registries(library: Library) -> list[int]:
    found: list[int] = []
    for name, short in BACKENDS.items():
        places: list[C.CDLL] = [library.base] if hasattr(library.base, f"ggml_backend_{short}_reg") else []
        for path in find_libraries(library.folder, name):
            try:
                places.append(C.CDLL(str(path)))
            except OSError:  # without its driver a backend's library does not load
                continue
        for place in places:
            call = getattr(place, "ggml_backend_init", None) or getattr(place, f"ggml_backend_{short}_reg", None)
            if call is None:
                continue
            call.restype, call.argtypes = ptr, []
            if (reg := call()) and reg not in found:
                found.append(reg)
    return found


def _devices_of(library: Library, reg: int) -> list[Device]:
    found = []
    for i in range(library.ggml_backend_reg_dev_count(reg)):
        dev = library.ggml_backend_reg_dev_get(reg, i)
        name, about = library.ggml_backend_dev_name(dev), library.ggml_backend_dev_description(dev)
        kind = KINDS.get(library.ggml_backend_dev_type(dev), "accelerator")
        found.append(Device(name.decode(errors="replace"), about.decode(errors="replace"), kind, library, dev))
    return found


class DeviceBackend:
    """A device's backend, which runs graphs; a context manager. Raises GgmlError where it does not start."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.library = device.library
        self._backend: int | None = self.library.ggml_backend_dev_init(device.ptr, None)
        if not self._backend:
            raise GgmlError(f"{device.name} does not start: use --device cpu")

    def __enter__(self) -> DeviceBackend:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def ptr(self) -> int:
        if not self._backend:
            raise GgmlError("the backend is closed")
        return self._backend

    def compute(self, graph: Graph) -> None:
        """Run `graph` to its end."""
        self.start(graph)
        self.wait()

    def start(self, graph: Graph) -> None:
        """Have the device begin with `graph`, after what it was given before; `wait` for its end."""
        if status := self.library.ggml_backend_graph_compute_async(self.ptr, graph.ptr):
            raise GgmlError(
                f"{self.device.name} could not compute a graph (status {status}): out of its memory, or lost. "
                "Lower --vram, or use --device cpu"
            )

    def wait(self) -> None:
        self.library.ggml_backend_synchronize(self.ptr)

    def close(self) -> None:
        if self._backend:
            self.library.ggml_backend_free(self._backend)
            self._backend = None


class DeviceTensors:
    """The data of all tensors of a context, zeroed, in a device's memory; a context manager.

    `n_bytes` is what it takes there. `weights`: graphs only read them. Raises GgmlError where the device refuses.
    """

    def __init__(self, device: Device, context: Context, *, weights: bool = False) -> None:
        self.device = device
        self.library = device.library
        self._buffer: int | None = self.library.ggml_backend_alloc_ctx_tensors_from_buft(
            context.ptr, device.buffer_type
        )
        if not self._buffer:
            raise GgmlError(f"{device.name} is out of memory: lower --vram, or --gpu-layers")
        self.n_bytes: int = self.library.ggml_backend_buffer_get_size(self._buffer)
        if weights:
            self.library.ggml_backend_buffer_set_usage(self._buffer, WEIGHTS)
        self.library.ggml_backend_buffer_clear(self._buffer, 0)

    def __enter__(self) -> DeviceTensors:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, tensor: Tensor, data: np.ndarray | memoryview, at: int = 0) -> None:
        """Copy `data`, contiguous, to `at` bytes into the data of `tensor`."""
        array = _bytes(data)
        assert 0 <= at <= tensor.n_bytes - array.nbytes, f"{array.nbytes} bytes at {at} of {tensor!r}"
        self.library.ggml_backend_tensor_set(tensor.ptr, array.ctypes.data, at, array.nbytes)

    def read(self, tensor: Tensor, into: np.ndarray | memoryview, at: int = 0) -> None:
        """Copy from `at` bytes into the data of `tensor` until `into`, contiguous, is full."""
        array = _bytes(into)
        assert 0 <= at <= tensor.n_bytes - array.nbytes, f"{array.nbytes} bytes at {at} of {tensor!r}"
        self.library.ggml_backend_tensor_get(tensor.ptr, array.ctypes.data, at, array.nbytes)

    def copy(self, tensor: Tensor, source: int, target: int, n: int) -> None:
        """Copy `n` bytes from `source` bytes into the data of `tensor` to `target`, apart from it, through the host."""
        piece = np.empty(min(n, PIECE_BYTES), np.uint8)
        for done in range(0, n, PIECE_BYTES):
            part = piece[: n - done]
            self.read(tensor, part, source + done)
            self.write(tensor, part, target + done)

    def clear(self, tensor: Tensor, at: int, n: int) -> None:
        """Make `n` bytes of `tensor` zero, from `at` on."""
        zeros = np.zeros(min(n, PIECE_BYTES), np.uint8)
        for done in range(0, n, PIECE_BYTES):
            self.write(tensor, zeros[: n - done], at + done)

    def close(self) -> None:
        if self._buffer:
            self.library.ggml_backend_buffer_free(self._buffer)
            self._buffer = None


def _bytes(data: np.ndarray | memoryview) -> np.ndarray:
    array = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data
    assert array.flags.c_contiguous, "bytes are copied as they lie"
    return array
