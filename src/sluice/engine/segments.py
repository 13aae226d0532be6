"""Builds the graphs between experts and keeps those that are used again; knows batches' shapes, not what is resident.

A step is cut where Python must look at a router's choice: segment i ends with the router of the i-th layer that has
experts and begins by adding up the expert outputs of the one before; the last segment ends with the logits. Between
two segments the experts run (see pairs.py).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from sluice.engine.pairs import PAIR_TENSORS, PairGraphs
from sluice.engine.workspace import LOOKAHEAD, Workspace, columns, elements
from sluice.ggml import Context, Graph, GraphAllocator, Tensor
from sluice.models.blocks import AttentionInputs, Family, Segment, combine
from sluice.models.kv_cache import KVCache, padded
from sluice.models.spec import ModelSpec

KEPT_SHAPES = 4  # batch shapes whose graphs are kept for reuse


class Columns(NamedTuple):
    """Columns of a step that one stream owns, and the padded length its attention spans."""

    stream: int
    n: int
    n_kv: int


class BatchShape(NamedTuple):
    """All that a step's graphs depend on. `n_outputs`: columns that logits are wanted of, 0 for none."""

    columns: tuple[Columns, ...]
    n_outputs: int

    @property
    def n_tokens(self) -> int:
        return sum(c.n for c in self.columns)

    def n_wanted(self, layer: int, spec: ModelSpec, room: int) -> int:
        """Columns whose experts `layer` must run: in the last layer only those that logits are wanted of.

        With more outputs than the workspace has `room` for, all columns.
        """
        last = layer == spec.n_layers - 1
        return self.n_outputs if last and self.n_outputs <= room else self.n_tokens


