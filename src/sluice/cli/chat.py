"""`sluice chat`: a conversation that keeps its keys and values from turn to turn."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.opening import announce, feed_ahead, open_engine, resolve_model, settled
from sluice.cli.options import MAX_SEED, EngineOptions, Json, Model, SamplingOptions, check_count, grouped
from sluice.cli.run import MAX_STDIN_BYTES, result_of, sampling_mode, sampling_params, stream
from sluice.cli.signals import Stop, deferred
from sluice.cli.terminal import emit, note
from sluice.errors import ContextError

if TYPE_CHECKING:
    from sluice.engine import Engine, Session
    from sluice.text.sampling import SamplingParams

HELP = "/reset starts over, /stats tells how the last answer went, /quit or Ctrl-D ends, Ctrl-C stops an answer"
MaxTokens = Annotated[int | None, typer.Option("-n", metavar="N", help="Tokens of an answer. Default: what fits.")]
Raw = Annotated[
    bool, typer.Option("--raw", metavar="", help="No chat template: what you type is appended to the text so far.")
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system message to begin with.")]


@grouped
def chat(
    *,
    model: Model = "demo",
    max_tokens: MaxTokens = None,
    raw: Raw = False,
    system: System = None,
    engine: EngineOptions,
    sampling: SamplingOptions,
    json: Json = False,
) -> int:
    """Talk with a model, one message per line; with a pipe on stdin, each of its lines is a message.

    Between turns only what is new is computed. /reset starts over, /stats tells how the last answer went, /quit or
    Ctrl-D ends. Ctrl-C stops the answer, not the chat. --json prints one object with every turn at the end.
    """
    if max_tokens is not None:
        check_count("-n", max_tokens)
    config = settled(model, engine).config()
    params = sampling_params(sampling)
    path = resolve_model(model)
    from sluice.engine.report import summary

    with deferred() as stop, open_engine(path, config, stop) as opened, opened.session() as session:
        if raw is False and opened.tokenizer.chat_template is None:
            opened.encode_chat([])  # raises TemplateError, which says that --raw helps
        announce(opened)
        talk = Conversation(
            opened, session, params, sampling.stop or [], max_tokens, raw=raw, system=system, show=not json
        )
        if sys.stdin.isatty():
            note(HELP)
        _loop(talk, stop)
        result = talk.result()
        note(summary(result, random_seed=sampling.seed is None))
        if json:
            emit(result)
        return stop.exit_code


@dataclass
class Conversation:
    """The messages so far, and the session that holds the keys and values of the tokens they made."""

    engine: Engine
    session: Session
    params: SamplingParams
    stop_texts: list[str]
    max_tokens: int | None
    raw: bool
    system: str | None
    show: bool
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # generated last, and not fed yet

    def reset(self) -> None:
        """Forget every message."""
        self.messages.clear()
        self.pending.clear()
        self.session.rewind(0)

    def say(self, text: str, stop: Stop) -> dict[str, Any]:
        """Answer one message; the turn's figures. Raises ContextError, with nothing changed, when it doesn't fit."""
        from sluice.engine import Generation
        from sluice.engine.report import difference

        messages = [*self.messages, {"role": "user", "content": text}]
        kept, ids = self._place(messages, text)
        if kept + len(ids) >= self.engine.n_ctx:
            raise ContextError(
                f"the conversation has {kept + len(ids)} tokens and the context {self.engine.n_ctx} positions, so no "
                "answer fits: /reset starts over, or start again with a larger --ctx"
            )
        self.session.rewind(kept)
        before = {name: replace(phase, cache=phase.cache.copy()) for name, phase in self.engine.ledger.items()}
        state, began = self.engine.cache_state, perf_counter()
        try:
            rest = feed_ahead(self.session, ids, stop)
        except BaseException:
            self.session.rewind(kept)
            raise
        # the same seed gives the same chat, but not the same draws in every turn
        params = replace(self.params, seed=((self.params.seed or 0) + len(self.turns)) & MAX_SEED)
        generation = Generation(
            self.session, rest, params, max_tokens=self.max_tokens or self.engine.n_ctx, stop=self.stop_texts
        )
        before_s = perf_counter() - began
        stream(generation, stop, show=self.show)
        self.messages = [*messages, {"role": "assistant", "content": generation.text}]
        n_fed = len(self.session.tokens) - kept - len(ids)
        self.pending = generation.tokens[max(n_fed, 0) :]
        result = result_of(
            self.engine, generation, prompt_tokens=kept + len(ids), before_s=before_s,
            mode=self._mode(), cache_state=state,
        )  # fmt: skip
        result["ledger"] = {
            name: difference(phase, before[name]).as_dict() for name, phase in self.engine.ledger.items()
        }
        turn = {"message": text, "reused_tokens": kept, **result}
        self.turns.append(turn)
        return turn

    def result(self) -> dict[str, Any]:
        """The whole chat as one JSON object: its turns, and what all of them took together."""
        from sluice.engine.report import rate, run_result
        from sluice.memory import peak_rss_bytes

        engine, turns = self.engine, self.turns
        ledger = engine.stats()
        whole = run_result(
            text=[turn["text"] for turn in turns], tokens=[turn["tokens"] for turn in turns],
            finish_reason=turns[-1]["finish_reason"] if turns else None,
            prompt_tokens=sum(turn["prompt_tokens"] for turn in turns),
            generated_tokens=sum(turn["generated_tokens"] for turn in turns),
            load_s=engine.load_s, ttft_s=None, intervals_s=(),
            tok_per_s=rate(ledger["decode"]["tokens"], ledger["decode"]["wall_s"]),
            peak_rss_bytes=peak_rss_bytes(), budget_bytes=engine.plan.budget, slots=engine.plan.slots,
            seed=self.params.seed or 0, mode=engine.mode | {"ctx": engine.n_ctx} | self._mode(), ledger=ledger,
            placed=engine.placed, device=engine.device,
        )  # fmt: skip
        return whole | {"turns": turns}

    def _mode(self) -> dict[str, Any]:
        return sampling_mode(self.params) | {"max_tokens": self.max_tokens, "stop": self.stop_texts, "raw": self.raw}

    def _place(self, messages: list[dict[str, Any]], text: str) -> tuple[int, list[int]]:
        """How many of the session's tokens stay, and the tokens to feed after them, at least one."""
        have = self.session.tokens
        if self.raw:
            return len(have), self.pending + self.engine.tokenizer.encode(text, bos=None if not have else False)
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        ids = self.engine.encode_chat(messages)
        kept = next((i for i, (a, b) in enumerate(zip(have, ids, strict=False)) if a != b), min(len(have), len(ids)))
        kept = min(kept, len(ids) - 1)
        return kept, ids[kept:]


