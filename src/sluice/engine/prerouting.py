"""Routes known a token ahead, kept for each stream: what a head or a recording says, and when it holds.

A head runs in the step of its own token and names the experts of the next token, so what it says is kept until that
token's step, and holds only there: for the same stream, at the very next position, in a decode step. Anything else
(a prompt, a rewind, a step that failed, another session on the stream) leaves the stream without, and its next step
to the routers. It knows no cache and no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from sluice.engine.workspace import Workspace, block, columns
from sluice.ggml import Context, Graph, GraphAllocator
from sluice.models.blocks import Family
from sluice.models.spec import ModelSpec
from sluice.routing.heads import Heads

HEAD_TENSORS, HEAD_TENSORS_PER_EXPERT = 96, 4  # more than a head has, and more than it has for each executed expert
KEPT_WIDTHS = 4  # numbers of streams whose graphs are kept


class Recording(Protocol):
    """Routes of tokens to come."""

    def ids(self, sequence: int, position: int) -> np.ndarray | None:
        """[n_moe_layers, top_k] int32: the experts of the token there; None where it says nothing."""
        ...


class HeadGraphs:
    """Builds and keeps the graphs of heads over one workspace; a context manager.

    A graph reads what the owner's router read, `asked`, and the experts executed there and in the layer before,
    blocks of `executed`; it writes what follows for the layer predicted into blocks of `ahead_scores` and `ahead_ids`.
    Blocks are of a layer, as wide as there are streams.
    """

    def __init__(self, family: Family, heads: Heads, workspace: Workspace, allocator: GraphAllocator) -> None:
        self.family = family
        self.heads = heads
        self.workspace = workspace
        self.allocator = allocator
        self._index = {layer: i for i, layer in enumerate(family.spec.moe_layers)}
        self._kept: OrderedDict[int, dict[int, tuple[Context, Graph]]] = OrderedDict()  # by columns, then owner
        self._generation = allocator.generation

    def __enter__(self) -> HeadGraphs:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for kept in self._kept.values():
            for context, _ in kept.values():
                context.close()
        self._kept.clear()

    def reserve(self, n: int) -> None:
        """Make the allocator large enough for heads of up to `n` columns."""
        for owner in self.heads.predicts:
            context, graph = self._build(owner, n)
            with context:
                self.allocator.reserve(graph)

    def of(self, owner: int, n: int) -> Graph:
        """The head of layer `owner` on `n` columns."""
        if self._generation != self.allocator.generation:
            self.close()
            self._generation = self.allocator.generation
        kept = self._kept.setdefault(n, {})
        if owner not in kept:
            kept[owner] = self.allocator.placed(*self._build(owner, n))
            if len(self._kept) > KEPT_WIDTHS:
                for context, _ in self._kept.popitem(last=False)[1].values():
                    context.close()
        self._kept.move_to_end(n)
        return kept[owner][1]

    def _build(self, owner: int, n: int) -> tuple[Context, Graph]:
        ws, k, layer = self.workspace, self.family.spec.top_k, self.heads.predicts[owner]
        i, to, n_layers = self._index[owner], self._index[layer], len(self._index)
        c = Context(self.allocator.library, HEAD_TENSORS + HEAD_TENSORS_PER_EXPERT * k, n_graphs=1)
        try:
            graph = c.graph()
            here = block(c, ws.executed, i, n_layers, n)
            before = block(c, ws.executed, i - 1, n_layers, n) if self.heads.reads_before(owner) else None
            logits = self.heads.logits(c, owner, columns(c, ws.asked, n), here, before)
            scores, ids = self.family.select(c, layer, logits, k)
            graph.add(
                c.cpy(scores, block(c, ws.ahead_scores, to, n_layers, n)),
                c.cpy(ids, block(c, ws.ahead_ids, to, n_layers, n)),
            )
            return c, graph
        except BaseException:
            c.close()
            raise


class Prerouting:
    """What is known of the routes of each stream's next token, from heads or from a recording.

    `decides`: it is the route; else a hint of what to read. `owners`: the layers after whose routing something is said,
    and of which layer. `scored`: scores come with it, which routing weights are taken from; else the router's are.
    The final routes of a decode step are written down layer by layer, `executed`, with `executed_scores` where scored.
    """

    def __init__(
        self, spec: ModelSpec, workspace: Workspace, n_streams: int, *, decides: bool, heads: Heads | None = None,
        recording: Recording | None = None,
    ) -> None:  # fmt: skip
        assert (heads is None) != (recording is None)
        moe, k = spec.moe_layers, spec.top_k
        self.decides = decides
        self.recording = recording
        self.owners: Mapping[int, int] = dict(pairwise(moe)) if heads is None else heads.predicts
        self.scored = decides and heads is not None and heads.file.info.weights == "head"
        self._predicted = frozenset(self.owners.values())
        self._index = {layer: i for i, layer in enumerate(moe)}
        arrays, blocks = workspace.arrays, (len(moe), n_streams)
        self._chosen = arrays["chosen"].reshape(*blocks, k)
        self._executed = arrays["executed"].reshape(*blocks, k)
        self._executed_scores = arrays["executed_scores"].reshape(*blocks, spec.n_expert)
        self._ahead_ids = arrays["ahead_ids"].reshape(*blocks, k)
        self._ahead_scores = arrays["ahead_scores"].reshape(*blocks, spec.n_expert)
        # by stream: where a recording has it, of which token the rest is (-1: of none), and in which layers it is known
        self._sequence, self._position = [0] * n_streams, [-1] * n_streams
        self._known = np.zeros((n_streams, len(moe)), bool)
        self._ids = np.zeros((n_streams, len(moe), k), np.int32)
        self._scores = np.zeros((n_streams, len(moe), spec.n_expert if self.scored else 0), np.float32)
        # of this step, if it decodes: its columns, what was said in it, and what of that can be held against routers
        self._streams: list[int] = []
        self._positions: list[int] = []
        self._next: dict[int, np.ndarray] = {}  # [n_columns, top_k] by layer; -1: nothing
        self._compared = np.zeros((len(moe), n_streams), bool)

    def opened(self, stream: int, sequence: int) -> None:
        """A session has taken `stream`; a recording has its tokens under `sequence`."""
        self._sequence[stream] = sequence
        self._position[stream] = -1

    def begin(self, streams: Sequence[tuple[int, int, Sequence[int]]], *, decoding: bool) -> None:
        """A step of `streams` (stream, position, tokens) begins; unless `end` follows, nothing holds for them after."""
        self._next.clear()
        self._compared[:] = False
        self._streams = [stream for stream, _, _ in streams] if decoding else []
        self._positions = [position for _, position, _ in streams]
        for stream, position, _ in streams:
            if not decoding or self._position[stream] != position:
                self._known[stream] = False
            self._position[stream] = -1

    def foretold(self, layer: int) -> np.ndarray | None:
        """The route of a single column, if it is known and decides: [1, top_k], written down as executed."""
        i, stream = self._index[layer], self._streams[0]
        if not (self.decides and self._known[stream, i]):
            return None
        if self.scored:
            self._executed_scores[i, 0] = self._scores[stream, i]
        else:
            self._compared[i, 0] = True
        self._executed[i, 0] = self._ids[stream, i]
        return self._executed[i, :1]

    def route(self, layer: int, scores: np.ndarray) -> np.ndarray:
        """The final routes [n_columns, top_k] of a layer whose router has spoken, written down as executed.

        `scores` [at least n_columns, n_expert] are the router's.
        """
        i, n = self._index[layer], len(self._streams)
        routed = self._executed[i, :n]
        routed[:] = self._chosen[i, :n]
        if self.scored and layer in self._predicted:
            self._executed_scores[i, :n] = scores[:n]
        for column, stream in enumerate(self._streams):
            if self._known[stream, i]:
                self._compared[i, column] = True
                if self.decides:
                    routed[column] = self._ids[stream, i]
                if self.scored:
                    self._executed_scores[i, column] = self._scores[stream, i]
        return routed

    def final_scores(self, layer: int, scores: np.ndarray) -> np.ndarray:
        """The scores that a layer's routing weights are made of, given the router's."""
        return self._executed_scores[self._index[layer]] if self.scored and layer in self._predicted else scores

    def said(self, owner: int) -> tuple[int, np.ndarray]:
        """What was said after `owner`'s routing: a layer, and its experts for the next tokens, [n_columns, top_k], best
        first. Columns of which nothing is known are left out."""
        layer, n = self.owners[owner], len(self._streams)
        i = self._index[layer]
        if self.recording is None:
            self._next[layer] = ids = self._ahead_ids[i, :n]
            return layer, ids
        ids = np.full((n, self._ids.shape[2]), -1, np.int32)
        for column, (stream, position) in enumerate(zip(self._streams, self._positions, strict=True)):
            found = self.recording.ids(self._sequence[stream], position + 1)
            if found is not None:
                ids[column] = found[i]
        self._next[layer] = ids
        return layer, ids[ids[:, 0] >= 0]

    def end(self) -> tuple[int, int]:
        """The step has ended well: what was said in it holds for the next one.

        Returns how many experts had been named for this one in layers whose router spoke too, and how many of those it
        named as well.
        """
        if not self._streams:
            return 0, 0
        n, streams = len(self._streams), np.array(self._streams)
        named = right = 0
        if self._compared.any():
            at = self._compared[:, :n]
            foretold, chosen = self._ids[streams].transpose(1, 0, 2)[at], self._chosen[:, :n][at]
            named, right = foretold.size, int((foretold[:, :, None] == chosen[:, None, :]).sum())
        self._known[streams] = False
        for layer, ids in self._next.items():
            i = self._index[layer]
            self._ids[streams, i] = ids
            self._known[streams, i] = ids[:, 0] >= 0
            if self.scored:
                self._scores[streams, i] = self._ahead_scores[i, :n]
        for stream, position in zip(self._streams, self._positions, strict=True):
            self._position[stream] = position + 1
        return named, right
