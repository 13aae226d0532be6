"""The ggml binding: refusals instead of aborts, bits that depend on neither threads nor rows nor layout, discovery."""

from __future__ import annotations

import ctypes
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from sluice.errors import GgmlError
from sluice.ggml import Backend, Buffer, Context, GgmlType, GraphAllocator, Tensor, load_library
from sluice.ggml import library as library_module
from sluice.ggml.tensor import row_bytes
from sluice.ggml.types import WEIGHT_TYPES
from sluice.io.aligned import AlignedBuffer

LIBRARY = load_library()
F32, F16, I32, I64 = GgmlType.F32, GgmlType.F16, GgmlType.I32, GgmlType.I64


@pytest.fixture
def c() -> Iterator[Context]:
    with Context(LIBRARY, 64, n_graphs=1) as context:
        yield context


# --- refusals


ROPE: dict[str, Any] = {
    "neox": True, "n_ctx_orig": 64, "freq_base": 1e4, "freq_scale": 1.0, "ext_factor": 0.0, "attn_factor": 1.0,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip


def attention(
    c: Context, q: tuple[int, ...], *, v: tuple[int, ...] = (32, 256, 2), mask: tuple[int, ...] = (256, 4),
    mask_type: GgmlType = F16,
) -> Tensor:  # fmt: skip
    k = c.tensor(F16, 32, 256, 2)
    return c.flash_attention(c.tensor(F32, *q), k, c.tensor(F16, *v), c.tensor(mask_type, *mask), 1.0)


def product_id(c: Context, x: tuple[int, ...], ids: tuple[int, ...], type: GgmlType = I32) -> Tensor:
    return c.mul_mat_id(c.tensor(GgmlType.Q8_0, 64, 16, 5), c.tensor(F32, *x), c.tensor(type, *ids))


def rope(c: Context, positions: tuple[GgmlType, int], n_dims: int, n_factors: int | None = None) -> Tensor:
    factors = None if n_factors is None else c.tensor(F32, n_factors)
    return c.rope(c.tensor(F32, 32, 4, 6), c.tensor(*positions), factors, n_dims, **ROPE)


def a(c: Context, type: GgmlType = F32) -> Tensor:
    return c.tensor(type, 64, 8)


REFUSED: dict[str, Callable[[Context], Any]] = {
    "a row of part of a block": lambda c: c.tensor(GgmlType.Q4_K, 100, 2),
    "no columns": lambda c: c.tensor(F32, 0),
    "negative rows": lambda c: c.tensor(F32, 4, -1),
    "five dimensions": lambda c: c.tensor(F32, 1, 1, 1, 1, 1),
    "mul_mat lengths": lambda c: c.mul_mat(a(c), c.tensor(F32, 32, 8)),
    "mul_mat of F16 activations": lambda c: c.mul_mat(a(c), a(c, F16)),
    "mul_mat of Q8_K weights": lambda c: c.mul_mat(c.tensor(GgmlType.Q8_K, 256, 2), c.tensor(F32, 256, 2)),
    "mul_mat of I32 weights": lambda c: c.mul_mat(a(c, I32), a(c)),
    "mul_mat of permuted weights": lambda c: c.mul_mat(c.permute(c.tensor(F32, 8, 64), 1, 0, 2, 3), a(c)),
    "mul_mat_id tokens": lambda c: product_id(c, (64, 2, 3), (2, 4)),
    "mul_mat_id ranks": lambda c: product_id(c, (64, 2, 3), (3, 3)),
    "mul_mat_id types": lambda c: product_id(c, (64, 2, 3), (2, 3), F32),
    "mul_mat_id lengths": lambda c: product_id(c, (32, 2, 3), (2, 3)),
    "add shapes": lambda c: c.add(a(c), c.tensor(F32, 32, 8, 2)),
    "mul types": lambda c: c.mul(a(c), a(c, F16)),
    "div shapes": lambda c: c.div(a(c), c.tensor(F32, 64, 3)),
    "rms_norm type": lambda c: c.rms_norm(a(c, F16), 1e-6),
    "soft_max type": lambda c: c.soft_max(a(c, F16)),
    "soft_max layout": lambda c: c.soft_max(c.permute(a(c), 1, 0, 2, 3)),
    "scale type": lambda c: c.scale(a(c, I32), 2.0),
    "clamp type": lambda c: c.clamp(a(c, I32), 0.0, 1.0),
    "sum_rows type": lambda c: c.sum_rows(a(c, I32)),
    "top 65 of 64": lambda c: c.top_k(a(c), 65),
    "top 0": lambda c: c.top_k(a(c), 0),
    "swiglu shapes": lambda c: c.swiglu(a(c), c.tensor(F32, 32, 8)),
    "swiglu types": lambda c: c.swiglu(a(c, F16), a(c, F16)),
    "geglu shapes": lambda c: c.geglu(a(c), c.tensor(F32, 32, 8)),
    "geglu types": lambda c: c.geglu(a(c, F16), a(c, F16)),
    "tanh layout": lambda c: c.tanh(c.permute(a(c), 1, 0, 2, 3)),
    "get_rows types": lambda c: c.get_rows(a(c), c.tensor(I64, 4)),
    "get_rows planes": lambda c: c.get_rows(c.tensor(F32, 64, 8, 2), c.tensor(I32, 4)),
    "set_rows count": lambda c: c.set_rows(a(c), c.tensor(F32, 64, 3), c.tensor(I64, 4)),
    "get_rows cubes": lambda c: c.get_rows(c.tensor(F32, 64, 8, 2, 2), c.tensor(I32, 4, 2)),
    "set_rows ids": lambda c: c.set_rows(a(c), c.tensor(F32, 64, 4), c.tensor(F32, 4)),
    "set_rows planes": lambda c: c.set_rows(c.tensor(F32, 64, 8, 3), c.tensor(F32, 64, 4, 3), c.tensor(I32, 4, 2)),
    "fill type": lambda c: c.fill(a(c, I32), 1.0),
    "fill layout": lambda c: c.fill(c.permute(a(c), 1, 0, 2, 3), 1.0),
    "set_rows types": lambda c: c.set_rows(a(c), c.tensor(F16, 64, 4), c.tensor(I64, 4)),
    "cpy counts": lambda c: c.cpy(a(c), c.tensor(F32, 32, 8)),
    "reshape count": lambda c: c.reshape(a(c), 64, 9),
    "reshape layout": lambda c: c.reshape(c.permute(a(c), 1, 0, 2, 3), 512),
    "permute axes": lambda c: c.permute(a(c), 0, 1, 1, 3),
    "view of too much": lambda c: c.view(a(c), (64, 9)),
    "view past the end": lambda c: c.view(a(c), (64, 8), (), 4),
    "view before the start": lambda c: c.view(a(c), (64,), (), -4),
    "view with wide planes": lambda c: c.view(a(c), (16, 8, 2), (256, 260)),
    "view with overlapping rows": lambda c: c.view(a(c), (64, 9), (4,)),
    "rope positions": lambda c: rope(c, (I32, 5), 32),
    "rope position type": lambda c: rope(c, (F32, 6), 32),
    "rope of 34 dimensions": lambda c: rope(c, (I32, 6), 34),
    "rope of 31 dimensions": lambda c: rope(c, (I32, 6), 31),
    "rope factors": lambda c: rope(c, (I32, 6), 32, 15),
    "attention heads": lambda c: attention(c, (32, 4, 3)),
    "attention widths": lambda c: attention(c, (64, 4, 4)),
    "attention to a short mask": lambda c: attention(c, (32, 5, 4)),
    "attention to fewer values": lambda c: attention(c, (32, 4, 4), v=(32, 128, 2)),
    "attention with an F32 mask": lambda c: attention(c, (32, 4, 4), mask_type=F32),
    "attention with a narrow mask": lambda c: attention(c, (32, 4, 4), mask=(128, 4)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_ggml_would_abort_at_is_refused(c: Context, what: str) -> None:
    with pytest.raises(GgmlError) as caught:
        REFUSED[what](c)
    assert "\n" not in str(caught.value)


def test_a_view_of_a_strided_view_stays_inside_it(c: Context) -> None:
    pool = c.tensor(F32, 1000)
    cut = c.view(pool, (10, 4), (400,), 40)  # rows of ten, 400 bytes apart: ends at byte 40 + 1200 + 40 of 4000
    assert cut.shape == (10, 4, 1, 1) and cut.strides[1] == 400
    c.view(cut, (10, 4), (400,))
    with pytest.raises(GgmlError):
        c.view(cut, (10, 4), (404,))
    with pytest.raises(GgmlError):
        c.view(pool, (10, 11), (400,))


def test_memory_is_checked(c: Context) -> None:
    with AlignedBuffer(8192) as memory, Buffer(LIBRARY, memory.address, 8192) as buffer:
        for offset in (-32, 16, 8192 - 32):
            with pytest.raises(GgmlError, match="can't lie at byte"):
                buffer.place(c.tensor(F32, 64), offset)
        a = c.tensor(F32, 64)
        assert a.address == 0
        buffer.place(a, 64)
        assert a.address == memory.address + 64
        with pytest.raises(GgmlError, match="place in memory already"):
            buffer.place(a, 128)
        with pytest.raises(GgmlError, match="aligned"):
            Buffer(LIBRARY, memory.address + 8, 1024)


def test_a_graph_that_outgrows_its_reservation_is_refused() -> None:
    with Place(1) as place, Context(LIBRARY, 8, n_graphs=2) as c:
        small, large = (place.tensor(F32, np.ones(n, np.float32), n) for n in (64, 65536))
        graphs = c.graph(), c.graph()
        for graph, tensor in zip(graphs, (small, large), strict=True):
            graph.add(c.scale(tensor, 2.0))
        place.allocator.reserve(graphs[0])
        place.allocator.place(graphs[0])
        with pytest.raises(GgmlError, match="outgrew"):
            place.allocator.place(graphs[1])


def test_closing_twice_is_harmless() -> None:
    backend = Backend(LIBRARY, 1)
    context = Context(LIBRARY, 4)
    allocator = GraphAllocator(backend)
    memory = AlignedBuffer(4096)
    buffer = Buffer(LIBRARY, memory.address, 4096)
    for each in (context, buffer, allocator, backend, memory) * 2:
        each.close()
    with pytest.raises(GgmlError, match="closed"):
        GraphAllocator(backend)


# --- bits

N_IN, N_OUT, N_EXPERTS = 512, 24, 6
# Quantising to these takes seconds. Any bytes are weights of theirs, beside a block's scale (float16, the first two).
SLOW = {GgmlType.IQ1_S, GgmlType.IQ1_M, GgmlType.IQ2_XXS, GgmlType.IQ2_XS, GgmlType.IQ2_S}
ROWS = (1, 2, 3, 4, 5, 8, 17, 33, 64, 65)


def weights(type: GgmlType, *shape: int) -> np.ndarray:
    """Raw bytes [..., bytes per row] of random weights [..., n_in]."""
    rng = np.random.default_rng(int(type))
    if type in SLOW:
        blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, LIBRARY.ggml_type_size(type)), np.uint8)
        scale = np.array([0.01], np.float16)
        if type == GgmlType.IQ1_M:  # its last eight bytes are four words, each with a nibble of the scale on top
            words = blocks[..., -8:].view(np.uint16)
            words[:] = words & 0x0FFF | scale.view(np.uint16) >> (4 * np.arange(4, dtype=np.uint16)) << 12
        else:
            blocks[..., :2] = scale.view(np.uint8)
        return blocks.reshape(*shape[:-1], -1)
    values = rng.standard_normal(shape, dtype=np.float32)
    if type in (F32, F16):
        return values.astype(np.float32 if type == F32 else np.float16).view(np.uint8)
    raw = np.empty((*shape[:-1], row_bytes(LIBRARY, type, shape[-1])), np.uint8)
    importance = np.ones(shape[-1], np.float32)
    rows = values.size // shape[-1]
    written = LIBRARY.ggml_quantize_chunk(
        type, values.ctypes.data, raw.ctypes.data, 0, rows, shape[-1], importance.ctypes.data
    )
    assert written == raw.nbytes
    return raw


class Place:
    """Memory that tensors are laid into one after another, and a backend to compute on them."""

    def __init__(self, n_threads: int, n_bytes: int = 8 << 20) -> None:
        self._stack = ExitStack()
        enter = self._stack.enter_context
        self.c = enter(Context(LIBRARY, 64, n_graphs=8))
        self.memory = enter(AlignedBuffer(n_bytes))
        self.buffer = enter(Buffer(LIBRARY, self.memory.address, n_bytes))
        self.backend = enter(Backend(LIBRARY, n_threads))
        self.allocator = enter(GraphAllocator(self.backend))
        self.used = 0

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def tensor(self, type: GgmlType, data: np.ndarray, *shape: int) -> Tensor:
        tensor = self.c.tensor(type, *shape)
        assert tensor.n_bytes == data.nbytes
        self.buffer.place(tensor, self.used)
        self.memory.view[self.used : self.used + data.nbytes] = data.tobytes()
        self.used += -(-data.nbytes // 64) * 64
        return tensor

    def compute(self, result: Tensor) -> np.ndarray:
        """The F32 values of `result`, slowest dimension first."""
        graph = self.c.graph()
        graph.add(result)
        self.allocator.reserve(graph)
        self.allocator.place(graph)
        self.backend.compute(graph)
        shape = result.shape[::-1]
        values = (ctypes.c_float * math.prod(shape)).from_address(result.address)
        return np.array(values, np.float32).reshape(shape)


@pytest.mark.parametrize("type", sorted(WEIGHT_TYPES), ids=lambda t: t.name)
def test_products_have_the_same_bits_whatever_rows_threads_and_layout(type: GgmlType) -> None:
    if LIBRARY.ggml_blck_size(type) == 0:
        pytest.skip(f"this ggml knows no {type.name}")
    raw = weights(type, N_EXPERTS, N_OUT, N_IN)
    x = np.random.default_rng(1).standard_normal((max(ROWS), N_IN), dtype=np.float32)
    routed = np.random.default_rng(2).integers(0, N_EXPERTS, (max(ROWS), 2)).astype(np.int32)
    products, routed_products = [], []
    stride = (raw[0].nbytes // 4096 + 2) * 4096  # of a slot, which the matrix doesn't fill
    for n_threads in (1, 2):
        for n in ROWS:
            with Place(n_threads) as place:
                c = place.c
                columns = place.tensor(F32, x[:n], N_IN, n)
                ids = place.tensor(I32, routed[:n], 2, n)
                plain = place.tensor(type, raw, N_IN, N_OUT, N_EXPERTS)
                elements = (N_EXPERTS + 1) * stride // LIBRARY.ggml_type_size(type) * LIBRARY.ggml_blck_size(type)
                pool = np.full(row_bytes(LIBRARY, type, elements), 0xFF, np.uint8)
                start = 96  # as far into a block as a file may have it
                for e in range(N_EXPERTS):
                    at = start + e * stride
                    pool[at : at + raw[e].nbytes] = raw[e].reshape(-1)
                over = place.tensor(type, pool, elements)
                row = row_bytes(LIBRARY, type, N_IN)
                slots = c.view(over, (N_IN, N_OUT, N_EXPERTS), (row, stride), start)
                one = c.view(over, (N_IN, N_OUT), (row,), start)
                by_three = c.reshape(columns, N_IN, 1, n)
                first = c.view(plain, (N_IN, N_OUT))
                found = [place.compute(c.mul_mat(w, columns)) for w in (first, one)]
                np.testing.assert_array_equal(found[0], found[1])
                products.append(found[0].reshape(n, N_OUT))
                found = [place.compute(c.mul_mat_id(w, by_three, ids)) for w in (plain, slots)]
                np.testing.assert_array_equal(found[0], found[1])
                routed_products.append(found[0].reshape(n, 2, N_OUT))
    for each, routed_each in zip(products, routed_products, strict=True):
        assert np.isfinite(each).all() and each.any()
        np.testing.assert_array_equal(each, products[-1][: len(each)])
        np.testing.assert_array_equal(routed_each, routed_products[-1][: len(routed_each)])
    chosen_first = routed == 0
    np.testing.assert_array_equal(routed_products[-1][chosen_first], products[-1][np.nonzero(chosen_first)[0]])


@pytest.mark.parametrize("type", [F32, F16, GgmlType.Q4_K, GgmlType.Q6_K, GgmlType.Q8_0, GgmlType.IQ4_NL], ids=str)
def test_products_are_those_of_the_dequantised_weights(type: GgmlType) -> None:
    raw = weights(type, N_OUT, N_IN)
    x = np.random.default_rng(3).standard_normal((5, N_IN), dtype=np.float32)
    with Place(1) as place:
        found = place.compute(place.c.mul_mat(place.tensor(type, raw, N_IN, N_OUT), place.tensor(F32, x, N_IN, 5)))
    quantised = gguf.GGMLQuantizationType(type)
    plain = raw.view({F32: np.float32, F16: np.float16}.get(type, np.uint8))
    expected = x.astype(np.float64) @ gguf.quants.dequantize(plain, quantised).astype(np.float64).T
    # Activations are rounded to 8 bits in blocks before quantised products: about 0.5 % each, averaged over a row.
    tolerance = {F32: 1e-6, F16: 1e-3}.get(type, 1e-2)
    assert np.linalg.norm(found.reshape(5, N_OUT) - expected) <= tolerance * np.linalg.norm(expected)


def test_routing_operations(c: Context) -> None:
    scores = np.random.default_rng(4).standard_normal((7, 12), dtype=np.float32)
    with Place(1) as place:
        c, tensor = place.c, place.tensor(F32, scores, 12, 7)
        probabilities = place.compute(c.soft_max(tensor)).reshape(7, 12)
        ids = c.top_k(tensor, 3)
        assert ids.shape == (3, 7, 1, 1) and not ids.contiguous
        chosen = c.get_rows(c.reshape(tensor, 1, 12, 7), ids)
        best = place.compute(chosen).reshape(7, 3)
    shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
    np.testing.assert_allclose(probabilities, shifted / shifted.sum(axis=1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(best, -np.sort(-scores, axis=1)[:, :3])


def test_gelu_is_the_one_with_tanh() -> None:
    gate = np.linspace(-12, 12, 5 * 64, dtype=np.float32).reshape(5, 64)
    up = np.random.default_rng(5).standard_normal((5, 64), dtype=np.float32)
    with Place(1) as place:
        c, tensors = place.c, [place.tensor(F32, x, 64, 5) for x in (gate, up)]
        found = place.compute(c.geglu(*tensors)).reshape(5, 64)
        bent = place.compute(c.tanh(tensors[0])).reshape(5, 64)
    half = gate.astype(np.float16).astype(np.float64)  # ggml's table has the values of half-precision floats, as such
    gelu = 0.5 * half * (1 + np.tanh((2 / np.pi) ** 0.5 * (half + 0.044715 * half**3)))
    looked_up = np.where(np.abs(gate) < 10, gelu.astype(np.float16), np.maximum(gate, 0))
    np.testing.assert_allclose(found, looked_up * up, rtol=2e-3, atol=1e-6)
    np.testing.assert_allclose(bent, np.tanh(gate), rtol=1e-5)


# --- finding the libraries


def libraries() -> list[Path]:
    """The installed base and CPU libraries."""
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    found = [next(LIBRARY.path.glob(f"**/*ggml-{part}{suffix}")) for part in ("base", "cpu")]
    assert len(found) == 2
    return found


def test_the_installed_library_is_loaded_once() -> None:
    assert load_library() is LIBRARY
    assert load_library(LIBRARY.path) is LIBRARY
    assert LIBRARY.tried and LIBRARY.version.count(".") >= 1
    assert set(LIBRARY.features()) <= set(library_module.CPU_FEATURES)


def test_a_folder_without_ggml_is_named(tmp_path: Path) -> None:
    with pytest.raises(GgmlError, match=f"no ggml-base and ggml-cpu library in {tmp_path}"):
        load_library(tmp_path)
    with pytest.raises(GgmlError, match="no ggml-base"):
        load_library(tmp_path / "missing")


def test_a_damaged_library_is_an_error(tmp_path: Path) -> None:
    for path in libraries():
        (tmp_path / path.name).write_bytes(b"not a library")
    with pytest.raises(GgmlError, match="does not load"):
        load_library(tmp_path)


def test_a_library_without_the_calls_is_an_error(tmp_path: Path) -> None:
    found = libraries()
    for path in found:  # both names lead to the base library, which lacks the CPU backend's calls
        shutil.copy(found[0], tmp_path / path.name)
    with pytest.raises(GgmlError, match="has no ggml_backend_cpu_init"):
        load_library(tmp_path)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GgmlError, match="pip install libggml-python"):
        load_library()


def test_an_old_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "OLDEST", (99, 0, 0))
    monkeypatch.setattr(library_module, "_loaded", {})
    with pytest.raises(GgmlError, match=r"too old: Sluice needs 99\.0\.0"):
        load_library()
