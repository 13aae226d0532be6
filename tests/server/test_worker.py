"""The worker with a real engine: company changes nothing, every job ends once, faults stay where they are."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import OrderedReader
from tiny import T, vocabulary, write_tiny

from sluice.config import EngineConfig
from sluice.engine import Engine
from sluice.engine.workspace import CHUNK
from sluice.errors import ContextError, InputError, ReadError, SluiceError
from sluice.server.jobs import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    Draining,
    Event,
    Failed,
    Finished,
    Job,
    PromptLogprobs,
    ServiceState,
    TokenEvent,
)
from sluice.server.worker import Worker
from sluice.text.sampling import SamplingParams, log_probabilities
from sluice.types import Read

SMALL: dict[str, Any] = {
    "n_layers": 2, "n_embd": 64, "n_head": 2, "n_head_kv": 1, "head_dim": 32, "n_ff_exp": 96, "expert_type": T.Q8_0
}  # fmt: skip
GREEDY = SamplingParams(temperature=0)
N_VOCAB = len(vocabulary()[0])
WAIT_S = 300  # longer than a benchmark beside the tests stops them


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("served") / "m.gguf", **SMALL).path


def opened(model: Path, streams: int, make_reader: Any = None, **options: Any) -> Engine:
    config = EngineConfig(**{"threads": 1, "ctx": 2048, "poison": True, "expert_slots": 9, **options}, streams=streams)
    return Engine(model, config, make_reader=make_reader)


@pytest.fixture(scope="module")
def wide(model: Path) -> Iterator[Engine]:
    with opened(model, 32) as engine:
        yield engine


@pytest.fixture(scope="module")
def narrow(model: Path) -> Iterator[Engine]:
    with opened(model, 3) as engine:
        yield engine


@pytest.fixture(scope="module")
def lone(model: Path) -> Iterator[Engine]:
    """One stream and every expert resident: what it says is what all others must say."""
    with opened(model, 1, expert_slots=1 << 20) as engine:
        yield engine


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


class Heard:
    """What a submitter was told; `on` may act on each event."""

    def __init__(self, on: Callable[[Heard, Event], None] | None = None) -> None:
        self.events: list[Event] = []
        self.over = threading.Event()
        self.ticket = 0
        self._on = on

    def __call__(self, event: Event) -> None:
        assert not self.over.is_set(), "told something after the end"
        self.events.append(event)
        if isinstance(event, (Finished, Failed)):
            self.over.set()
        if self._on is not None:
            self._on(self, event)

    @property
    def tokens(self) -> list[TokenEvent]:
        return [event for event in self.events if isinstance(event, TokenEvent)]

    @property
    def ids(self) -> list[int]:
        return [event.id for event in self.tokens if event.id is not None]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.tokens)

    def end(self) -> Finished | Failed:
        assert self.over.wait(WAIT_S), "it never ended"
        last = self.events[-1]
        assert isinstance(last, (Finished, Failed))
        return last

    def finished(self) -> Finished:
        end = self.end()
        assert isinstance(end, Finished), end
        return end

    def error(self) -> SluiceError:
        end = self.end()
        assert isinstance(end, Failed), end
        assert "\n" not in str(end.error)
        return end.error


def ask(worker: Worker, job: Job, on: Callable[[Heard, Event], None] | None = None) -> Heard:
    heard = Heard(on)
    heard.ticket = worker.submit(job, heard)
    return heard


def ids_of(n: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, n).tolist())


def job(prompt: Sequence[int], n: int | None = 8, **options: Any) -> Job:
    return Job(tuple(prompt), **{"params": GREEDY, "max_tokens": n, "ignore_eos": True, **options})


def alone(engine: Engine, job: Job) -> list[int]:
    sampling = {name: getattr(job.params, name) for name in SamplingParams.__dataclass_fields__}
    n = 2048 if job.max_tokens is None else job.max_tokens
    return [token.id for token in engine.generate(job.prompt, n, ignore_eos=job.ignore_eos, **sampling)]


def after(n: int, act: Callable[[Heard], None]) -> Callable[[Heard, Event], None]:
    """Do `act` at the n-th event."""
    return lambda heard, _event: act(heard) if len(heard.events) == n else None


def assert_adds_up(state: ServiceState) -> None:
    t = state.totals
    assert t.submitted == len(state.queue) + len(state.running) + t.finished + t.failed, state
    assert len(state.running) <= state.streams
    assert {request.phase for request in state.queue} <= {"queued"}
    for request in state.running:
        assert (request.fed == request.prompt_tokens) == (request.phase == "decode")
        assert request.reused <= request.fed and (request.generated > 0) == (request.phase == "decode")
    assert state.experts is not None
    assert int(state.experts.resident.sum()) == state.slots_resident <= state.slots
    assert state.experts.resident.shape == state.experts.heat.shape and (state.experts.heat >= 0).all()


def test_thirty_two_streams_each_as_if_alone(wide: Engine, lone: Engine) -> None:
    rng = random.Random(1)
    beginning = ids_of(CHUNK + 40, 99)
    jobs = [job(ids_of(rng.randint(1, 60), i), rng.randint(4, 24), client=f"client {i % 3}") for i in range(26)]
    jobs += [job(beginning + ids_of(rng.randint(1, 50), 50 + i), 12) for i in range(3)]  # whose first chunk is shared
    jobs += [job(beginning, 12)] * 3  # as the choices of one request are
    expected = [alone(lone, each) for each in jobs]
    with Worker(wide) as worker:

        def leave(heard: Heard) -> None:
            worker.cancel(heard.ticket)

        # neighbours that leave: in mid-decode, and in mid-prefill while others decode
        neighbours = [ask(worker, job(ids_of(10 + i, 200 + i), 500), after(3 + i, leave)) for i in range(4)]
        heard = [ask(worker, each) for each in jobs]
        far = [ask(worker, job(ids_of(3 * CHUNK, 300 + i), 5)) for i in range(3)]
        states = [worker.state() for _ in range(3)]
        for each in far:
            worker.cancel(each.ticket)
        for i, each in enumerate(heard):
            end = each.finished()
            assert each.ids == expected[i], f"job {i} says something else in company"
            assert (end.reason, end.generated, end.prompt_tokens) == ("length", len(expected[i]), len(jobs[i].prompt))
            assert end.ttft_s is not None and len(end.intervals_s) == end.generated - 1
        for i, each in enumerate(neighbours):
            assert isinstance(each.error(), Cancelled)
            assert each.ids == alone(lone, job(ids_of(10 + i, 200 + i), len(each.ids)))
        assert all(isinstance(each.error(), Cancelled) for each in far)
        state = worker.state()
    for each in (*states, state):
        assert_adds_up(each)
    assert sum(each.events[-1].reused_tokens for each in heard if isinstance(each.events[-1], Finished)) >= 5 * CHUNK
    assert state.totals.failures == {"cancelled": 7, "deadline": 0, "draining": 0, "error": 0}
    assert state.totals.generated_tokens == sum(len(each.ids) for each in heard + neighbours)
    assert not state.running and not state.queue


def test_who_is_cancelled_in_mid_prefill_leaves_others_as_they_are(narrow: Engine, lone: Engine) -> None:
    long = ids_of(3 * CHUNK + 9, 1)
    with Worker(narrow) as worker:
        leaver = Heard()
        stays = ask(worker, job(ids_of(5, 2), 30), after(3, lambda _: worker.cancel(leaver.ticket)))
        leaver.ticket = worker.submit(job(long, 5), leaver)
        assert isinstance(leaver.error(), Cancelled) and not leaver.tokens
        assert stays.finished() and stays.ids == alone(lone, job(ids_of(5, 2), 30))
        again = ask(worker, job(long, 5))
        assert again.finished().reused_tokens in range(0, 3 * CHUNK, CHUNK), "what it was fed is good, if it was any"
        assert again.ids == alone(lone, job(long, 5))


def test_choices_of_one_prompt_are_fed_once(narrow: Engine, lone: Engine) -> None:
    for n_prompt in (7, CHUNK, CHUNK + 20):
        of = job(ids_of(n_prompt, n_prompt), 6, params=SamplingParams(temperature=1.0, seed=3))
        jobs = [replace(of, params=replace(of.params, seed=seed)) for seed in range(3)]
        with Worker(narrow) as worker:
            heard = worker_jobs(worker, [(each, None) for each in jobs])
            assert sorted(each.finished().reused_tokens for each in heard) == [0, n_prompt, n_prompt]
            assert [each.ids for each in heard] == [alone(lone, each) for each in jobs]
            assert worker.state().totals.prompt_tokens == n_prompt
            assert worker.state().kept_tokens == 3 * (n_prompt // CHUNK * CHUNK)


def test_what_is_kept_serves_later_requests(narrow: Engine, lone: Engine) -> None:
    first = ids_of(2 * CHUNK + 30, 1)
    jobs = [job(first), job(first + ids_of(60, 2)), job(first[:CHUNK] + ids_of(90, 3)), job(first), job(ids_of(5, 4))]
    reused = []
    with Worker(narrow) as worker:
        for each in jobs:
            heard = ask(worker, each)
            reused.append(heard.finished().reused_tokens)
            assert heard.ids == alone(lone, each)
        state = worker.state()
    assert reused == [0, 2 * CHUNK, CHUNK, 2 * CHUNK, 0]
    assert state.totals.reused_tokens == sum(reused)
    assert state.totals.prompt_tokens == sum(len(each.prompt) for each in jobs) - sum(reused)
    assert state.kept_tokens >= 2 * CHUNK


def test_more_jobs_than_streams_wait(narrow: Engine, lone: Engine) -> None:
    jobs = [job(ids_of(3 + i, i), 4 + i % 5, client="ab"[i % 2]) for i in range(14)]
    with Worker(narrow, max_queue=11) as worker:
        hold = threading.Event()

        def block(_: Heard) -> None:
            hold.wait(WAIT_S)

        first = ask(worker, job((1,), 3), after(1, block))
        while not first.events:
            hold.wait(0.001)
        heard: list[Heard] = [Heard() for _ in jobs]
        taken = worker.submit_all(jobs[:13], lambda i, event: heard[i](event))
        with pytest.raises(Busy) as busy:
            worker.submit(jobs[13], heard[13])
        assert busy.value.retry_after_s >= 1
        hold.set()
        assert len(set(taken)) == 13
        for each, of in zip(heard[:13], jobs, strict=False):
            assert each.finished().queue_s >= 0 and each.ids == alone(lone, of)
        state = worker.state()
    assert state.totals.refused == 1 and state.totals.finished == 14
    assert_adds_up(state)


def test_seeds_say_the_same_in_any_company(narrow: Engine, lone: Engine) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, repeat_penalty=1.1, seed=7)
    drawn = job(ids_of(9, 1), 20, params=params)
    unseeded = job(ids_of(9, 1), 20, params=replace(params, seed=None))
    with Worker(narrow) as worker:
        heard = [ask(worker, each) for each in (drawn, job(ids_of(40, 2)), unseeded, drawn, unseeded)]
        seeds = [each.finished().seed for each in heard]
    assert heard[0].ids == heard[3].ids == alone(lone, drawn)
    assert seeds[0] == 7 and seeds[2] != seeds[4]
    for i in (2, 4):
        assert heard[i].ids == alone(lone, replace(drawn, params=replace(params, seed=seeds[i])))


def test_text_ends_as_it_does_alone(narrow: Engine, lone: Engine) -> None:
    prompt = ids_of(12, 5)
    whole = "".join(token.text for token in lone.generate(prompt, 30, temperature=0, ignore_eos=True))
    stop = whole[6:9]
    with Worker(narrow) as worker:
        stopped = ask(worker, job(prompt, 30, stop=(stop,)))
        held = ask(worker, job(prompt, 30, stop=(whole[-2:] + "!",)))
        nothing = ask(worker, job(prompt, 0))
        full = ask(worker, job(ids_of(2040, 6), None))
        assert (stopped.finished().reason, stopped.text) == ("stop", whole[: whole.index(stop)])
        assert (held.finished().reason, held.text) == ("length", whole)
        assert nothing.finished().generated == 0 and nothing.finished().ttft_s is None
        assert (full.finished().reason, len(full.ids)) == ("length", 9), "eight that fit, and one more"


def test_the_end_of_text_is_no_token(narrow: Engine) -> None:
    eos = narrow.tokenizer.eos_ids
    bias = dict.fromkeys(eos, 100.0)
    with Worker(narrow) as worker:
        heard = ask(worker, job(ids_of(4, 1), 20, logit_bias=bias, ignore_eos=False))
        assert heard.finished() and heard.finished().reason == "stop"
        goes_on = ask(worker, job(ids_of(4, 1), 5, logit_bias=bias))
        assert goes_on.finished().generated == 5 and set(goes_on.ids) <= set(eos)
    assert heard.ids == [] and heard.finished().generated == 0


def test_log_probabilities_are_the_models(narrow: Engine, lone: Engine) -> None:
    prompt = ids_of(9, 3)
    with Worker(narrow) as worker:
        asked = job(prompt, 6, top_logprobs=3, echo_logprobs=True, logit_bias={70: 100.0})
        heard = ask(worker, asked)
        plain = ask(worker, job(prompt, 6, top_logprobs=0))
        only = ask(worker, job(ids_of(CHUNK + 9, 4), 0, top_logprobs=0, echo_logprobs=True))
        for each in (heard, plain, only):
            each.finished()
    assert heard.ids == [70] * 6, "a bias of 100 decides"
    rows = log_probabilities(lone.logits(prompt))
    echo = heard.events[0]
    assert isinstance(echo, PromptLogprobs) and len(echo.logprobs) == len(echo.tops) == len(prompt)
    assert echo.logprobs[0] is None and echo.tops[0] == ()
    for i in range(1, len(prompt)):
        assert echo.logprobs[i] == pytest.approx(rows[i - 1][prompt[i]], rel=1e-12)
        assert [id for id, _ in echo.tops[i]] == np.argsort(-rows[i - 1], kind="stable")[:3].tolist()
    rows = log_probabilities(lone.logits([*prompt, *heard.ids]))[len(prompt) - 1 :]
    for event, row in zip(heard.tokens, rows, strict=False):
        assert event.logprob == pytest.approx(row[70], abs=1e-4), "bias is not in it"
        assert len(event.top) == 3 and event.top[0][1] >= event.top[1][1] >= event.top[2][1]
    assert plain.ids == alone(lone, job(prompt, 6)) and all(event.top == () for event in plain.tokens)
    assert only.ids == [] and isinstance(only.events[0], PromptLogprobs)
    long = log_probabilities(lone.logits(ids_of(CHUNK + 9, 4)))
    expected = [long[i - 1][id] for i, id in enumerate(ids_of(CHUNK + 9, 4)) if i]
    assert only.events[0].logprobs[1:] == pytest.approx(expected, rel=1e-12)


class Only:
    """A mask that lets `ids` come, and ends after `n` of them; `broken`: which call raises."""

    def __init__(self, ids: Sequence[int], n: int, broken: str = "") -> None:
        self.ids, self.n, self.broken = list(ids), n, broken

    @property
    def ended(self) -> bool:
        return self.n <= 0

    def allow(self, logits: np.ndarray) -> None:
        if self.broken == "allow":
            raise ZeroDivisionError("a mask\nthat is broken")
        kept = logits[self.ids]
        logits[:] = -np.inf
        logits[self.ids] = kept

    def accept(self, token: int) -> None:
        if self.broken == "accept":
            raise InputError("the structure can't go on: ask for another")
        self.n -= 1


def test_constraints_hold_and_broken_ones_hurt_nobody_else(narrow: Engine, lone: Engine) -> None:
    def unmakeable() -> Any:
        raise InputError("the schema is not one: send another")

    hot = SamplingParams(temperature=2.0, top_p=1.0, seed=1)
    prompt = ids_of(8, 1)
    with Worker(narrow) as worker:
        free = ask(worker, job(prompt, 30))
        held = ask(worker, job(prompt, 30, params=hot, constraint=lambda: Only([65, 66], 5)))
        makers = (unmakeable, lambda: Only([65], 3, "allow"), lambda: Only([65], 3, "accept"), lambda: Only([], 3))
        broken = [ask(worker, job(prompt, 30, constraint=make)) for make in makers]
        assert held.finished().reason == "stop" and len(held.ids) == 5 and set(held.ids) <= {65, 66}
        assert free.finished() and free.ids == alone(lone, job(prompt, 30))
        complaints = [str(each.error()) for each in broken]
        assert_adds_up(worker.state())
    for complaint, said in zip(complaints, ("not one", "ZeroDivisionError", "can't go on", "no token"), strict=True):
        assert said in complaint


def test_what_can_not_be_answered_is_refused_at_once(narrow: Engine) -> None:
    with Worker(narrow) as worker:
        for wrong, error in (
            (job([N_VOCAB]), InputError), (job([-1]), InputError), (job([1] * 2049), ContextError),
            (job([1], logit_bias={N_VOCAB: 1.0}), InputError),
        ):  # fmt: skip
            with pytest.raises(error):
                worker.submit(wrong, Heard())
        assert worker.state().totals.submitted == 0
    for wrong in (
        {"prompt": ()}, {"prompt": (1.5,)}, {"max_tokens": -1}, {"stop": ("",)}, {"stop": ("x",) * 99},
        {"deadline_s": 0},
        {"top_logprobs": 21}, {"echo_logprobs": True}, {"logit_bias": {1: 101.0}}, {"logit_bias": {1: float("nan")}},
    ):  # fmt: skip
        with pytest.raises(InputError):
            Job(**{"prompt": (1,), **wrong})


def test_deadlines_end_what_waits_and_what_runs(model: Path) -> None:
    ticks = itertools.count()  # a clock that a look at it moves on
    with opened(model, 1) as engine, Worker(engine, clock=lambda: float(next(ticks))) as worker:
        runs = ask(worker, job(ids_of(3, 1), 2000, deadline_s=100))
        waits = ask(worker, job(ids_of(3, 1), 2, deadline_s=50))
        assert isinstance(runs.error(), DeadlineExceeded) and isinstance(waits.error(), DeadlineExceeded)
        assert "100 s" in str(runs.error())
        assert 0 < len(runs.ids) < 100 and not waits.ids
        assert worker.state().totals.failures["deadline"] == 2


def test_a_submitter_that_does_not_listen_is_left(narrow: Engine, lone: Engine) -> None:
    def deaf(event: Event) -> None:
        raise RuntimeError("gone")

    with Worker(narrow) as worker:
        worker.submit(job(ids_of(3, 1), 1500), deaf)
        other = ask(worker, job(ids_of(3, 2), 9))
        assert other.finished() and other.ids == alone(lone, job(ids_of(3, 2), 9))
        while (state := worker.state()).running:
            pass
    assert state.totals.failures["cancelled"] == 1 and state.totals.finished == 1


def test_closing_finishes_or_reports(model: Path, lone: Engine) -> None:
    with opened(model, 2) as engine:
        jobs = [job(ids_of(3 + i, i), 6) for i in range(5)]
        worker = Worker(engine)
        heard = [ask(worker, each) for each in jobs]
        worker.close(None)
        assert all(each.over.is_set() for each in heard)
        assert [each.ids for each in heard] == [alone(lone, each) for each in jobs]
        with pytest.raises(Draining):
            worker.submit(jobs[0], Heard())
        assert worker.state().draining and worker.state().totals.finished == 5
        worker.close()

        worker = Worker(engine)
        heard = [ask(worker, job(ids_of(3, i), 2000)) for i in range(4)]
        assert worker.state().running
        worker.close(0)
        assert all(isinstance(each.error(), Draining) for each in heard)
        state = worker.state()
        assert state.totals.failures["draining"] == 4 and len(engine.free_streams) == 2
        assert_adds_up(state)


class Breaking(OrderedReader):
    """Every read fails while `broken`."""

    broken = False

    def complete(self, read: Read) -> None:
        if self.broken:
            self.fail(read, OSError(5, "Input/output error"))
        else:
            super().complete(read)


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_read_error_fails_those_in_the_step_and_no_others(model: Path, lone: Engine, at: str) -> None:
    def make(files: Any, pool: memoryview, locate: Any) -> Breaking:
        return Breaking(files, pool, locate, 3)

    with opened(model, 2, make, expert_slots=3, prefetch=False) as engine:
        reader = engine.store.reader
        assert isinstance(reader, Breaking)

        def mend(heard: Heard, event: Event) -> None:
            if isinstance(event, Failed):
                reader.broken = False

        def break_(heard: Heard, event: Event) -> None:
            mend(heard, event)
            if len(heard.events) == 3:
                reader.broken = True

        with Worker(engine) as worker:
            if at == "prefill":
                reader.broken = True
                heard = worker_jobs(worker, [(job(ids_of(3, i), 9), mend) for i in range(5)])
            else:
                heard = worker_jobs(worker, [(job(ids_of(3, i), 9), break_ if i == 0 else mend) for i in range(5)])
            ends = [each.end() for each in heard]
            assert [type(end) for end in ends] == [Failed, Failed, Finished, Finished, Finished]
            for i, (each, end) in enumerate(zip(heard, ends, strict=True)):
                expected = alone(lone, job(ids_of(3, i), 9))
                assert each.ids == expected[: len(each.ids)]
                if isinstance(end, Failed):
                    assert isinstance(end.error, ReadError) and "Input/output error" in str(end.error)
                    assert len(each.ids) <= 3
                else:
                    assert each.ids == expected
            state = worker.state()
        assert_adds_up(state)
        assert state.totals.failures["error"] == 2
        engine.store.cache.check()


def worker_jobs(worker: Worker, asked: list[tuple[Job, Callable[[Heard, Event], None] | None]]) -> list[Heard]:
    """Submit all at once, so that they begin together."""
    heard = [Heard(on) for _, on in asked]
    for each, ticket in zip(
        heard, worker.submit_all([one for one, _ in asked], lambda i, event: heard[i](event)), strict=True
    ):
        each.ticket = ticket
    return heard


def test_a_fault_in_the_thread_itself_leaves_nobody_waiting(narrow: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with Worker(narrow) as worker:

        def fail(*_: Any) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(worker, "_decode", fail)
        heard = worker_jobs(worker, [(job(ids_of(3, i), 9), None) for i in range(4)])
        assert all("RuntimeError: a bug" in str(each.error()) for each in heard)
        worker._thread.join()
        with pytest.raises(SluiceError, match="restart"):
            worker.submit(job((1,)), Heard())
        assert_adds_up(worker.state())
        assert "RuntimeError: a bug" in str(worker.state().fault)
    assert sorted(narrow.free_streams) == [0, 1, 2]


def test_the_map_of_experts_follows_the_demands(narrow: Engine) -> None:
    with Worker(narrow) as worker:
        before = worker.state().experts
        ask(worker, job(ids_of(3, 1), 30)).finished()
        after_ = worker.state()
    assert before is not None and after_.experts is not None
    assert after_.experts.layers == narrow.spec.moe_layers and not before.heat.any()
    demanded = after_.experts.heat > 0
    assert demanded.any(axis=1).all() and (after_.experts.resident.astype(bool) & demanded).any()
    phases = Counter(step.phase for step in after_.recent)
    assert phases == {"prefill": 1, "decode": 29} and after_.decode_tok_per_s is not None
    assert all(step.wall_s >= step.compute_s > 0 for step in after_.recent)
    assert "acquire" not in vars(narrow.store), "nobody listens any more"
