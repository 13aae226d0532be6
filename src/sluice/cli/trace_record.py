"""`sluice trace record`: a trace of prompts and texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.opening import announce, check_prompt, open_engine, resolve_model, settled
from sluice.cli.options import EngineOptions, Json, SamplingOptions, check_count, grouped
from sluice.cli.run import sampling_mode, sampling_params
from sluice.cli.signals import Stop, deferred
from sluice.cli.terminal import Progress, emit, note, progress_bar
from sluice.cli.trace_texts import Source, sources
from sluice.config import format_size
from sluice.errors import InputError

if TYPE_CHECKING:
    from sluice.engine import Engine, Session
    from sluice.text.sampling import SamplingParams

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, any shard of it, or demo.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The trace to write, a Parquet file.")]
_WHAT = "What to record"
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompts", metavar="FILE", rich_help_panel=_WHAT, show_default=False,
                 help='Answer prompts: one a line, or of a .jsonl file each line\'s "prompt". May be repeated.'),
]  # fmt: skip
Text = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="FILE", rich_help_panel=_WHAT, show_default=False,
                 help="Read a text, in sequences as long as the context. May be repeated."),
]  # fmt: skip
Domain = Annotated[
    list[str] | None,
    typer.Option("--domain", metavar="NAME=PATH", rich_help_panel=_WHAT, show_default=False,
                 help="As --text (a .jsonl file: as --prompts), its rows labelled NAME. May be repeated."),
]  # fmt: skip
MaxTokens = Annotated[int, typer.Option("-n", metavar="N", rich_help_panel=_WHAT,
                                        help="At most so many tokens after each prompt; 0: none.")]  # fmt: skip
Decode = Annotated[
    bool,
    typer.Option("--decode", metavar="", rich_help_panel=_WHAT,
                 help="Feed texts one token a step, not as prompts in chunks."),
]  # fmt: skip
Raw = Annotated[bool, typer.Option("--raw", metavar="", rich_help_panel=_WHAT,
                                   help="Take prompts as they are, without the chat template.")]  # fmt: skip
Scores = Annotated[bool, typer.Option("--scores", metavar="", help="Record the scores of all experts too.")]
Force = Annotated[bool, typer.Option("--force", metavar="", help="Overwrite OUT.")]


@grouped
def record(
    *,
    model: Model,
    out: Out,
    prompts: Prompts = None,
    text: Text = None,
    domain: Domain = None,
    max_tokens: MaxTokens = 256,
    decode: Decode = False,
    raw: Raw = False,
    scores: Scores = False,
    force: Force = False,
    engine: EngineOptions,
    sampling: SamplingOptions,
    json: Json = False,
) -> int:
    """Record which experts a model chooses for prompts and texts.

    Each prompt is answered in a conversation of its own. A text is fed as it is: in chunks, as a prompt would be, where
    the last layer runs only for a chunk's last token, or with --decode one token at a time, as if the model wrote it.
    Ctrl-C ends the recording and keeps what there is.
    """
    if max_tokens:
        check_count("-n", max_tokens)
    config = settled(model, engine).config(trace=out, trace_scores=scores, trace_force=force)
    params = sampling_params(sampling)
    todo = sources(prompts, text, domain)
    with deferred() as stop:
        with open_engine(resolve_model(model), config, stop) as opened:
            recording = Recording(opened, stop, params, max_tokens=max_tokens, decode=decode, raw=raw,
                                  stops=tuple(sampling.stop or ()))  # fmt: skip
            for source in todo:
                recording.check(source)
            announce(opened)
            with progress_bar("recording") as progress:
                recording.run(todo, progress)
            ledger, mode = opened.stats(), opened.mode | {"ctx": opened.n_ctx}
        writer = opened.recorder
        assert writer is not None
        if stop:
            note("ended before all was recorded; what there is was kept")
        if not writer.n_rows and not stop:
            raise InputError("nothing was recorded: no trace was written")
        if not writer.n_rows:
            return stop.exit_code
        result = {
            "path": str(out), "rows": writer.n_rows, "bytes": writer.path.stat().st_size, **recording.counts,
            "fingerprint": writer.info.fingerprint, "slots": opened.plan.slots, "seed": params.seed,
            "mode": mode | sampling_mode(params) | {"max_tokens": max_tokens, "decode": decode, "raw": raw},
            "complete": not stop, "ledger": ledger,
        }  # fmt: skip
        if json:
            emit(result)
        else:
            note(
                f"{out}: tokens: {result['tokens']}, sequences: {result['sequences']}, rows: {result['rows']}, "
                f"{format_size(result['bytes'])}; seed {params.seed}"
            )
        return stop.exit_code


class Recording:
    """Feeds sources to an engine that records, until all is fed or `stop` asks for the end; counts what it fed."""

    def __init__(
        self, engine: Engine, stop: Stop, params: SamplingParams, *, max_tokens: int, decode: bool, raw: bool,
        stops: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.engine = engine
        self.stop = stop
        self.params = params
        self.max_tokens = max_tokens
        self.decode = decode
        self.raw = raw
        self.stops = stops
        self.counts: dict[str, Any] = {"sequences": 0, "tokens": 0}

    def check(self, source: Source) -> None:
        """Raise InputError for a prompt that the model can't take, naming its line."""
        if not source.prompts:
            return
        for number, prompt in source.lines():
            try:
                check_prompt(self.engine, self.engine.encode_prompt(prompt, raw=self.raw))
            except InputError as error:
                raise InputError(f"{source.path}: line {number}: {error}") from None

    def run(self, todo: list[Source], progress: Progress) -> None:
        """Feed each source. `progress` in bytes."""
        sizes = [source.path.stat().st_size for source in todo]
        done = 0
        for source, size in zip(todo, sizes, strict=True):
            for share in self._prompts(source) if source.prompts else self._text(source):
                progress(done + min(share, size), sum(sizes))
                if self.stop:
                    return
            done += size

    def _prompts(self, source: Source) -> Iterator[int]:
        """Answer each prompt; yields how much of the source has been fed, in bytes or less."""
        from sluice.engine import Generation
        from sluice.engine.workspace import chunks

        done = 0
        for _, prompt in source.lines():
            ids = self.engine.encode_prompt(prompt, raw=self.raw)
            with self._session(source) as session:
                if not self.max_tokens:
                    yield from (done for _ in self._feed(session, ids))
                else:
                    *first, last = chunks(0, ids)
                    for chunk in first:
                        session.feed(chunk)
                        yield done
                    generation = Generation(session, last, self.params, max_tokens=self.max_tokens, stop=self.stops)
                    for _ in generation:
                        yield done
            done += len(prompt)
            yield done

    def _text(self, source: Source) -> Iterator[int]:
        done = 0.0
        for piece_share, ids in self._sequences(source):
            with self._session(source) as session:
                for fed in self._feed(session, ids):
                    yield int(done + piece_share * fed / len(ids))
            done += piece_share

    @contextmanager
    def _session(self, source: Source) -> Iterator[Session]:
        """A session under the source's label, whose tokens count however far they came."""
        with self.engine.session() as session:
            self.counts["sequences"] += 1
            if source.domain is not None:
                assert self.engine.recorder is not None
                self.engine.recorder.domains[session.number] = source.domain
            try:
                yield session
            finally:
                self.counts["tokens"] += len(session.tokens)

    def _sequences(self, source: Source) -> Iterator[tuple[float, list[int]]]:
        """A text's tokens, as many at a time as the context holds, with about how many characters they stand for."""
        encode = self.engine.tokenizer.encode
        start, waiting = encode(""), []  # where the model begins every text
        room = max(1, self.engine.n_ctx - len(start))
        per_token = 1.0
        for piece in source.pieces():
            ids = encode(piece, bos=False)
            per_token = len(piece) / max(1, len(ids))
            waiting += ids
            for at in range(0, len(waiting) - room + 1, room):
                yield room * per_token, start + waiting[at : at + room]
            del waiting[: len(waiting) // room * room]
        if waiting:
            yield len(waiting) * per_token, start + waiting

    def _feed(self, session: Session, ids: list[int]) -> Iterator[int]:
        """Feed `ids`, as chunks of a prompt or one at a time; yields how many have been."""
        from sluice.engine.workspace import chunks

        if self.decode:
            for token in ids:
                self.engine.decode([session], [token])
                yield len(session.tokens)
        else:
            for chunk in chunks(len(session.tokens), ids):
                session.feed(chunk)
                yield len(session.tokens)
