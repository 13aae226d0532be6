"""Matrices with low-rank updates beside them: products add them, and what would leave them out is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sluice.errors import GgmlError
from sluice.ggml import Backend, Buffer, Context, GgmlType, GraphAllocator, Tensor, load_library
from sluice.io.aligned import AlignedBuffer

LIBRARY = load_library()
F32 = GgmlType.F32


def adapted(c: Context, n_in: int, n_out: int, rank: int, *stack: int) -> Tensor:
    w = c.tensor(F32, n_in, n_out, *stack)
    w.low_rank = (c.tensor(F32, n_in, rank, *stack), c.tensor(F32, rank, n_out, *stack))
    return w


def _array(memory: AlignedBuffer, tensor: Tensor, at: int) -> np.ndarray:
    shape = [n for n in tensor.shape[::-1] if n > 1]
    return np.frombuffer(memory.view, np.float32, int(np.prod(shape)), at).reshape(shape)


@pytest.mark.parametrize("stack", [(), (3,)], ids=str)
def test_a_product_adds_the_update(stack: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    with (
        AlignedBuffer(1 << 20) as memory,
        Buffer(LIBRARY, memory.address, memory.n_bytes) as buffer,
        Context(LIBRARY, 32, n_graphs=1) as c,
        Backend(LIBRARY, 1) as backend,
        GraphAllocator(backend) as allocator,
    ):
        w, x, out = adapted(c, 64, 40, 5, *stack), c.tensor(F32, 64, 7, *stack), c.tensor(F32, 40, 7, *stack)
        assert w.low_rank is not None
        places = list(range(0, 1 << 20, 1 << 17))
        tensors = (w, *w.low_rank, x, out)
        for tensor, at in zip(tensors, places, strict=False):
            buffer.place(tensor, at)
        arrays = [_array(memory, tensor, at) for tensor, at in zip(tensors, places, strict=False)]
        for array in arrays:
            array[:] = rng.standard_normal(array.shape)
        graph = c.graph()
        graph.add(c.cpy(c.mul_mat(w, x), out))
        allocator.reserve(graph)
        allocator.place(graph)
        backend.compute(graph)
        weights, a, b, columns, found = arrays
        np.testing.assert_allclose(found, columns @ np.swapaxes(weights + b @ a, -1, -2), rtol=1e-4, atol=1e-4)


def test_a_row_takes_its_update_along() -> None:
    with Context(LIBRARY, 16) as c:
        row = c.tensor(F32, 64)
        row.low_rank = (c.tensor(F32, 64, 2), c.tensor(F32, 2, 1))
        assert c.reshape(row, 64, 1).low_rank is row.low_rank
        with pytest.raises(GgmlError, match="another matrix"):
            c.reshape(row, 32, 2)


@pytest.mark.parametrize(
    "use",
    [lambda c, w: c.view(w, (64, 8)), lambda c, w: c.permute(w, 1, 0, 2, 3), lambda c, w: c.reshape(w, 64, 4, 10)],
    ids=["view", "permute", "reshape"],
)
def test_what_would_leave_the_update_out_is_refused(use: Callable[[Context, Tensor], Tensor]) -> None:
    with Context(LIBRARY, 16) as c:
        w = adapted(c, 64, 40, 5)
        with pytest.raises(GgmlError, match=r"low-rank update|another matrix"):
            use(c, w)
        w.low_rank = None
        use(c, w)
