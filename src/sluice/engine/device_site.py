"""A device's share of a model: its segments' weights, keys and values, workspace and graphs. It runs no steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sluice.config import format_size
from sluice.engine.division import last_layers, layers_of, wanted
from sluice.engine.pairs import PAIR_LIMIT, PairGraphs
from sluice.engine.segments import SegmentGraphs
from sluice.engine.weights import DeviceWeights
from sluice.engine.workspace import DeviceWorkspace, Workspace
from sluice.errors import BudgetError, GgmlError
from sluice.experts.policies import make_policy
from sluice.ggml import Context, Device, DeviceBackend, GgmlType, Graph, GraphAllocator
from sluice.gguf import GgufFile, TensorInfo
from sluice.io.files import ModelFiles
from sluice.models.blocks import Family
from sluice.models.kv_cache import KVCache, kv_bytes
from sluice.models.recurrent import RecurrentState, recurrent_bytes
from sluice.models.spec import ModelSpec
from sluice.store import ExpertStore
from sluice.vram import Bank, DevicePool, Group, Kind, fitted, kinds, slot_bytes

SCATTER_TENSORS = 6
KEPT_SCATTERS = 16


class Sizes(NamedTuple):
    """What the graphs of an engine are made for."""

    n_tokens: int
    n_ctx: int
    streams: int
    kv_types: tuple[GgmlType, GgmlType]
    lookahead: bool


@dataclass(frozen=True)
class Lack:
    """Segments that a device could not take, as it lacks `operation`."""

    segments: frozenset[int]
    operation: str


class DeviceSite:
    """`segments` of a model on `device`; a context manager.

    `n_bytes` is what it takes there, `lacks` what it can't run. Nothing is read into it before `load`, and
    there are no slots for experts before `make_pool`.
    """

    def __init__(
        self, device: Device, family_type: type[Family], spec: ModelSpec, dense: Sequence[TensorInfo], host: Workspace,
        sizes: Sizes, segments: Collection[int],
    ) -> None:  # fmt: skip
        self.device = device
        self.spec = spec
        self.sizes = sizes
        self.segment_numbers = frozenset(segments)
        self._stack = ExitStack()
        self._busy = False
        self._running: Context | None = None  # of what it computes, if nobody else keeps that
        self._scatters: OrderedDict[int, tuple[Context, Graph]] = OrderedDict()
        self.pool: DevicePool | None = None
        self.pairs: dict[int, list[PairGraphs]] = {}  # by layer, a bank's each
        enter = self._stack.enter_context
        try:
            self.backend = enter(DeviceBackend(device))
            self.weights = enter(DeviceWeights(device, wanted(dense, spec, segments)))
            self.family = family_type(spec, self.weights.tensors)
            layers = layers_of(spec, segments)
            library = device.library
            self.cache = enter(
                KVCache(library, spec, sizes.kv_types, sizes.n_ctx, sizes.streams, layers=layers, device=device)
            )
            self.states = enter(RecurrentState(library, spec, sizes.streams, layers=layers, device=device))
            self.workspace = enter(DeviceWorkspace(host, device, spec, PAIR_LIMIT))
            self.allocator = enter(GraphAllocator(self.backend))
            self.segments = enter(
                SegmentGraphs(
                    self.family, self.workspace, self.cache, self.states, self.allocator, lookahead=sizes.lookahead,
                    only=segments,
                )
            )  # fmt: skip
            self.lacks = self._lacks()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DeviceSite:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._drop()
        for context, _ in self._scatters.values():
            context.close()
        self._scatters.clear()
        self._stack.close()

    @property
    def moe_layers(self) -> list[int]:
        """The layers with experts whose routers are here: their experts may have slots here."""
        return self.segments.layers

    @property
    def n_bytes(self) -> int:
        held = self.weights.n_bytes + self.cache.n_bytes + self.states.n_bytes
        return held + self.workspace.n_bytes + self.allocator.n_bytes + (self.pool.n_bytes if self.pool else 0)

    def _lacks(self) -> Lack | None:
        """What of the segments the device can't run, and make room for the graphs if it can run all."""
        missing, operation = set(), ""
        for i, context, graph in self.segments.largest(self.sizes.n_tokens, self.sizes.n_ctx, self.sizes.streams):
            with context:
                if (lacking := self.device.unsupported(graph)) is not None:
                    missing.add(i)
                    operation = operation or lacking
                elif not missing:
                    self.allocator.reserve(graph)
        return Lack(frozenset(missing), operation) if missing else None

    # --- experts

    def reserve_pairs(self, parts: dict[Kind, list[int]], n_pairs: int) -> str | None:
        """Make room for graphs of pairs of each kind. The operation that the device lacks for them, if it lacks one."""
        with Context(self.device.library, 3 * max(1, len(parts))) as slots:
            for kind, layers in parts.items():
                graphs = PairGraphs(
                    self.family, self.workspace, Bank(slots, kind, 1), self.allocator, layers=layers[:1]
                )
                for n in (1, n_pairs):
                    for context, graph in graphs.largest(n):
                        with context:
                            if (lacking := self.device.unsupported(graph)) is not None:
                                return lacking
                            self.allocator.reserve(graph)
        return None

    def group(self, layer: int) -> Group | None:
        """The slots that experts of `layer` may lie in; None if there are none."""
        return None if self.pool is None else self.pool.group(layer)

    def slots_in(self, parts: dict[Kind, list[int]], room: int) -> dict[Kind, int]:
        """How many slots for experts of each kind `room` bytes hold."""
        return fitted(room, {kind: slot_bytes(self.device, kind) for kind in parts}, parts, self.spec.n_expert)

    def make_pool(
        self, store: ExpertStore, parts: dict[Kind, list[int]], room: int, policy: str
    ) -> None:  # fmt: skip
        """Slots for experts of the layers `parts`, for whose pairs room was made, in `room` bytes."""
        spec = self.spec
        slots = self.slots_in(parts, room)
        policies = {kind: make_policy(policy, n_slots=max(1, n), n_layers=spec.n_layers) for kind, n in slots.items()}
        self.pool = self._stack.enter_context(DevicePool(self.device, slots, parts, store, policies))
        for group in self.pool.groups:
            graphs = [
                self._stack.enter_context(
                    PairGraphs(self.family, self.workspace, bank, self.allocator, layers=group.layers)
                )
                for bank in group.banks
            ]
            self.pairs.update(dict.fromkeys(group.layers, graphs))

    def load(self, files: ModelFiles) -> None:
        self.weights.load(files)

    # --- work

    @property
    def busy(self) -> bool:
        """It was given something to do, and hasn't been waited for since."""
        return self._busy

    def start(self, graph: Graph, context: Context | None = None) -> None:
        """Have the device run `graph` while the host goes on. `context`, that of a graph for once, is closed after."""
        self.wait()
        self._busy, self._running = True, context
        self.backend.start(graph)

    def wait(self) -> None:
        """Until it has done what it was given."""
        if self._busy:
            self._busy = False
            try:
                self.backend.wait()
            finally:
                self._drop()

    def _drop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def compute(self, graph: Graph) -> None:
        self.start(graph)
        self.wait()

    def put(self, name: str, n: int, start: int = 0) -> None:
        """Bring columns of a tensor of the host's workspace here, once nothing here reads the old ones."""
        self.wait()
        self.workspace.put(name, n, start)

    def get(self, name: str, n: int, start: int = 0) -> None:
        self.wait()
        self.workspace.get(name, n, start)

    def scatter(self, outputs: np.ndarray, rows: np.ndarray) -> None:
        """Write pairs' `outputs` [n, n_embd], computed on the host, to the `rows` of all pairs here."""
        for at in range(0, len(rows), PAIR_LIMIT):
            some = rows[at : at + PAIR_LIMIT]
            self.wait()
            self.workspace.pack(np.ascontiguousarray(outputs[some]), some)
            self.start(self._scatter(len(some)))

    def _scatter(self, n: int) -> Graph:
        kept = self._scatters
        if n not in kept:
            if len(kept) >= KEPT_SCATTERS:
                kept.popitem(last=False)[1][0].close()
            ws, c = self.workspace, Context(self.device.library, SCATTER_TENSORS, n_graphs=1)
            graph = c.graph()
            packed = c.view(ws.packed, (self.spec.n_embd, n))
            graph.add(c.set_rows(ws.pairs, packed, c.view(ws.packed_rows, (n,))))
            kept[n] = self.allocator.placed(c, graph)
        kept.move_to_end(n)
        return kept[n][1]


