"""Tensors, contexts and graphs: ggml's operations with shapes and types checked first, so that ggml never aborts.

Shapes are kept here, in ggml's order (fastest dimension first), instead of being read back from ggml's structs, whose
layout changes between versions. It knows nothing of models.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sluice.errors import GgmlError
from sluice.ggml.library import InitParams
from sluice.ggml.types import WEIGHT_TYPES, GgmlType

if TYPE_CHECKING:
    from sluice.ggml.library import Library

Shape = tuple[int, int, int, int]


def _need(condition: bool, message: str | Callable[[], str]) -> None:
    """The text is made only when it is needed: graphs are built while tokens wait."""
    if not condition:
        raise GgmlError(message if isinstance(message, str) else message())


class Tensor:
    """A ggml tensor: `ptr` (a `struct ggml_tensor *`), `type`, `shape` and `strides` in bytes, fastest first.

    `low_rank` are two matrices a [n_in, rank] and b [rank, n_out], F32, beside one that is [n_in, n_out]: what
    multiplies by it multiplies by it plus b a.
    """

    __slots__ = ("contiguous", "library", "low_rank", "ptr", "shape", "strides", "type")

    def __init__(self, library: Library, ptr: int, type: GgmlType, shape: Shape, strides: Shape | None = None) -> None:
        _need(bool(ptr), "ggml returned no tensor: its context is too small")
        self.library = library
        self.ptr = ptr
        self.type = type
        self.shape = shape
        plain = contiguous_strides(library, type, shape)
        self.strides = strides or plain
        self.contiguous = self.strides == plain
        self.low_rank: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        return f"Tensor({self.type.name}, {list(self.shape)})"

    @property
    def address(self) -> int:
        """Where its data lies; 0 before allocation."""
        return self.library.ggml_get_data(self.ptr) or 0

    @property
    def n_bytes(self) -> int:
        """Bytes of its data as if contiguous."""
        return row_bytes(self.library, self.type, self.shape[0]) * self.shape[1] * self.shape[2] * self.shape[3]

    @property
    def whole_rows(self) -> bool:
        """The elements of a row follow each other."""
        return self.strides[0] == self.library.ggml_type_size(self.type)


def row_bytes(library: Library, type: GgmlType, n: int) -> int:
    """Bytes of a row of `n` elements. Raises GgmlError if `n` isn't a multiple of the type's block."""
    blocks, rest = divmod(n, block := library.ggml_blck_size(type))
    if rest:
        raise GgmlError(f"a row of {n} is no multiple of {type.name}'s block of {block}")
    return blocks * library.ggml_type_size(type)


def contiguous_strides(library: Library, type: GgmlType, shape: Shape) -> Shape:
    row = row_bytes(library, type, shape[0])
    return (library.ggml_type_size(type), row, row * shape[1], row * shape[1] * shape[2])


def full_shape(shape: Sequence[int]) -> Shape:
    """`shape` with ones up to four dimensions."""
    if not (1 <= len(shape) <= 4 and min(shape) >= 1):
        raise GgmlError(f"impossible shape {list(shape)}")
    a, b, c, d = (*shape, 1, 1, 1)[:4]
    return a, b, c, d


class Graph:
    """A compute graph inside a Context, of at most `n_nodes` nodes, which run in the order they were added."""

    __slots__ = ("added", "context", "n_nodes", "ptr")

    def __init__(self, context: Context, ptr: int, n_nodes: int) -> None:
        self.context = context
        self.ptr = ptr
        self.n_nodes = n_nodes
        self.added: list[Tensor] = []

    def add(self, *tensors: Tensor) -> None:
        """Append what computes each tensor, in this order."""
        for tensor in tensors:
            self.context.library.ggml_build_forward_expand(self.ptr, tensor.ptr)
        self.added += tensors


def chained(*graphs: Graph) -> tuple[Context, Graph]:
    """A graph that runs `graphs`, placed in memory already, one after the other; its context, for the caller to close.

    It has the nodes of those, so they must outlive it, and no memory of its own: what passes from one to the next is
    what they have written down where the next one looks for it.
    """
    library = graphs[0].context.library
    # a graph has as much room for what it computes as for what it only reads, which is never twice as much
    n_nodes = sum(min(graph.n_nodes, 2 * library.ggml_graph_n_nodes(graph.ptr) + 16) for graph in graphs)
    c = Context(library, 0, n_graphs=1, n_nodes=n_nodes)
    whole = c.graph()
    for graph in graphs:
        whole.add(*graph.added)
    return c, whole


class Context:
    """Memory for the headers of up to `n_tensors` tensors, and for graphs of up to `n_nodes` nodes, as many where not
    given; a context manager.

    Freeing it invalidates its tensors and graphs. Data lives elsewhere.
    """

    def __init__(self, library: Library, n_tensors: int, *, n_graphs: int = 0, n_nodes: int | None = None) -> None:
        self.library = library
        self.n_nodes = n_tensors if n_nodes is None else n_nodes
        n_bytes = n_tensors * (library.ggml_tensor_overhead() + 64)
        n_bytes += n_graphs * (library.ggml_graph_overhead_custom(self.n_nodes, False) + 64) + 1024
        self._ptr: int | None = library.ggml_init(InitParams(n_bytes, None, True))
        _need(bool(self._ptr), lambda: f"ggml could not allocate a context of {n_bytes} bytes")

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self._ptr:
            self.library.ggml_free(self._ptr)
            self._ptr = None

    @property
    def ptr(self) -> int:
        if not self._ptr:
            raise GgmlError("the context is closed")
        return self._ptr

    def graph(self) -> Graph:
        return Graph(self, self.library.ggml_new_graph_custom(self._ptr, self.n_nodes, False), self.n_nodes)

    def _new(self, ptr: int, type: GgmlType, shape: Sequence[int], strides: Shape | None = None) -> Tensor:
        return Tensor(self.library, ptr, type, full_shape(shape), strides)

    # --- tensors and views

    def tensor(self, type: GgmlType, *shape: int) -> Tensor:
        """A tensor without data yet."""
        row_bytes(self.library, type, shape[0])
        dims = (C.c_int64 * len(shape))(*full_shape(shape)[: len(shape)])
        return self._new(self.library.ggml_new_tensor(self._ptr, type, len(shape), C.addressof(dims)), type, shape)

    def view(self, a: Tensor, shape: Sequence[int], strides: Sequence[int] = (), offset: int = 0) -> Tensor:
        """A window on `a`: `strides` are the bytes between rows, planes, cubes (contiguous where not given)."""
        full = n0, n1, n2, n3 = full_shape(shape)
        element, row, *_ = contiguous_strides(self.library, a.type, full)
        s1 = strides[0] if strides else row
        s2 = strides[1] if len(strides) > 1 else s1 * n1
        s3 = strides[2] if len(strides) > 2 else s2 * n2
        self._whole(a)
        last = offset + (n1 - 1) * s1 + (n2 - 1) * s2 + (n3 - 1) * s3 + row
        last = max(last, offset + row * n1 * n2 * n3)  # ggml aborts if rows overlap by so much
        if a.contiguous:
            span = a.strides[3] * a.shape[3]
        else:
            span = row_bytes(self.library, a.type, a.shape[0])
            span += sum((n - 1) * s for n, s in zip(a.shape[1:], a.strides[1:], strict=True))
        if offset < 0 or last > span:
            raise GgmlError(f"a view of {list(shape)} ends at byte {last} of {a!r}, which has {span}")
        p = self.library.ggml_view_4d(self._ptr, a.ptr, n0, n1, n2, n3, s1, s2, s3, offset)
        return Tensor(self.library, p, a.type, full, (element, s1, s2, s3))

    def reshape(self, a: Tensor, *shape: int) -> Tensor:
        full = full_shape(shape)
        count = a.shape[0] * a.shape[1] * a.shape[2] * a.shape[3]
        _need(
            a.contiguous and count == full[0] * full[1] * full[2] * full[3],
            lambda: f"{a!r} can't take the shape {list(shape)}",
        )
        reshaped = self._new(self.library.ggml_reshape_4d(self._ptr, a.ptr, *full), a.type, full)
        if a.low_rank is not None:
            _need(full[0] == a.shape[0] and full[1] == a.low_rank[1].shape[1], lambda: f"{a!r} is another matrix then")
            reshaped.low_rank = a.low_rank
        return reshaped

    def _whole(self, a: Tensor) -> None:
        """What is done to a part of a matrix would leave out what is beside it."""
        _need(a.low_rank is None, lambda: f"{a!r} has a low-rank update, and only products know of that")

    def permute(self, a: Tensor, *axes: int) -> Tensor:
        """Dimension i of `a` becomes dimension axes[i]."""
        self._whole(a)
        _need(sorted(axes) == [0, 1, 2, 3], lambda: f"{axes} is no permutation of four axes")
        shape, strides = [0] * 4, [0] * 4
        for i, axis in enumerate(axes):
            shape[axis], strides[axis] = a.shape[i], a.strides[i]
        p = self.library.ggml_permute(self._ptr, a.ptr, *axes)
        return self._new(p, a.type, shape, (strides[0], strides[1], strides[2], strides[3]))

    def cont(self, a: Tensor) -> Tensor:
        return self._new(self.library.ggml_cont(self._ptr, a.ptr), a.type, a.shape)

    def cpy(self, a: Tensor, b: Tensor) -> Tensor:
        """Copy `a` into `b`, converting its type; a view of `b`."""
        _need(_count(a) == _count(b), lambda: f"can't copy {a!r} into {b!r}")
        return self._new(self.library.ggml_cpy(self._ptr, a.ptr, b.ptr), b.type, b.shape, b.strides)

    def float32(self, a: Tensor) -> Tensor:
        """`a` in F32, contiguous."""
        self._whole(a)
        _need(a.whole_rows, lambda: f"can't convert {a!r}")
        return self._new(self.library.ggml_cast(self._ptr, a.ptr, GgmlType.F32), GgmlType.F32, a.shape)

    def repeat(self, a: Tensor, b: Tensor) -> Tensor:
        """`a` (F32) as often as it fits into the shape of `b`, whose numbers don't matter."""
        fits = all(m % n == 0 for m, n in zip(b.shape, a.shape, strict=True))
        _need(fits and a.type == GgmlType.F32 and a.whole_rows, lambda: f"can't repeat {a!r} to the shape of {b!r}")
        return self._new(self.library.ggml_repeat(self._ptr, a.ptr, b.ptr), a.type, b.shape)

    # --- rows

    def get_rows(self, a: Tensor, ids: Tensor) -> Tensor:
        """Rows `ids` ([n], [n, m] or [n, m, l], I32) of `a` as F32; row set j comes from plane j of `a`, and so on."""
        _need(
            ids.type == GgmlType.I32 and a.shape[2:] == ids.shape[1:3] and ids.shape[3] == 1,
            lambda: f"can't take rows {ids!r} of {a!r}",
        )
        type = GgmlType.I32 if a.type == GgmlType.I32 else GgmlType.F32
        return self._new(self.library.ggml_get_rows(self._ptr, a.ptr, ids.ptr), type, (a.shape[0], *ids.shape[:3]))

    def set_rows(self, a: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Write `rows` (F32) to the rows `ids` (I64 or I32) of `a`, converting to its type; a view of `a`.

        With `ids` [n, m], row set j goes to plane j of `a`; with `ids` [n], each to the same rows of every plane."""
        fits = a.shape[0] == rows.shape[0] and a.shape[2:] == rows.shape[2:] and rows.shape[1] == ids.shape[0]
        fits = fits and rows.shape[2] % ids.shape[1] == 0 and rows.shape[3] % ids.shape[2] == 0 and ids.shape[3] == 1
        types = rows.type == GgmlType.F32 and ids.type in (GgmlType.I32, GgmlType.I64)
        _need(
            fits and types and a.whole_rows and rows.whole_rows,
            lambda: f"can't write {rows!r} to rows {ids!r} of {a!r}",
        )
        return self._new(self.library.ggml_set_rows(self._ptr, a.ptr, rows.ptr, ids.ptr), a.type, a.shape, a.strides)

    # --- arithmetic

    def _elementwise(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        fits = all(m % n == 0 for m, n in zip(a.shape, b.shape, strict=True))
        _need(fits and a.type == b.type == GgmlType.F32, lambda: f"can't {name} {a!r} and {b!r}")
        return self._new(getattr(self.library, f"ggml_{name}")(self._ptr, a.ptr, b.ptr), a.type, a.shape)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._elementwise("add", a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return self._elementwise("mul", a, b)

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        return self._elementwise("div", a, b)

    def scale(self, a: Tensor, factor: float) -> Tensor:
        _need(a.type == GgmlType.F32 and a.contiguous, lambda: f"scale needs contiguous F32, not {a!r}")
        return self._new(self.library.ggml_scale(self._ptr, a.ptr, factor), a.type, a.shape)

    def clamp(self, a: Tensor, low: float, high: float) -> Tensor:
        """In place, as ggml's clamp is."""
        _need(a.type == GgmlType.F32, lambda: f"clamp needs F32, not {a!r}")
        return self._new(self.library.ggml_clamp(self._ptr, a.ptr, low, high), a.type, a.shape, a.strides)

    def fill(self, a: Tensor, value: float) -> Tensor:
        """A tensor of the shape of `a` that holds `value` everywhere."""
        _need(a.type == GgmlType.F32 and a.contiguous, lambda: f"fill needs contiguous F32, not {a!r}")
        return self._new(self.library.ggml_fill(self._ptr, a.ptr, value), a.type, a.shape)

    def sum_rows(self, a: Tensor) -> Tensor:
        _need(a.type == GgmlType.F32 and a.whole_rows, lambda: f"sum_rows needs F32, not {a!r}")
        return self._new(self.library.ggml_sum_rows(self._ptr, a.ptr), a.type, (1, *a.shape[1:]))

    def rms_norm(self, a: Tensor, eps: float) -> Tensor:
        _need(a.type == GgmlType.F32, lambda: f"rms_norm needs F32, not {a!r}")
        return self._new(self.library.ggml_rms_norm(self._ptr, a.ptr, eps), a.type, a.shape)

    def l2_norm(self, a: Tensor, eps: float) -> Tensor:
        """Each row divided by its length (at least `eps`)."""
        _need(a.type == GgmlType.F32 and a.whole_rows, lambda: f"l2_norm needs F32, not {a!r}")
        return self._new(self.library.ggml_l2_norm(self._ptr, a.ptr, eps), a.type, a.shape)

    def _unary(self, name: str, a: Tensor) -> Tensor:
        _need(a.type == GgmlType.F32 and a.contiguous, lambda: f"{name} needs contiguous F32, not {a!r}")
        return self._new(getattr(self.library, f"ggml_{name}")(self._ptr, a.ptr), a.type, a.shape)

    def sigmoid(self, a: Tensor) -> Tensor:
        return self._unary("sigmoid", a)

    def silu(self, a: Tensor) -> Tensor:
        """a × sigmoid(a)."""
        return self._unary("silu", a)

    def tanh(self, a: Tensor) -> Tensor:
        return self._unary("tanh", a)

    def gelu_erf(self, a: Tensor) -> Tensor:
        """GELU as it is defined, a × Φ(a), with the error function."""
        return self._unary("gelu_erf", a)

    def softplus(self, a: Tensor) -> Tensor:
        """log(1 + exp(a))."""
        return self._unary("softplus", a)

    def soft_max(self, a: Tensor) -> Tensor:
        _need(a.type == GgmlType.F32 and a.contiguous, lambda: f"soft_max needs contiguous F32, not {a!r}")
        return self._new(self.library.ggml_soft_max(self._ptr, a.ptr), a.type, a.shape)

    def top_k(self, a: Tensor, k: int) -> Tensor:
        """Positions (I32) of each row's `k` largest, largest first: [k, rows], a strided view."""
        _need(a.type == GgmlType.F32 and a.contiguous and 1 <= k <= a.shape[0], lambda: f"no top {k} of {a!r}")
        shape = (k, *a.shape[1:])
        strides = (4, 4 * a.shape[0], 4 * a.shape[0] * a.shape[1], 4 * a.shape[0] * a.shape[1] * a.shape[2])
        return self._new(self.library.ggml_argsort_top_k(self._ptr, a.ptr, k), GgmlType.I32, shape, strides)

    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        """`a` and `b` side by side along their first dimension."""
        _need(a.shape[1:] == b.shape[1:] and a.type == b.type == GgmlType.F32, lambda: f"can't join {a!r} and {b!r}")
        p = self.library.ggml_concat(self._ptr, a.ptr, b.ptr, 0)
        return self._new(p, a.type, (a.shape[0] + b.shape[0], *a.shape[1:]))

    def add_id(self, a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        """`a` [n, n_used, n_tokens] plus the columns `ids` [n_used, n_tokens] (I32) of `b` [n, n_columns].

        The ids themselves are not checked."""
        fits = a.shape[0] == b.shape[0] and a.shape[1:3] == ids.shape[:2] and a.shape[3] == ids.shape[2] == b.shape[2]
        types = a.type == b.type == GgmlType.F32 and ids.type == GgmlType.I32 and a.whole_rows and b.whole_rows
        _need(fits and types, lambda: f"can't add columns {ids!r} of {b!r} to {a!r}")
        return self._new(self.library.ggml_add_id(self._ptr, a.ptr, b.ptr, ids.ptr), a.type, a.shape)

    def mul_mat(self, w: Tensor, x: Tensor) -> Tensor:
        """`w` [n_in, n_out], with its low-rank update where it has one, times `x` [n_in, n]: [n_out, n], F32."""
        fits = w.shape[0] == x.shape[0] and x.shape[2] % w.shape[2] == 0 and x.shape[3] % w.shape[3] == 0
        fits = fits and w.whole_rows and x.whole_rows
        _need(fits and x.type == GgmlType.F32 and w.type in WEIGHT_TYPES, lambda: f"can't multiply {w!r} by {x!r}")
        shape = (w.shape[1], *x.shape[1:])
        y = self._new(self.library.ggml_mul_mat(self._ptr, w.ptr, x.ptr), GgmlType.F32, shape)
        if w.low_rank is None:
            return y
        a, b = w.low_rank
        return self.add(y, self.mul_mat(b, self.mul_mat(a, x)))

    def mul_mat_id(self, w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        """Matrices `ids` [n_used, n] (I32) of `w` [n_in, n_out, n_matrices], each times its column of
        `x` [n_in, n_used or 1, n]: [n_out, n_used, n], F32. The ids themselves are not checked."""
        fits = w.shape[0] == x.shape[0] and x.shape[2] == ids.shape[1] and ids.shape[0] % x.shape[1] == 0
        fits = fits and w.shape[3] == x.shape[3] == ids.shape[2] == 1 and w.whole_rows and x.whole_rows
        types = x.type == GgmlType.F32 and ids.type == GgmlType.I32 and w.type in WEIGHT_TYPES
        _need(fits and types, lambda: f"can't multiply {w!r} by {x!r} with {ids!r}")
        shape = (w.shape[1], ids.shape[0], x.shape[2])
        return self._new(self.library.ggml_mul_mat_id(self._ptr, w.ptr, x.ptr, ids.ptr), GgmlType.F32, shape)

    def _gated(self, name: str, gate: Tensor, up: Tensor) -> Tensor:
        fits = gate.shape == up.shape and gate.type == up.type == GgmlType.F32
        _need(fits, lambda: f"no {name} of {gate!r} and {up!r}")
        p = getattr(self.library, f"ggml_{name}_split")(self._ptr, gate.ptr, up.ptr)
        return self._new(p, gate.type, gate.shape)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) × up."""
        return self._gated("swiglu", gate, up)

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) × up, in its form with tanh, whose values ggml looks up in a table of half-precision floats."""
        return self._gated("geglu", gate, up)

    def swiglu_oai(self, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        """g × sigmoid(alpha × g) × (u + 1), g = min(gate, limit), u clamped to ± limit."""
        _need(
            gate.shape == up.shape and gate.type == up.type == GgmlType.F32, lambda: f"no swiglu of {gate!r} and {up!r}"
        )
        p = self.library.ggml_swiglu_oai(self._ptr, gate.ptr, up.ptr, alpha, limit)
        return self._new(p, gate.type, gate.shape)

    def ssm_conv(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Causal convolution along each channel: `x` [width - 1 + n, n_channels, n_seqs], `kernel` [width, n_channels],
        F32: [n_channels, n, n_seqs]."""
        n = x.shape[0] - kernel.shape[0] + 1
        fits = n >= 1 and x.shape[1] == kernel.shape[1] and x.shape[3] == kernel.shape[2] == kernel.shape[3] == 1
        types = x.type == kernel.type == GgmlType.F32 and x.contiguous and kernel.contiguous
        _need(fits and types, lambda: f"can't convolve {x!r} with {kernel!r}")
        p = self.library.ggml_ssm_conv(self._ptr, x.ptr, kernel.ptr)
        return self._new(p, GgmlType.F32, (x.shape[1], n, x.shape[2]))

    def gated_delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gated delta rule over n tokens of n_seqs sequences (arXiv 2412.06464), all F32.

        `q`, `k` [d, H_k, n, n_seqs], `v` [d, H_v, n, n_seqs], `gate` (logarithms of the decay) [1 or d, H_v, n,
        n_seqs], `beta` [1, H_v, n, n_seqs], `state` [d, d, H_v, n_seqs], where H_k divides H_v: output
        [d, H_v, n, n_seqs], and the state after the last token.
        """
        d, heads, n, n_seqs = v.shape
        fits = q.shape == k.shape and q.shape[0] == d and heads % q.shape[1] == 0 and q.shape[2:] == (n, n_seqs)
        fits = fits and gate.shape[0] in (1, d) and gate.shape[1:] == v.shape[1:] and beta.shape == (1, *v.shape[1:])
        fits = fits and state.shape == (d, d, heads, n_seqs)
        types = all(a.type == GgmlType.F32 for a in (q, k, v, gate, beta, state))
        whole = q.whole_rows and k.whole_rows and v.whole_rows and gate.contiguous and beta.contiguous
        _need(
            fits and types and whole and state.contiguous, lambda: f"no delta rule of {q!r}, {k!r}, {v!r} on {state!r}"
        )
        p = self.library.ggml_gated_delta_net(
            self._ptr,
            q.ptr,
            k.ptr,
            v.ptr,
            gate.ptr,
            beta.ptr,
            state.ptr,
            1,  # only the last state is kept
        )
        # d × H_v wide: one column a token, then the states
        packed = self._new(p, GgmlType.F32, (d * heads, n * n_seqs + d * n_seqs))
        return self.view(packed, v.shape), self.view(packed, state.shape, (), 4 * d * heads * n * n_seqs)

    def rope(
        self, a: Tensor, positions: Tensor, factors: Tensor | None, n_dims: int, *, neox: bool, n_ctx_orig: int,
        freq_base: float, freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float, beta_slow: float,
    ) -> Tensor:  # fmt: skip
        """Rotary embedding of `a` [head_dim, n_head, n] at `positions` [n] (I32)."""
        _need(
            positions.type == GgmlType.I32 and positions.shape[0] == a.shape[2],
            lambda: f"{positions!r} don't position {a!r}",
        )
        _need(n_dims <= a.shape[0] and n_dims % 2 == 0, lambda: f"can't rotate {n_dims} dimensions of {a!r}")
        _need(
            factors is None or factors.shape[0] >= n_dims // 2,
            lambda: f"{factors!r} are too few factors for {n_dims} dimensions",
        )
        p = self.library.ggml_rope_ext(
            self._ptr, a.ptr, positions.ptr, factors.ptr if factors else None, n_dims, 2 if neox else 0, n_ctx_orig,
            freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow,
        )  # fmt: skip
        return self._new(p, a.type, a.shape)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """What `flash_attention` computes, in plain products, as llama.cpp does without flash attention: same bits.

        A row's bits depend on its own length alone. Takes F32 `k` and `v`, and n_kv × n × n_head floats of scratch.
        """
        fits = q.shape[0] == k.shape[0] and k.shape[1:] == v.shape[1:] and q.shape[2] % k.shape[2] == 0
        fits = fits and mask.shape[0] == k.shape[1] and mask.shape[1] == q.shape[1] and mask.contiguous
        types = q.type == k.type == v.type == GgmlType.F32 and mask.type == GgmlType.F16
        _need(fits and types, lambda: f"no attention of {q!r} to {k!r}, {v!r}")
        scores = self.mul_mat(k, q)  # [n_kv, n, n_head]
        p = self.library.ggml_soft_max_ext(self._ptr, scores.ptr, mask.ptr, scale, 0.0)
        if sinks is not None:
            self._check_sinks(sinks, q)
            self.library.ggml_soft_max_add_sinks(p, sinks.ptr)
        weights = self._new(p, GgmlType.F32, scores.shape)
        out = self.mul_mat(self.cont(self.permute(v, 1, 0, 2, 3)), weights)  # [d_v, n, n_head]
        return self.cont(self.permute(out, 0, 2, 1, 3))

    def _check_sinks(self, sinks: Tensor, q: Tensor) -> None:
        _need(
            sinks.type == GgmlType.F32 and sinks.shape == (q.shape[2], 1, 1, 1),
            lambda: f"{sinks!r} are no sinks of {q!r}",
        )

    def flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """softmax(scale·qk + mask) v: `q` [d, n, n_head] F32, `k` [d, n_kv, n_head_kv], `v` [d_v, n_kv, n_head_kv],
        `mask` [n_kv, n] F16: [d_v, n_head, n], F32.

        `sinks` [n_head] F32 are logits that take their share of each head's softmax and give nothing."""
        fits = q.shape[0] == k.shape[0] and k.shape[1:] == v.shape[1:] and q.shape[2] % k.shape[2] == 0
        fits = fits and mask.shape[0] == k.shape[1] and mask.shape[1] >= q.shape[1] and mask.contiguous
        _need(
            fits and q.type == GgmlType.F32 and mask.type == GgmlType.F16,
            lambda: f"no attention of {q!r} to {k!r}, {v!r}",
        )
        p = self.library.ggml_flash_attn_ext(self._ptr, q.ptr, k.ptr, v.ptr, mask.ptr, scale, 0.0, 0.0)
        self.library.ggml_flash_attn_ext_set_prec(p, 10)  # GGML_PREC_F32
        if sinks is not None:
            self._check_sinks(sinks, q)
            self.library.ggml_flash_attn_ext_add_sinks(p, sinks.ptr)
        return self._new(p, GgmlType.F32, (v.shape[0], q.shape[2], q.shape[1]))


def _count(a: Tensor) -> int:
    return a.shape[0] * a.shape[1] * a.shape[2] * a.shape[3]
