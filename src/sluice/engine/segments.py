"""Builds the graphs between experts and keeps those that are used again; knows batches' shapes, not what is resident.

A step is cut where Python must look at a router's choice: segment i ends with the router of the i-th layer that has
experts and begins by adding up the expert outputs of the one before; the last segment ends with the logits. Between
two segments the experts run (see pairs.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from sluice.engine.workspace import LOOKAHEAD, WorkspaceTensors, block, columns, elements, near_reach
from sluice.ggml import Context, Graph, GraphAllocator, Tensor, chained
from sluice.models.blocks import AttentionInputs, Family, Reach, Segment, weighted_sum
from sluice.models.kv_cache import KVCache, padded
from sluice.models.recurrent import RecurrentState
from sluice.models.spec import ModelSpec

KEPT_SHAPES = 4  # batch shapes whose graphs are kept for reuse
KEPT_NODES = 1 << 18  # that all joined graphs may have room for, at some 50 bytes each
SHARED_TENSORS = 40  # more than a graph of shared experts has
# More than a layer has, and more than it has beside these of each stream, without states and with them
LAYER_TENSORS, STREAM_TENSORS, STATE_TENSORS = 112, 32, 64


class Columns(NamedTuple):
    """Columns of a step that one stream owns, and the padded length its attention spans.

    Layers with a window span the positions [near, n_kv).
    """

    stream: int
    n: int
    n_kv: int
    near: int = 0


class BatchShape(NamedTuple):
    """All that a step's graphs depend on. `n_outputs`: columns that logits are wanted of, 0 for none. `ahead`: routes
    may be known ahead, so that each layer's have a place of their own."""

    columns: tuple[Columns, ...]
    n_outputs: int
    ahead: bool = False

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
        self.graphs: dict[int, Graph] = {}  # by segment
        self.bare: dict[int, Graph] = {}
        self.joined: OrderedDict[tuple[int, ...], tuple[Context, Graph]] = OrderedDict()
        self.joined_nodes = 0  # that those have room for

    def close(self) -> None:
        for context, _ in self.joined.values():
            context.close()
        self.joined.clear()
        for context in self.contexts:
            context.close()
        self.contexts.clear()