def open_site(
    device: Device, file: GgufFile, family_type: type[Family], spec: ModelSpec, dense: Sequence[TensorInfo],
    host: Workspace, sizes: Sizes, *, gpu_layers: int | None, cpu_moe_layers: int, vram: int, n_pairs: int,
    note: list[str],
) -> tuple[DeviceSite, dict[Kind, list[int]]] | None:  # fmt: skip
    """The share of a model that `vram` bytes hold, of at most `gpu_layers` layers; and the kinds of its experts.

    The first `cpu_moe_layers` layers' experts get no slots there. None where not one layer fits or can be run;
    `note` gets a line for what is left to the processor and why. Raises BudgetError if `gpu_layers` are given and
    don't fit all, GgmlError where not even one can be set up.
    """
    most = spec.n_layers if gpu_layers is None else min(gpu_layers, spec.n_layers)
    lacking: set[int] = set()
    n = most
    while n > 0:
        if not (segments := last_layers(spec, n) - lacking):
            return None  # a note has said why
        if _least_bytes(device, spec, dense, host, sizes, segments) <= vram:
            with ExitStack() as undo:
                try:
                    site = undo.enter_context(
                        DeviceSite(device, family_type, spec, dense, host, sizes, segments)
                    )  # fmt: skip
                    if site.lacks is not None:
                        lacking |= site.lacks.segments
                        note.append(
                            f"{device.name} lacks {site.lacks.operation}: {len(site.lacks.segments)} of "
                            f"{len(spec.moe_layers) + 1} parts of the model stay on the processor"
                        )
                        continue
                    own = {layer: found for layer in site.moe_layers if (found := file.expert_parts(layer)) is not None}
                    parts = kinds(own, [layer for layer in own if layer >= cpu_moe_layers])
                    if (operation := site.reserve_pairs(parts, n_pairs)) is not None:
                        note.append(f"{device.name} lacks {operation} for experts: they stay on the processor")
                        parts = {}
                    if site.n_bytes <= vram:
                        undo.pop_all()
                        return site, parts
                except GgmlError:
                    if n == 1:
                        raise
        if gpu_layers:
            raise BudgetError(
                f"--vram {format_size(vram)} can't hold the last {n} layers' attention and keys on {device.name}: "
                f"give fewer --gpu-layers or leave them out, or raise --vram or lower --ctx"
            )
        n -= 1
    note.append(f"{device.name} takes no layer in {format_size(vram)}: all is computed on the processor")
    return None


def _least_bytes(
    device: Device, spec: ModelSpec, dense: Sequence[TensorInfo], host: Workspace, sizes: Sizes,
    segments: Collection[int],
) -> int:  # fmt: skip
    """What a site of `segments` takes at least: what is not even tried, so that nothing is taken beyond a budget."""
    layers = layers_of(spec, segments)
    keys = kv_bytes(spec, device.library, sizes.kv_types, sizes.n_ctx, sizes.streams, layers)
    weights = sum(info.n_bytes for info in wanted(dense, spec, segments))
    return weights + keys + recurrent_bytes(spec, sizes.streams, layers)
