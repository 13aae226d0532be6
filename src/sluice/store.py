"""The slot pool: carries out the cache's reads through a Reader and says where experts lie; knows no graphs or tokens.

One page-aligned block of memory, cut into slots of one stride, serves all layers. ggml tensors of every quantisation
are laid over the same bytes; a layer's matrices are strided views [n_in, n_out, n_slots] of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from sluice.errors import ReadError
from sluice.experts.cache import Acquired, ExpertCache
from sluice.experts.policies import Policy
from sluice.ggml import Buffer, Context, GgmlType, Library, Tensor
from sluice.ggml.tensor import row_bytes
from sluice.gguf import ExpertPart, GgufFile
from sluice.io.aligned import AlignedBuffer
from sluice.io.files import ModelFiles
from sluice.io.reader import Reader
from sluice.types import ExpertKey, Read, Segment

SLOT_ALIGNMENT = 4096
PRELOAD_DEPTH = 256  # reads queued at once: enough for any reader, few enough to end soon after Ctrl-C

ReaderFactory = Callable[[ModelFiles, memoryview, Callable[[Read], Sequence[Segment]]], Reader]


class PartPlace(NamedTuple):
    """Where a matrix lies in a slot: its bytes start at `offset` of the slot."""

    offset: int
    part: ExpertPart


class Run(NamedTuple):
    """Matrices that one read brings. Expert e: [offset + e × stride, … + n_bytes) of `file`, to `dest` in the slot."""

    file: int
    offset: int
    stride: int
    n_bytes: int
    dest: int


@dataclass(frozen=True)
class SlotLayout:
    """How every layer's expert fills a slot, so that aligned reads land in place without a copy.

    A run starts as far into a block of the slot as it does into a block of the file, with the rest of its first and
    last block left free around it. `stride` is the bytes from slot to slot. `in_place`: every expert's size is a whole
    number of blocks, so that all of them do land in place.
    """

    stride: int
    places: dict[int, tuple[PartPlace, ...]]
    runs: dict[int, tuple[Run, ...]]
    in_place: bool

    @classmethod
    def of(cls, parts: dict[int, tuple[ExpertPart, ...]], blocks: Sequence[int]) -> SlotLayout:
        """`parts` by layer; `blocks[file]` is the alignment that direct reads of the file need, bytes."""
        places, runs, stride = {}, {}, 0
        for layer, of_layer in parts.items():
            at, own_places, own_runs = 0, [], []
            for group in _adjacent(of_layer, blocks):
                first, last = group[0], group[-1]
                block = max(blocks[first.file], 32)
                dest = at + first.offset % block
                n_bytes = last.offset + last.n_bytes - first.offset
                own_runs.append(Run(first.file, first.offset, first.stride, n_bytes, dest))
                own_places += [PartPlace(dest + part.offset - first.offset, part) for part in group]
                # experts whose size is no multiple of the block start anywhere in one: they go through a bounce buffer
                at = -(-(dest + n_bytes) // block) * block
            places[layer], runs[layer] = tuple(own_places), tuple(own_runs)
            stride = max(stride, at)
        in_place = all(run.stride % blocks[run.file] == 0 for of_layer in runs.values() for run in of_layer)
        return cls(-(-stride // SLOT_ALIGNMENT) * SLOT_ALIGNMENT, places, runs, in_place)


def _adjacent(parts: Sequence[ExpertPart], blocks: Sequence[int]) -> list[list[ExpertPart]]:
    """Group parts that follow each other in the file with less than a block between them."""
    groups: list[list[ExpertPart]] = []
    for part in parts:
        if groups:
            last = groups[-1][-1]
            gap = part.offset - last.offset - last.n_bytes
            inside = part.offset + part.n_bytes - groups[-1][0].offset <= part.stride
            if part.file == last.file and part.stride == last.stride and 0 <= gap < 4096 and inside:
                groups[-1].append(part)
                continue
        groups.append([part])
    return groups


def expert_layout(file: GgufFile, layers: Sequence[int], blocks: Sequence[int]) -> SlotLayout:
    """The layout of a model's slots."""
    parts = {layer: file.expert_parts(layer) for layer in layers}
    return SlotLayout.of({layer: p for layer, p in parts.items() if p is not None}, blocks)


