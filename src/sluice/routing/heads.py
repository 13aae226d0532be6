"""Prerouter heads in memory, and what they compute as a graph fragment; knows no steps, no cache and no sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sluice.ggml import Buffer, Context, GgmlType, Library, Tensor
from sluice.io.aligned import AlignedBuffer
from sluice.routing.prerouter_file import PrerouterFile

ALIGNMENT = 64  # of each tensor, bytes: a cache line
MAX_LOGIT = 1e30  # of what heads say, either way; what is no number counts as that
_TYPES = {"F32": GgmlType.F32, "F16": GgmlType.F16}


@dataclass(frozen=True)
class _Place:
    """Where a tensor of a head lies, `shape` in ggml's order."""

    owner: int
    part: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


def _places(file: PrerouterFile) -> list[_Place]:
    """The tensors of all heads that are used. fc1 is three: what reads the hidden state as it is, and for each layer
    of experts its columns as rows, so that a product with ones and zeros is a sum of rows, and the zeros aren't read.
    """
    info, places, at = file.info, [], 0
    d, n = info.n_embd, info.n_expert
    types = {name: _TYPES[tensor.kind] for name, tensor in file.tensors.items()}
    for owner in info.predicts:
        hidden = file.hidden(owner)
        fc1, fc2, skip = (types[f"blk.{owner}.{part}.weight"] for part in ("fc1", "fc2", "skip"))
        parts: list[tuple[str, GgmlType, tuple[int, ...]]] = [
            ("fc1", fc1, (d, hidden)),
            ("fc1.bias", GgmlType.F32, (hidden,)),  # ggml adds nothing else
            ("here", fc1, (hidden, n + 1)),  # the last row is zeros: no expert
            ("fc2", fc2, (hidden, n)),
            ("bias", GgmlType.F32, (n,)),  # of fc2 and skip
            ("skip", skip, (d, n)),
        ]
        if info.reads_before(owner):
            parts.insert(3, ("before", fc1, (hidden, n + 1)))
        for part, type, shape in parts:
            n_bytes = (4 if type == GgmlType.F32 else 2) * int(np.prod(shape, dtype=object))
            places.append(_Place(owner, part, type, shape, at, n_bytes))
            at += -(-n_bytes // ALIGNMENT) * ALIGNMENT
    return places


def head_bytes(file: PrerouterFile) -> int:
    """Memory that `Heads` of the file take, for a budget to count before they are loaded."""
    last = _places(file)[-1]
    return -(-(last.offset + last.n_bytes) // ALIGNMENT) * ALIGNMENT


class Heads:
    """The heads of a file that are used, with room for their numbers, which `load` brings; a context manager.

    `predicts` has the layer that each owner's head predicts. Raises BudgetError where the machine refuses the memory.
    """

    def __init__(self, library: Library, file: PrerouterFile) -> None:
        self.file = file
        self.predicts = file.info.predicts
        self.n_bytes = head_bytes(file)
        places = _places(file)
        self._memory = AlignedBuffer(self.n_bytes)
        self._buffer = Buffer(library, self._memory.address, self.n_bytes)
        self._context = Context(library, len(places))
        self._tensors: dict[tuple[int, str], Tensor] = {}
        self._arrays: dict[tuple[int, str], np.ndarray] = {}
        for place in places:
            tensor = self._context.tensor(place.type, *place.shape)
            self._buffer.place(tensor, place.offset)
            self._tensors[place.owner, place.part] = tensor
            part = self._memory.view[place.offset : place.offset + place.n_bytes]
            values = np.frombuffer(part, np.float32 if place.type == GgmlType.F32 else np.float16)
            self._arrays[place.owner, place.part] = values.reshape(place.shape[::-1])  # row-major: rows last to first

    @property
    def none(self) -> int:
        """The id that stands for no expert, where a token has executed fewer than others."""
        return self.file.info.n_expert

    def reads_before(self, owner: int) -> bool:
        """Whether the owner's head takes the experts executed in the layer before."""
        return (owner, "before") in self._tensors

    def load(self) -> None:
        """Read the numbers, a few MiB of other memory at a time. Raises InputError where one can't be used."""
        d, n = self.file.info.n_embd, self.file.info.n_expert
        for owner in self.predicts:
            arrays = {part: self._arrays[owner, part] for of, part in self._arrays if of == owner}
            fc1 = f"blk.{owner}.fc1.weight"
            for first, count in self.file.pieces(fc1):
                rows, at = self.file.rows(fc1, first, count), slice(first, first + count)
                arrays["fc1"][at] = rows[:, :d]
                arrays["here"][:n, at] = rows[:, d : d + n].T
                if "before" in arrays:
                    arrays["before"][:n, at] = rows[:, d + n :].T
            for part in ("fc2", "skip"):
                name = f"blk.{owner}.{part}.weight"
                for first, count in self.file.pieces(name):
                    arrays[part][first : first + count] = self.file.rows(name, first, count)
            arrays["fc1.bias"][:] = self._vector(owner, "fc1.bias")
            arrays["bias"][:] = self._vector(owner, "fc2.bias")
            if f"blk.{owner}.skip.bias" in self.file.tensors:
                arrays["bias"] += self._vector(owner, "skip.bias")

    def _vector(self, owner: int, part: str) -> np.ndarray:
        name = f"blk.{owner}.{part}"
        return self.file.rows(name, 0, self.file.tensors[name].shape[0])

    def logits(self, c: Context, owner: int, h: Tensor, here: Tensor, before: Tensor | None) -> Tensor:
        """What the owner's head says of the layer it predicts: logits [n_expert, n], F32, for that layer's own routing.

        `h` [n_embd, n] (F32) is what the owner's router reads. `here` and `before` [k, n] (I32) are the experts
        executed in the owner's layer and in the one before, each once, filled up with `none`; `before` is None unless
        `reads_before(owner)`. Other ids than 0 to `none` end the process: ggml checks them by an assertion. A token's
        logits have the same bits whatever tokens are beside it.
        """
        t = {part: tensor for (of, part), tensor in self._tensors.items() if of == owner}
        assert (before is not None) == ("before" in t), f"layer {owner}'s head and the layer before it"
        x = c.add(c.mul_mat(t["fc1"], h), t["fc1.bias"])
        x = _add_rows(c, x, t["here"], here)
        if before is not None:
            x = _add_rows(c, x, t["before"], before)
        y = c.add(c.mul_mat(t["fc2"], c.gelu_erf(x)), c.mul_mat(t["skip"], h))
        # float16 heads may sum up what is too large for that, and numbers that are none can't be sorted
        return c.clamp(c.add(y, t["bias"]), -MAX_LOGIT, MAX_LOGIT)

    def __enter__(self) -> Heads:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._arrays.clear()  # they hold views of the memory
        self._tensors.clear()
        self._context.close()
        self._buffer.close()
        self._memory.close()


def _add_rows(c: Context, x: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """`x` [hidden, n] plus the rows `ids` [k, n] of `table` [hidden, n_rows], in their order.

    One addition for each of k costs a microsecond; a product of all of it with ones and zeros reads n_rows / k times
    the memory, and ggml's sum over rows would want them turned round first, twenty times as slow.
    """
    k, n = ids.shape[:2]
    rows = c.get_rows(table, c.reshape(ids if ids.contiguous else c.cont(ids), k * n))  # [hidden, k × n]
    width, row = rows.shape[0], rows.strides[1]
    for i in range(k):
        x = c.add(x, c.view(rows, (width, n), (k * row,), i * row))
    return x
