"""Builds the graphs that run experts on tokens, each (token, expert) pair into a row of its own; knows slots by number.

What was resident, and in which order experts arrived, changes how pairs are grouped, never what a pair's row holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from sluice.engine.workspace import WorkspaceTensors, elements
from sluice.ggml import Context, Graph, GraphAllocator, Tensor
from sluice.models.blocks import Family
from sluice.models.spec import ModelSpec

PAIR_LIMIT = 1024  # pairs of one graph: bounds its scratch memory
ROW_MAP_ENTRY = 8  # ggml's mul_mat_id keeps a table of slots × pairs × 8 bytes ...
ROW_MAP_BYTES = 32 << 20  # ... which may take this much
PAIR_TENSORS = 48  # more than a pair graph has
KEPT_GRAPHS = 1024
KEPT_PAIRS = 256  # larger graphs are prompt chunks', which rarely come again


def scratch_bytes(spec: ModelSpec, n_pairs: int, rank: int = 0) -> int:
    """An upper bound of the scratch memory that a graph of `n_pairs` pairs takes; `rank`: the highest of updates."""
    more = int(spec.expert_biases) + 2 * bool(rank)
    return n_pairs * 4 * ((2 + more) * spec.n_embd + (3 + 2 * more) * spec.n_ff_expert + 3 * rank) + (1 << 16)


class Slots(Protocol):
    """Slots that experts lie in, which an ExpertStore has, and a device's bank."""

    @property
    def n_slots(self) -> int: ...

    def matrices(self, c: Context, layer: int, first: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slots [first, first + n) as `layer`'s gate, up and down matrices: [n_in, n_out, n] each."""
        ...


class PairGraphs:
    """Builds, keeps and frees pair graphs over one workspace, store and allocator; a context manager.

    `layers` are those that `store` has slots for, where it hasn't for all. `low_rank` are updates of experts' matrices,
    by layer and role (see `sluice.routing.lora.LoraWeights`).
    """

    def __init__(
        self, family: Family, workspace: WorkspaceTensors, store: Slots, allocator: GraphAllocator,
        low_rank: Mapping[tuple[int, str], tuple[Tensor, Tensor]] | None = None, layers: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.family = family
        self.workspace = workspace
        self.store = store
        self.allocator = allocator
        self.low_rank = low_rank or {}
        self.layers = family.spec.moe_layers if layers is None else layers
        self._kept: OrderedDict[tuple[int, int], tuple[Context, Graph]] = OrderedDict()
        self._single: dict[tuple[int, int], tuple[Context, Graph]] = {}  # parts of joined graphs: freed by `close` only
        self._generation = allocator.generation

    def __enter__(self) -> PairGraphs:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for kept in (self._kept, self._single):
            for context, _ in kept.values():
                context.close()
            kept.clear()

    def reserve(self, n_pairs: int) -> None:
        """Make the allocator large enough for graphs of up to `n_pairs` pairs."""
        for context, graph in self.largest(n_pairs):
            with context:
                self.allocator.reserve(graph)

    def largest(self, n_pairs: int) -> Iterator[tuple[Context, Graph]]:
        """A graph of `n_pairs` pairs of each layer; the caller closes its context."""
        for layer in self.layers:
            yield self._build(layer, n_pairs, 0, self.store.n_slots)

    def single(self, layer: int, n: int) -> Graph:
        """A graph of `n` pairs of `layer`, all of one token; its inputs are pair_slots, pair_rows, with biases
        pair_experts, top_k of each for every layer with experts. It lives until the allocator's memory moves."""
        self._check_generation()
        found = self._single.get((layer, n))
        if found is None:
            found = self._single[layer, n] = self.once(layer, n, 0, self.store.n_slots, single=True)
        return found[1]

    def kept(self, layer: int, n: int) -> Graph:
        """A graph of `n` pairs of `layer`, whose tokens are one more input: pair_tokens."""
        self._check_generation()
        key = (layer, n)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self.once(layer, n, 0, self.store.n_slots)
            if len(self._kept) > KEPT_GRAPHS:
                self._kept.popitem(last=False)[1][0].close()
        else:
            self._kept.move_to_end(key)
        return found[1]

    def _check_generation(self) -> None:
        if self._generation != self.allocator.generation:
            self.close()
            self._generation = self.allocator.generation

    def once(self, layer: int, n: int, first: int, n_slots: int, *, single: bool = False) -> tuple[Context, Graph]:
        """The same for `n_slots` slots from `first`, which pair_slots count from; the caller closes its context."""
        return self.allocator.placed(*self._build(layer, n, first, n_slots, single=single))

    def _build(self, layer: int, n: int, first: int, n_slots: int, *, single: bool = False) -> tuple[Context, Graph]:
        c = Context(self.allocator.library, PAIR_TENSORS, n_graphs=1)
        try:
            graph = c.graph()
            self._append(c, graph, layer, n, single, first, n_slots)
            return c, graph
        except BaseException:
            c.close()
            raise

    def _append(self, c: Context, graph: Graph, layer: int, n: int, single: bool, first: int, n_slots: int) -> None:
        ws, spec, weights = self.workspace, self.family.spec, self.family.weights
        gate, up, down = self.store.matrices(c, layer, first, n_slots)
        place = (n, 1) if single else (1, n)
        at = ws.listed_at(spec, layer) if single else 0
        ids = c.view(ws.pair_slots, place, (), 4 * at)
        if single:
            x = c.view(ws.normed, (spec.n_embd, 1, 1))
        else:
            x = c.reshape(c.get_rows(ws.normed, elements(c, ws.pair_tokens, n)), spec.n_embd, 1, n)

        def times(matrix: Tensor, role: str, x: Tensor) -> Tensor:
            y = c.mul_mat_id(matrix, x, ids)
            low_rank = self.low_rank.get((layer, role))
            if low_rank is None and not spec.expert_biases:
                return y
            experts = c.view(ws.pair_experts, place, (), 4 * at)
            if low_rank is not None:
                a, b = low_rank
                y = c.add(y, c.mul_mat_id(b, c.mul_mat_id(a, x, experts), experts))
            if not spec.expert_biases:
                return y
            return c.add_id(y, weights[f"blk.{layer}.ffn_{role}_exps.bias"], experts)

        inner = self.family.activation(c, times(gate, "gate", x), times(up, "up", x))
        out = c.reshape(times(down, "down", inner), spec.n_embd, n)
        graph.add(c.set_rows(ws.pairs, out, c.view(ws.pair_rows, (n,), (), 8 * at)))
