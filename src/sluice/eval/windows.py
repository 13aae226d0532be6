"""Cuts a text into windows that fit the context, and feeds them: which token is scored after what. Knows no score.

A window feeds BOS, if the model wants one, and then consecutive tokens of the text, one for each position of the
context that is left. Every token of the text is scored exactly once, by the logits after the token before it. A window
begins `overlap` tokens (half of what it holds) before the first token that it scores, so every token but those of the
first window is scored with half a window to a whole one of the text before it. The text's first token is scored only
where a BOS stands before it; otherwise nothing predicts it, and it is not counted.

llama.cpp's `perplexity` has windows of the same length without overlap, scores the second half of each, and leaves out
every first half and what remains at the text's end: as much context for a scored token, half as many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sluice.errors import InputError, ModelFileError
from sluice.text.sampling import log_probabilities

if TYPE_CHECKING:
    from sluice.engine import Engine

Row = np.ndarray[Any, Any]  # [n_vocab]
Rows = np.ndarray[Any, Any]  # [n, n_vocab]
Score = Callable[[int, Row], None]  # (token, float32 logits after the tokens before it)
Progress = Callable[[float, float], None]  # (tokens scored, of all)


@dataclass(frozen=True)
class Window:
    """Feeds a text's tokens [start, stop - 1) and scores its tokens [first, stop)."""

    start: int
    first: int
    stop: int


def overlap(ctx: int, lead: int) -> int:
    """Tokens of a text that a window of `ctx` positions, `lead` of them before the text, shares with the one before."""
    return max(1, (ctx - lead) // 2)


def windows(n: int, ctx: int, lead: int) -> Iterator[Window]:
    """Windows over a text of `n` tokens; `lead` is 1 where a BOS is fed before each. Raises InputError for none."""
    room = ctx - lead
    if room < 1:
        raise InputError(f"--ctx {ctx} leaves no room for text: give at least {1 + lead}")
    if (scored := n_scored(n, lead)) < 1:
        raise InputError(f"the text has {n} tokens, too few to be scored: give at least {n + 1 - scored}")
    start, first = 0, 1 - lead
    while first < n:
        stop = min(n, start + room + 1)
        yield Window(start, first, stop)
        first = stop
        start = first - overlap(ctx, lead)


def n_scored(n: int, lead: int) -> int:
    """Tokens that are scored in a text of `n`."""
    return n - 1 + lead


def lead_of(engine: Engine) -> tuple[int, ...]:
    """What `engine`'s model wants before a text: its BOS, or nothing."""
    tokenizer = engine.tokenizer
    return (tokenizer.bos_id,) if tokenizer.add_bos and tokenizer.bos_id is not None else ()


def tokenize(engine: Engine, texts: Mapping[str, str]) -> dict[str, list[int]]:
    """The tokens of each text, without a BOS. Control tokens in a text are text. Raises InputError for a short one."""
    n_lead = len(lead_of(engine))
    found: dict[str, list[int]] = {}
    for name, text in texts.items():
        found[name] = engine.tokenizer.encode(text, bos=False)
        try:
            next(windows(len(found[name]), engine.n_ctx, n_lead))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    return found


def each_scored(
    engine: Engine, texts: Mapping[str, Sequence[int]], use: Callable[[str], Score], *,
    lead: Sequence[int] | None = None, progress: Progress | None = None,
) -> None:  # fmt: skip
    """Score every token of each text, in order: `use(name)` gives what is called with a token and its logits.

    `lead`: what is fed before each window instead of what the model wants. The logits are valid during the call. A
    window is a session of its own: nothing is carried over. `progress` may raise, to end it between two steps.
    """
    before = list(lead_of(engine) if lead is None else lead)
    total, done = sum(n_scored(len(ids), len(before)) for ids in texts.values()), 0
    for name, ids in texts.items():
        score = use(name)
        for window in windows(len(ids), engine.n_ctx, len(before)):
            fed = [*before, *ids[window.start : window.stop - 1]]
            for n in _feed(engine, fed, ids[window.first : window.stop], score):
                done += n
                if progress is not None:
                    progress(done, total)


def _feed(engine: Engine, ids: Sequence[int], targets: Sequence[int], score: Score) -> Iterator[int]:
    """Feed `ids`, and score `targets` by the logits after the last so many. Yields how many, chunk by chunk."""
    skipped = len(ids) - len(targets)
    done = 0

    def use(first: int, rows: Rows) -> None:
        for target, row in zip(targets[first - skipped :], rows, strict=False):
            score(target, row)

    with engine.session() as session:
        for fed in engine.prefill_rows(session, ids, use, skip=skipped):
            yield max(0, fed - skipped) - done
            done = max(0, fed - skipped)


def log_softmax(logits: Row) -> Row:
    """Log-probabilities [n_vocab] in float64. Raises ModelFileError where logits are no finite numbers."""
    if not np.isfinite(logits).all():
        raise ModelFileError(
            "the model computes logits that are no numbers: its weights are damaged, get the file again"
        )
    return log_probabilities(logits)