class ExpertStore:
    """A pool of `n_slots` slots, its cache and its reader; a context manager, used by one thread.

    `poison` fills the pool with 0xFF bytes (NaN in every float), so that a test sees any use of what was never read.
    """

    def __init__(
        self, library: Library, files: ModelFiles, layout: SlotLayout, n_slots: int, policy: Policy,
        make_reader: ReaderFactory, *, reserve: int = 0, poison: bool = False,
    ) -> None:  # fmt: skip
        self.library = library
        self.layout = layout
        self.n_slots = n_slots
        self.cache = ExpertCache(n_slots, policy, reserve=reserve)
        self.listener: Callable[[Sequence[ExpertKey]], None] | None = None  # told of demands before they are met
        self._runs = layout.runs
        self._stride = layout.stride
        n_bytes = n_slots * layout.stride + SLOT_ALIGNMENT
        self._memory = AlignedBuffer(n_bytes)
        if poison:
            self._memory.view[:] = b"\xff" * n_bytes
        self._buffer = Buffer(library, self._memory.address, n_bytes)
        types = {place.part.type for places in layout.places.values() for place in places}
        self._context = Context(library, len(types) + 1)
        self._over: dict[GgmlType, Tensor] = {}
        for type in sorted(types):
            elements = n_bytes // library.ggml_type_size(type) * library.ggml_blck_size(type)
            self._over[type] = self._context.tensor(type, elements)
            self._buffer.place(self._over[type], 0)
        self.reader = make_reader(files, self._memory.view, self.segments)

    def __enter__(self) -> ExpertStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pool_bytes(self) -> int:
        return self.n_slots * self.layout.stride

    def expert_bytes(self, layer: int) -> int:
        """Bytes that one expert of a layer is read in."""
        return sum(run.n_bytes for run in self._runs[layer])

    def slot_view(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        return self._memory.view[slot * self._stride : (slot + 1) * self._stride]

    def filled(self, read: Read | None, data: bytes) -> bool:
        """Carry out a read by copying `data`, the bytes of a slot. False where there is none."""
        if read is None:
            return False
        self.slot_view(read.slot)[:] = data
        self.cache.complete(read)
        return True

    def segments(self, read: Read) -> list[Segment]:
        """The byte ranges of an expert and where in the pool they go."""
        layer, expert = read.key
        at = read.slot * self._stride
        return [
            Segment(file, offset + expert * stride, n_bytes, at + dest)
            for file, offset, stride, n_bytes, dest in self._runs[layer]
        ]

    def matrices(self, c: Context, layer: int, first: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of slots [first, first + n) as `layer`'s gate, up and down matrices: [n_in, n_out, n] each."""
        views = []
        for offset, part in self.layout.places[layer]:
            row = row_bytes(self.library, part.type, part.n_in)
            at = first * self._stride + offset
            views.append(c.view(self._over[part.type], (part.n_in, part.n_out, n), (row, self._stride), at))
        return views[0], views[1], views[2]

    def acquire(self, keys: Sequence[ExpertKey], tick: int, *, scan: bool = False) -> Acquired:
        """Pin `keys` and start the reads they need. What `waiting` names arrives through `arrived`."""
        if self.listener is not None:
            self.listener(keys)
        acquired = self.cache.acquire(keys, tick, scan=scan)
        for read in acquired.promote:
            self.reader.promote(read, tick)
        for read in acquired.submit:
            self.reader.submit(read)
        return acquired

    def preload(self, keys: Sequence[ExpertKey], progress: Callable[[int, int], None] | None = None) -> int:
        """Read the absent ones of `keys` into free slots, in the order of the disk; the bytes that were read.

        `progress(done, total)` is called in bytes, also before the first read. Raises ReadError if one can't be read;
        whatever it raises, no read is outstanding then.
        """
        reads = sorted(self.cache.preload(keys), key=lambda read: self.segments(read)[0][:2])  # by file and offset
        total = sum(self.expert_bytes(read.key.layer) for read in reads)
        done, waiting, n_begun, n_ended = 0, iter(reads), 0, 0
        try:
            while n_ended < len(reads):
                if progress is not None:
                    progress(done, total)
                for read in islice(waiting, n_ended + PRELOAD_DEPTH - n_begun):
                    self.reader.submit(read)
                    n_begun += 1
                for read, error in self.reader.completions(block=True):
                    if error is not None:
                        raise _as_read_error(error)
                    self.cache.complete(read)
                    n_ended += 1
                    done += self.expert_bytes(read.key.layer)
        except BaseException:
            self.abort()
            raise
        if progress is not None:
            progress(done, total)
        return done

    def prefetch(self, keys: Sequence[ExpertKey], deadline: int, *, binding: bool = False) -> int:
        """Start reading what is absent of `keys`, ranked; the number of reads begun."""
        reads = self.cache.prefetch(keys, deadline, binding=binding)
        for read in reads:
            self.reader.submit(read)
        return len(reads)

    def expire(self, tick: int) -> None:
        """Give up prefetches that were due before `tick` and have not begun."""
        for read in self.cache.expire(tick):
            if self.reader.cancel(read):
                self.cache.drop(read)

    def arrived(self, *, block: bool) -> list[ExpertKey]:
        """Experts whose reads have ended since the last call; with `block`, at least one unless none is outstanding.

        Raises ReadError if a demanded expert could not be read.
        """
        keys, failed = [], None
        for read, error in self.reader.completions(block):
            if error is None:
                self.cache.complete(read)
                keys.append(read.key)
            elif self.cache.fail(read):
                failed = failed or error
        if failed is not None:
            raise _as_read_error(failed)
        return keys

    def release(self, keys: Sequence[ExpertKey]) -> None:
        self.cache.release(keys)

    def abort(self) -> None:
        """After a step was broken off: wait until no read is outstanding, then forget its pins and half-read slots."""
        for read in self.cache.reads_in_flight():
            self.reader.cancel(read)
        while completions := self.reader.completions(block=True):
            for read, error in completions:
                if error is None:
                    self.cache.complete(read)
                else:
                    self.cache.fail(read)
        self.cache.reset_inflight()

    def close(self) -> None:
        self.reader.close()
        self._context.close()
        self._buffer.close()
        self._memory.close()


def _as_read_error(error: Exception) -> ReadError:
    """What a read ended with, as the engine raises it."""
    if isinstance(error, ReadError):
        return error
    named = ReadError(f"reading an expert failed ({error}): check the model file and its disk")
    named.__cause__ = error
    return named