def _loop(talk: Conversation, stop: Stop) -> None:
    """Read messages and answer them until the input ends or a signal other than Ctrl-C comes."""
    from sluice.engine.report import summary

    while (line := _read_line(stop)) is not None:
        text = line.strip()
        if text in ("/quit", "/exit"):
            return
        if text == "/reset":
            talk.reset()
            note("started over")
        elif text == "/stats":
            note(summary(talk.turns[-1], random_seed=False) if talk.turns else "nothing has been said yet")
        elif text.startswith("/"):
            note(HELP)
        elif text:
            try:
                turn = talk.say(text, stop)
            except ContextError as error:
                note(error)
                continue
            except KeyboardInterrupt:  # in the middle of a long prompt: what was fed of it stays, the message doesn't
                note("stopped")
            else:
                if turn["finish_reason"] == "length" and talk.session.n_left < 1:
                    note("the context is full: /reset starts over, or start again with a larger --ctx")
            _resume(stop)


def _resume(stop: Stop) -> None:
    """Take Ctrl-C as the end of the answer; any other signal as the end of the chat."""
    import signal

    if stop.number == signal.SIGINT:
        stop.number = None
    stop.check()


def _read_line(stop: Stop) -> str | None:
    """The next message; None at the end of the input. Ctrl-C at the prompt only gives a new one."""
    from sluice.cli.signals import raising

    while True:
        try:
            with raising():
                _resume(stop)
                if not sys.stdin.isatty():
                    line = sys.stdin.buffer.readline(MAX_STDIN_BYTES)
                    return line.decode("utf-8", "replace") if line else None
                _edit_lines()
                return input("> ")
        except EOFError:
            print(flush=True)
            return None
        except KeyboardInterrupt:
            if sys.stdin.isatty():
                print(flush=True)
            note("Ctrl-D or /quit ends the chat")


def _edit_lines() -> None:
    """Let input() have line editing and history, where Python has them."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