class _Built:
    """Graphs and the contexts that own them."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []
        self.graphs: list[Graph] = []
        self.joined: dict[tuple[int, int], Graph] = {}

    def close(self) -> None:
        for context in self.contexts:
            context.close()
        self.contexts.clear()


class SegmentGraphs:
    """Builds, keeps and frees graphs over one workspace and allocator; a context manager.

    `lookahead` adds the routers of the layers ahead on this layer's residual, for prefetching.
    """

    def __init__(
        self, family: Family, workspace: Workspace, cache: KVCache, allocator: GraphAllocator, *, lookahead: bool
    ) -> None:
        self.family = family
        self.spec = family.spec
        self.workspace = workspace
        self.cache = cache
        self.library = allocator.library
        self.allocator = allocator
        self.lookahead = lookahead
        self._shapes: OrderedDict[BatchShape, _Built] = OrderedDict()

    def __enter__(self) -> SegmentGraphs:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for built in self._shapes.values():
            built.close()
        self._shapes.clear()

    # --- segments

    def of(self, shape: BatchShape) -> list[Graph]:
        """The segments' graphs, one more than there are layers with experts."""
        built = self._shapes.get(shape)
        if built is None:
            built = _Built()
            try:
                for i in range(len(self.spec.moe_layers) + 1):
                    context, graph = self._segment(shape, i)
                    built.contexts.append(context)
                    built.graphs.append(graph)
                self._make_room(built.graphs, shape)
                for graph in built.graphs:
                    self.allocator.place(graph)
            except BaseException:
                built.close()
                raise
            self._shapes[shape] = built
            if len(self._shapes) > KEPT_SHAPES:
                self._shapes.popitem(last=False)[1].close()
        self._shapes.move_to_end(shape)
        return built.graphs

    def joined(self, shape: BatchShape, i: int, n: int, pairs: PairGraphs) -> Graph:
        """Segment `i` of a single token, with the last `n` pairs of the layer before it in the same graph.

        Saves a launch, and with it the waking of the other threads. Call `of` for the shape first.
        """
        built = self._shapes[shape]
        graph = built.joined.get((i, n))
        if graph is None:
            context, graph = self.allocator.placed(*self._segment(shape, i, n, pairs))
            built.contexts.append(context)
            built.joined[i, n] = graph
        return graph

    def _segment(
        self, shape: BatchShape, i: int, n_pairs: int = 0, pairs: PairGraphs | None = None
    ) -> tuple[Context, Graph]:
        spec, family, ws, n = self.spec, self.family, self.workspace, shape.n_tokens
        moe = spec.moe_layers
        last = i == len(moe)
        first_layer = moe[i - 1] + 1 if i else 0
        layers = range(first_layer, spec.n_layers if last else moe[i] + 1)
        n_tensors = 64 + (40 + 20 * len(shape.columns)) * max(1, len(layers)) + 2 * spec.top_k
        c = Context(self.library, n_tensors + PAIR_TENSORS * bool(n_pairs), n_graphs=1)
        try:
            graph = c.graph()
            if pairs is not None:
                pairs.append(c, graph, moe[i - 1], n_pairs, True, 0, pairs.store.n_slots)
            if i == 0:
                x = family.embed(c, elements(c, ws.tokens, n))
            else:
                m = max(1, shape.n_wanted(moe[i - 1], spec, ws.n_outputs))
                weights = family.routing_weights(c, columns(c, ws.scores, m), columns(c, ws.routed, m))
                outputs = c.view(ws.pairs, (spec.n_embd, spec.top_k, m))
                x = combine(c, columns(c, ws.residual, m), outputs, weights)
            inputs = self._attention_inputs(c, graph, shape)
            for layer in layers:
                x = family.attention(c, layer, x, inputs)
                if last or layer != moe[i]:
                    x = family.dense_ffn(c, layer, x)
            if last:
                self._head(c, graph, x, shape)
            elif (wanted := shape.n_wanted(moe[i], spec, ws.n_outputs)) == 0:
                graph.add(x)
            else:
                self._router(c, graph, self._outputs(c, x, wanted), i, wanted)
            return c, graph
        except BaseException:
            c.close()
            raise

    def _attention_inputs(self, c: Context, graph: Graph, shape: BatchShape) -> AttentionInputs:
        ws, n = self.workspace, shape.n_tokens
        segments, start, mask_at = [], 0, 0
        for column in shape.columns:
            mask = c.view(ws.mask, (column.n_kv, column.n), (), mask_at)
            segments.append(Segment(start, column.n, column.stream, column.n_kv, mask))
            start += column.n
            mask_at += 2 * column.n_kv * column.n
        return AttentionInputs(
            graph, self.cache, elements(c, ws.positions, n), elements(c, ws.rows, n), tuple(segments), ws.attention
        )

    def _router(self, c: Context, graph: Graph, x: Tensor, i: int, n: int) -> None:
        """The end of a segment: what experts read, whom the router chose, and whom the next ones would choose."""
        family, ws, moe, k = self.family, self.workspace, self.spec.moe_layers, self.spec.top_k
        normed = family.expert_input(c, moe[i], x)
        scores, ids = family.select(c, family.router(c, moe[i], normed), k)
        graph.add(
            c.cpy(normed, columns(c, ws.normed, n)),
            c.cpy(scores, columns(c, ws.scores, n)),
            c.cpy(ids, columns(c, ws.selected, n)),
        )
        for d, layer in enumerate(moe[i + 1 : i + 1 + LOOKAHEAD] if self.lookahead else ()):
            guess = family.router(c, layer, family.expert_input(c, layer, x))
            block = d * ws.n_tokens * ws.predicted.strides[1]
            graph.add(c.cpy(family.select(c, guess, k)[1], c.view(ws.predicted, (k, n), (), block)))
        graph.add(c.cpy(x, columns(c, ws.residual, n)))

    def _head(self, c: Context, graph: Graph, x: Tensor, shape: BatchShape) -> None:
        ws, n_outputs = self.workspace, shape.n_outputs
        if n_outputs == 0:
            graph.add(x)
            return
        if n_outputs > ws.n_outputs:  # logits of a whole chunk: left in the residual, taken in blocks by `head`
            graph.add(c.cpy(x, columns(c, ws.residual, shape.n_tokens)))
            return
        x = self._outputs(c, x, n_outputs)
        graph.add(c.cpy(self.family.head(c, x), columns(c, ws.logits, n_outputs)))

    def _outputs(self, c: Context, x: Tensor, n: int) -> Tensor:
        """The `n` columns of `x` that logits are wanted of (all of them when there are no others)."""
        return x if x.shape[1] == n else c.get_rows(x, elements(c, self.workspace.outputs, n))

    def head(self, start: int, n: int, *, place: bool = True) -> tuple[Context, Graph]:
        """A graph of the logits of residual columns [start, start + n); the caller closes its context."""
        ws = self.workspace
        c = Context(self.library, 16, n_graphs=1)
        graph = c.graph()
        x = c.view(ws.residual, (self.spec.n_embd, n), (), start * ws.residual.strides[1])
        graph.add(c.cpy(self.family.head(c, x), columns(c, ws.logits, n)))
        return self.allocator.placed(c, graph) if place else (c, graph)

    # --- reserving

    def _make_room(self, graphs: list[Graph], shape: BatchShape) -> None:
        """Grow the scratch memory for a shape that `reserve` did not foresee: several streams' prompts in one step."""
        if len(shape.columns) == 1 or shape.n_tokens == len(shape.columns):
            return
        before = self.allocator.generation
        for graph in graphs:
            self.allocator.reserve(graph)
        if self.allocator.generation != before:
            for built in self._shapes.values():
                built.close()
            self._shapes.clear()

    def reserve(self, n_tokens: int, n_ctx: int, n_streams: int) -> None:
        """Make the allocator large enough for every graph of up to `n_tokens` prompt tokens or `n_streams` streams."""
        n_kv = padded(n_ctx)
        shapes = [BatchShape((Columns(0, n_tokens, n_kv),), 1)]
        shapes.append(BatchShape(tuple(Columns(s, 1, n_kv) for s in range(n_streams)), n_streams))
        shapes.append(BatchShape(tuple(Columns(s, n_tokens // n_streams, n_kv) for s in range(n_streams)), n_streams))
        for shape in shapes:
            for i in range(len(self.spec.moe_layers) + 1):
                context, graph = self._segment(shape, i)
                with context:
                    self.allocator.reserve(graph)
        context, graph = self.head(0, self.workspace.n_outputs, place=False)
        with context:
            self.allocator.reserve(graph)
