"""Runs heads' graph fragments on arrays; knows no files and no expected values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from sluice.ggml import Backend, Buffer, Context, GgmlType, GraphAllocator, Tensor, load_library
from sluice.io.aligned import AlignedBuffer
from sluice.routing import Heads, PrerouterInfo

LIBRARY = load_library()
F32, I32 = GgmlType.F32, GgmlType.I32


def computed(build: Callable[..., Tensor], *inputs: np.ndarray, threads: int = 1) -> np.ndarray:
    """What `build(context, *tensors)` makes of arrays (numpy's order), as an array."""
    with (
        Context(LIBRARY, 256, n_graphs=1) as c,
        AlignedBuffer(1 << 24) as memory,
        Buffer(LIBRARY, memory.address, memory.n_bytes) as buffer,
        Backend(LIBRARY, threads) as backend,
        GraphAllocator(backend) as allocator,
    ):
        tensors, at = [], 0
        for array in inputs:
            tensor = c.tensor(F32 if array.dtype == np.float32 else I32, *array.shape[::-1])
            buffer.place(tensor, at)
            ctypes.memmove(tensor.address, np.ascontiguousarray(array).ctypes.data, array.nbytes)
            tensors.append(tensor)
            at += -(-array.nbytes // 64) * 64
        graph = c.graph()
        graph.add(out := build(c, *tensors))
        allocator.reserve(graph)
        allocator.place(graph)
        backend.compute(graph)
        n = out.shape[0] * out.shape[1]
        return np.ctypeslib.as_array((ctypes.c_float * n).from_address(out.address)).reshape(out.shape[1::-1]).copy()


def logits(
    heads: Heads, owner: int, h: np.ndarray, here: np.ndarray, before: np.ndarray | None, *, threads: int = 1
) -> np.ndarray:
    """[n, n_expert]"""
    if before is None:
        return computed(lambda c, h, here: heads.logits(c, owner, h, here, None), h, here, threads=threads)
    return computed(lambda c, *inputs: heads.logits(c, owner, *inputs), h, here, before, threads=threads)


def states(info: PrerouterInfo, n: int, k: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states [n, d], and ids [n, k] of two layers."""
    rng = np.random.default_rng(seed)
    here, before = (np.array([rng.permutation(info.n_expert)[:k] for _ in range(n)], np.int32) for _ in range(2))
    return rng.standard_normal((n, info.n_embd), dtype=np.float32), here, before


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
