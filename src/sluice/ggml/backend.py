"""The CPU backend with a thread pool of its own, and memory that tensors are laid over; knows no operation."""

from __future__ import annotations

import ctypes as C
from typing import TYPE_CHECKING

from sluice.errors import GgmlError
from sluice.ggml.library import ThreadPoolParams

if TYPE_CHECKING:
    from sluice.ggml.device import DeviceBackend
    from sluice.ggml.library import Library
    from sluice.ggml.tensor import Context, Graph, Tensor

ALIGNMENT = 32  # ggml's TENSOR_ALIGNMENT for CPU buffers, bytes


class Backend:
    """ggml's CPU backend and its persistent thread pool (workers sleep between graphs); a context manager."""

    def __init__(self, library: Library, n_threads: int) -> None:
        self.library = library
        self.n_threads = n_threads
        self._backend: int | None = library.ggml_backend_cpu_init()
        if not self._backend:
            raise GgmlError("ggml's CPU backend does not start")
        params = ThreadPoolParams()
        library.ggml_threadpool_params_init(C.byref(params), n_threads)
        params.poll = 0  # spinning workers steal the processor from reads
        self._pool: int | None = library.ggml_threadpool_new(C.byref(params))
        if not self._pool:
            self.close()
            raise GgmlError(f"ggml can't make a pool of {n_threads} threads: use fewer --threads")
        library.ggml_backend_cpu_set_n_threads(self._backend, n_threads)
        library.ggml_backend_cpu_set_threadpool(self._backend, self._pool)
        self._compute = library.ggml_backend_graph_compute

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def compute(self, graph: Graph) -> None:
        """Run `graph` to its end; the interpreter's lock is free meanwhile."""
        if status := self._compute(self._backend, graph.ptr):
            raise GgmlError(f"ggml could not compute a graph (status {status}): out of memory?")

    def close(self) -> None:
        if self._backend:
            self.library.ggml_backend_free(self._backend)
            self._backend = None
        if self._pool:
            self.library.ggml_threadpool_free(self._pool)
            self._pool = None

    @property
    def ptr(self) -> int:
        if not self._backend:
            raise GgmlError("the backend is closed")
        return self._backend


class Buffer:
    """Host memory that the caller owns, in which tensors are placed at chosen addresses; a context manager."""

    def __init__(self, library: Library, address: int, n_bytes: int) -> None:
        if address % ALIGNMENT:
            raise GgmlError(f"memory at {address:#x} is not aligned to {ALIGNMENT} bytes")
        self.library = library
        self.address = address
        self.n_bytes = n_bytes
        self._ptr: int | None = library.ggml_backend_cpu_buffer_from_ptr(address, n_bytes)
        if not self._ptr:
            raise GgmlError("ggml can't wrap memory in a buffer")

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def place(self, tensor: Tensor, offset: int) -> None:
        """Lay `tensor`'s data at `offset` bytes into this memory."""
        if offset % ALIGNMENT or offset < 0 or offset + tensor.n_bytes > self.n_bytes:
            raise GgmlError(f"{tensor!r} can't lie at byte {offset} of {self.n_bytes}")
        if tensor.address:  # ggml aborts
            raise GgmlError(f"{tensor!r} has its place in memory already")
        if self.library.ggml_backend_tensor_alloc(self._ptr, tensor.ptr, self.address + offset):
            raise GgmlError(f"ggml can't place {tensor!r}")

    def close(self) -> None:
        if self._ptr:
            self.library.ggml_backend_buffer_free(self._ptr)
            self._ptr = None


class GraphAllocator:
    """Scratch memory that many graphs share, one running at a time; a context manager.

    `reserve` the largest graphs first: growing moves the memory under graphs already placed, which `generation` tells
    (it counts the moves). `place` never moves it: it refuses a graph that does not fit.
    """

    def __init__(self, backend: Backend | DeviceBackend) -> None:
        self.library = backend.library
        self._ptr: int | None = self.library.ggml_gallocr_new(
            self.library.ggml_backend_get_default_buffer_type(backend.ptr)
        )
        self.n_bytes = 0
        self.generation = 0

    def __enter__(self) -> GraphAllocator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def reserve(self, graph: Graph) -> None:
        """Make room for `graph`. If that moves the memory, or fails, every graph placed before is invalid."""
        if not self.library.ggml_gallocr_reserve(self._ptr, graph.ptr):
            self.generation += 1  # the old memory is gone too
            self.n_bytes = 0
            raise GgmlError("out of memory for compute buffers: lower --ctx, or raise --ram (--vram on a device)")
        n_bytes = self.library.ggml_gallocr_get_buffer_size(self._ptr, 0)
        self.generation += n_bytes != self.n_bytes
        self.n_bytes = n_bytes

    def place(self, graph: Graph) -> None:
        """Give every node of `graph` its place in the scratch memory."""
        placed = self.library.ggml_gallocr_alloc_graph(self._ptr, graph.ptr)
        if not placed or self.library.ggml_gallocr_get_buffer_size(self._ptr, 0) != self.n_bytes:
            raise GgmlError("a graph outgrew the scratch memory reserved for it")

    def placed(self, context: Context, graph: Graph) -> tuple[Context, Graph]:
        """`place` a graph just built, and hand both back; closes its context if that fails."""
        try:
            self.place(graph)
        except BaseException:
            context.close()
            raise
        return context, graph

    def close(self) -> None:
        if self._ptr:
            self.library.ggml_gallocr_free(self._ptr)
            self._ptr = None