class SegmentGraphs:
    """Builds, keeps and frees graphs over one workspace and allocator; a context manager.

    `lookahead` adds the routers of the layers ahead on this layer's residual, for prefetching. Where routes are known
    ahead, it leaves out the layers `predicted`, whose routing weights are made of `executed_scores` if they are
    `scored`. Of a model that is divided over devices it makes the segments `only`, and looks ahead to their layers.
    """

    def __init__(
        self, family: Family, workspace: WorkspaceTensors, cache: KVCache, states: RecurrentState,
        allocator: GraphAllocator, *, lookahead: bool, only: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        self.family = family
        self.spec = family.spec
        self.workspace = workspace
        self.cache = cache
        self.states = states
        self.library = allocator.library
        self.allocator = allocator
        self.lookahead = lookahead
        self.only = sorted(range(len(self.spec.moe_layers) + 1) if only is None else only)
        self.layers = [
            layer for i, layer in enumerate(self.spec.moe_layers) if i in self.only
        ]  # whose routers are here
        self.predicted: frozenset[int] = frozenset()
        self.scored = False
        self._shapes: OrderedDict[BatchShape, _Built] = OrderedDict()
        self._shared: OrderedDict[tuple[int, int], tuple[Context, Graph]] = OrderedDict()
        self._shared_single: dict[tuple[int, int], tuple[Context, Graph]] = {}  # of one token: parts of joined graphs

    def __enter__(self) -> SegmentGraphs:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for built in self._shapes.values():
            built.close()
        self._shapes.clear()
        for kept in (self._shared, self._shared_single):
            for context, _ in kept.values():
                context.close()
            kept.clear()

    # --- segments

    def of(self, shape: BatchShape) -> dict[int, Graph]:
        """The segments' graphs by number: one more than there are layers with experts, or those that are made here."""
        built = self._shapes.get(shape)
        if built is None:
            built = _Built()
            try:
                for i in self.only:
                    context, built.graphs[i] = self._segment(shape, i)
                    built.contexts.append(context)
                self._make_room(built.graphs.values(), shape)
                for graph in built.graphs.values():
                    self.allocator.place(graph)
            except BaseException:
                built.close()
                raise
            self._shapes[shape] = built
            if len(self._shapes) > KEPT_SHAPES:
                self._shapes.popitem(last=False)[1].close()
        self._shapes.move_to_end(shape)
        return built.graphs

    def bare(self, shape: BatchShape, i: int) -> Graph:
        """Segment `i` without its router, for a layer whose routes and their scores are known."""
        built = self._shapes[shape]
        if i not in built.bare:
            context, built.bare[i] = self.allocator.placed(*self._segment(shape, i, bare=True))
            built.contexts.append(context)
        return built.bare[i]

    def joined(self, shape: BatchShape, parts: Sequence[Graph]) -> Graph:
        """`parts` in one graph: segments of `shape`, for which `of` was called, and what is kept for a single token.

        Saves launches, and with them the waking of the other threads.
        """
        if len(parts) == 1:
            return parts[0]
        built, key = self._shapes[shape], tuple(part.ptr for part in parts)
        kept = built.joined
        if key not in kept:
            kept[key] = chained(*parts)
            built.joined_nodes += kept[key][1].n_nodes
            while sum(each.joined_nodes for each in self._shapes.values()) > KEPT_NODES:
                oldest = next(each for each in self._shapes.values() if each.joined)
                if oldest is built and len(kept) == 1:
                    break
                context, graph = oldest.joined.popitem(last=False)[1]
                oldest.joined_nodes -= graph.n_nodes
                context.close()
        kept.move_to_end(key)
        return kept[key][1]

    def shared(self, layer: int, n: int) -> Graph:
        """The shared experts of `layer` on the first `n` columns of what it reads."""
        key = (layer, n)
        kept = self._shared_single if n == 1 else self._shared
        if key not in kept:
            kept[key] = self.allocator.placed(*self._shared_graph(layer, n))
            if len(self._shared) > KEPT_SHAPES * len(self.spec.moe_layers):
                self._shared.popitem(last=False)[1][0].close()
        elif n > 1:
            self._shared.move_to_end(key)
        return kept[key][1]

    def _shared_graph(self, layer: int, n: int) -> tuple[Context, Graph]:
        ws = self.workspace
        c = Context(self.library, SHARED_TENSORS, n_graphs=1)
        try:
            graph = c.graph()
            out = self.family.shared(c, layer, columns(c, ws.residual, n), columns(c, ws.normed, n))
            graph.add(c.cpy(out, columns(c, ws.shared, n)))
            return c, graph
        except BaseException:
            c.close()
            raise

    def _segment(self, shape: BatchShape, i: int, *, bare: bool = False) -> tuple[Context, Graph]:
        spec, family, ws, n = self.spec, self.family, self.workspace, shape.n_tokens
        moe = spec.moe_layers
        last = i == len(moe)
        first_layer = moe[i - 1] + 1 if i else 0
        layers = range(first_layer, spec.n_layers if last else moe[i] + 1)
        each = LAYER_TENSORS + (STATE_TENSORS if spec.recurrent else STREAM_TENSORS) * len(shape.columns)
        n_tensors = 160 + each * max(1, len(layers)) + 2 * spec.top_k
        c = Context(self.library, n_tensors, n_graphs=1)
        try:
            graph = c.graph()
            if i == 0:
                x = family.embed(c, elements(c, ws.tokens, n))
            else:
                m = max(1, shape.n_wanted(moe[i - 1], spec, ws.n_outputs))
                weights = family.routing_weights(c, moe[i - 1], *self._final(c, shape, i - 1, m))
                if "weights" in ws.names:
                    graph.add(c.cpy(c.reshape(weights, spec.top_k, m), columns(c, ws.weights, m)))
                outputs = c.view(ws.pairs, (spec.n_embd, spec.top_k, m))
                total = weighted_sum(c, outputs, weights)
                also = columns(c, ws.shared, m) if spec.n_ff_shared else None
                x = family.combined(c, moe[i - 1], columns(c, ws.residual, m), total, also)
            inputs = self._attention_inputs(c, graph, shape)
            for layer in layers:
                x = family.attention(c, layer, x, inputs)
                if last or layer != moe[i]:
                    x = family.dense_ffn(c, layer, x)
            if last:
                self._head(c, graph, x, shape)
            elif (wanted := shape.n_wanted(moe[i], spec, ws.n_outputs)) == 0:
                graph.add(x)
            elif bare:
                self._read(c, graph, x, moe[i], shape)
                graph.add(c.cpy(x, columns(c, ws.residual, n)))
            else:
                self._router(c, graph, self._outputs(c, x, wanted), i, wanted, shape)
            return c, graph
        except BaseException:
            c.close()
            raise

    def _final(self, c: Context, shape: BatchShape, i: int, n: int) -> tuple[Tensor, Tensor]:
        """The scores and ids that the routing weights of the i-th layer with experts are made of."""
        ws, n_layers = self.workspace, len(self.spec.moe_layers)
        if not shape.ahead:
            return columns(c, ws.scores, n), columns(c, ws.routed, n)
        if self.scored and self.spec.moe_layers[i] in self.predicted:
            scores = block(c, ws.executed_scores, i, n_layers, n)
        else:
            scores = columns(c, ws.scores, n)
        return scores, block(c, ws.executed, i, n_layers, n)

    def _attention_inputs(self, c: Context, graph: Graph, shape: BatchShape) -> AttentionInputs:
        ws, n = self.workspace, shape.n_tokens
        segments, start, mask_at, near_at = [], 0, 0, 0
        for column in shape.columns:
            everything = near = Reach(0, column.n_kv, c.view(ws.mask, (column.n_kv, column.n), (), mask_at))
            if self.spec.window:
                n_near = column.n_kv - column.near
                near = Reach(column.near, n_near, c.view(ws.near_mask, (n_near, column.n), (), near_at))
                near_at += 2 * n_near * column.n
            segments.append(Segment(start, column.n, column.stream, everything, near))
            start += column.n
            mask_at += 2 * column.n_kv * column.n
        return AttentionInputs(
            graph, self.cache, self.states, elements(c, ws.positions, n), elements(c, ws.rows, n), tuple(segments),
            ws.attention,
        )  # fmt: skip

    def _router(self, c: Context, graph: Graph, x: Tensor, i: int, n: int, shape: BatchShape) -> None:
        """The end of a segment: what experts read, whom the router chose, and whom the next ones would choose."""
        family, ws, moe, k = self.family, self.workspace, self.spec.moe_layers, self.spec.top_k
        read = self._read(c, graph, x, moe[i], shape)
        scores, ids = family.select(c, moe[i], family.router(c, moe[i], read), k)
        graph.add(
            c.cpy(scores, columns(c, ws.scores, n)),
            c.cpy(ids, block(c, ws.chosen, i, len(moe), n) if shape.ahead else columns(c, ws.selected, n)),
        )
        for d, layer in self.looks_ahead(shape, i):
            read = family.router_input(c, layer, x, family.expert_input(c, layer, x))
            guess = family.router(c, layer, read)
            at = d * ws.n_tokens * ws.predicted.strides[1]
            graph.add(c.cpy(family.select(c, layer, guess, k)[1], c.view(ws.predicted, (k, n), (), at)))
        graph.add(c.cpy(x, columns(c, ws.residual, n)))

    def _read(self, c: Context, graph: Graph, x: Tensor, layer: int, shape: BatchShape) -> Tensor:
        """What the router of `layer` reads; that, for heads, and what the experts read are written down."""
        ws, n = self.workspace, x.shape[1]
        normed = self.family.expert_input(c, layer, x)
        read = self.family.router_input(c, layer, x, normed)
        graph.add(c.cpy(normed, columns(c, ws.normed, n)))
        if shape.ahead:
            graph.add(c.cpy(read, columns(c, ws.asked, n)))
        return read

    def looks_ahead(self, shape: BatchShape, i: int) -> list[tuple[int, int]]:
        """The layers that the i-th one with experts looks ahead to: (how far, less one, layer)."""
        if not self.lookahead:
            return []
        layers = enumerate(self.spec.moe_layers[i + 1 : i + 1 + LOOKAHEAD])
        known = [(d, layer) for d, layer in layers if layer in self.layers]
        return [(d, layer) for d, layer in known if not (shape.ahead and layer in self.predicted)]

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
        c = Context(self.library, 24, n_graphs=1)
        graph = c.graph()
        x = c.view(ws.residual, (self.spec.n_embd, n), (), start * ws.residual.strides[1])
        graph.add(c.cpy(self.family.head(c, x), columns(c, ws.logits, n)))
        return self.allocator.placed(c, graph) if place else (c, graph)

    # --- reserving

    def _make_room(self, graphs: Collection[Graph], shape: BatchShape) -> None:
        """Grow the scratch memory for a shape that `reserve` did not foresee: several streams' prompts in one step."""
        if len(shape.columns) == 1 or shape.n_tokens == len(shape.columns):
            return
        before = self.allocator.generation
        try:
            for graph in graphs:
                self.allocator.reserve(graph)
        finally:
            if self.allocator.generation != before:
                self.close()

    def reserve(self, n_tokens: int, n_ctx: int, n_streams: int) -> None:
        """Make the allocator large enough for every graph of up to `n_tokens` prompt tokens or `n_streams` streams."""
        for _, context, graph in self.largest(n_tokens, n_ctx, n_streams):
            with context:
                self.allocator.reserve(graph)

    def largest(self, n_tokens: int, n_ctx: int, n_streams: int) -> Iterator[tuple[int, Context, Graph]]:
        """The graphs that no other needs more memory than, each with its segment; the caller closes its context."""
        n_kv = padded(n_ctx)
        for streams, n in ((1, n_tokens), (n_streams, 1), (n_streams, n_tokens // n_streams)):
            near = n_kv - near_reach(self.spec, n, n_ctx) if self.spec.window else 0
            shape = BatchShape(tuple(Columns(s, n, n_kv, near) for s in range(streams)), streams)
            for i in self.only:
                yield i, *self._segment(shape, i)
        if (last := len(self.spec.moe_layers)) in self.only:
            yield last, *self.head(0, self.workspace.n_outputs, place=False)
        if self.spec.n_ff_shared:
            for layer in self.layers:
                yield self.spec.moe_layers.index(layer), *self._shared_graph(layer, n_tokens)
