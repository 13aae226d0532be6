"""Answers a file of requests in OpenAI's batch format with one service, as wide as that is. Knows no HTTP, no terminal.

It is the API without a network: requests are checked, prepared and answered by the same code. What a request is at
fault for is its answer, with the status that the API gives it; what the machine is at fault for (a file that can't be
read) ends the run, and is tried again by the next.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from sluice.errors import InputError, SluiceError
from sluice.server import chat, completions
from sluice.server.answers import Shape
from sluice.server.asking import Asker
from sluice.server.batch_files import Answers, Line, Requests
from sluice.server.bodies import parse
from sluice.server.errors import as_api_error, bad
from sluice.server.jobs import Event, Failed, Finished, Job, Service
from sluice.server.limits import Limits
from sluice.server.model import ServedModel
from sluice.server.schemas import ChatRequest, CompletionRequest, GenerationRequest

AHEAD = 2  # jobs under way for each stream: as many wait as run, so that no stream is ever without one
LOOK_S = 0.2  # how often `check` is called where nothing happens
ENVELOPE_BYTES = 1 << 16  # of a line, beside its body
_R = TypeVar("_R", bound=GenerationRequest)
_ASKER = Asker("batch")


def most_jobs(streams: int, limits: Limits) -> int:
    """How many jobs may wait at a time: the queue that the service needs."""
    return AHEAD * streams + limits.choices


@dataclass
class Summary:
    """What a run did. `answered` lines have a status of 200, `failed` another or none."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    first_failure: str | None = None
    wall_s: float = 0.0


@dataclass
class _UnderWay:
    """A request whose jobs are being answered."""

    line: Line
    shape: Shape
    left: int  # jobs that have not ended
    tickets: list[int] = field(default_factory=list)
    error: SluiceError | None = None


class Offline:
    """One run over IN. `check` is called now and then, and may raise to end it; so does `progress` (done, of all)."""

    def __init__(
        self, service: Service, model: ServedModel, limits: Limits, *, width: int,
        check: Callable[[], object] = lambda: None, progress: Callable[[float, float], None] = lambda done, of: None,
    ) -> None:  # fmt: skip
        self.summary = Summary()
        self._service = service
        self._model = model
        self._limits = limits
        self._width = AHEAD * width
        self._check = check
        self._progress = progress
        self._events: SimpleQueue[tuple[int, int, Event]] = SimpleQueue()  # (line, job, event), from the worker
        self._under_way: dict[int, _UnderWay] = {}
        self._jobs = 0

    def run(self, requests: Requests, answers: Answers, left: int) -> None:
        """Answer every line that has no answer yet, `left` of them. Raises SluiceError for what is the machine's fault.

        However it ends, every line that OUT holds is whole.
        """
        began = time.monotonic()
        lines = self._unanswered(requests, answers)
        more = True
        try:
            while more or self._under_way:
                self._check()
                while more and self._jobs < self._width:
                    self._check()
                    if (line := next(lines, None)) is None:
                        more = False
                    elif (answer := self._begin(line)) is not None:
                        self._write(answers, line, answer)
                    self._drain(answers, wait=False)
                self._drain(answers, wait=bool(self._under_way))
                self._progress(self.summary.answered + self.summary.failed, left)
            requests.check_unchanged()
        finally:
            for each in self._under_way.values():
                for ticket in each.tickets:
                    self._service.cancel(ticket)
            self.summary.wall_s = time.monotonic() - began

    def _unanswered(self, requests: Requests, answers: Answers) -> Iterator[Line]:
        for line in requests.lines():
            if answers.answered.digest(line.key) is None:
                yield line

    def _begin(self, line: Line) -> dict[str, Any] | None:
        """Submit a line's jobs; or its answer, where it is known without any."""
        try:
            jobs, shape = self._prepared(line)
        except _NoRequest as error:
            said = {"code": "invalid_request", "message": f"line {line.number}: {error}"}
            return _answer(line, None, said)
        except Exception as error:
            return self._refused(line, error)
        under_way = _UnderWay(line, shape, len(jobs))
        self._under_way[line.number] = under_way
        self._jobs += len(jobs)
        number = line.number
        try:
            put = self._events.put
            under_way.tickets = self._service.submit_all(jobs, lambda i, event: put((number, i, event)))
        except InputError as error:
            self._jobs -= len(jobs)
            del self._under_way[number]
            return self._refused(line, error)
        return None

    def _prepared(self, line: Line) -> tuple[list[Job], Shape]:
        """The jobs of a line, and what gathers their answer. Raises _NoRequest, and what preparing raises."""
        limits, model = self._limits, self._model
        body, url = _request_of(line, limits)

        def prepared(kind: type[_R], prepare: Callable[..., tuple[list[Job], Shape]]) -> tuple[list[Job], Shape]:
            asked = kind.model_validate(body)
            model.check(asked.model)
            if asked.stream:
                raise bad("a batch's answers come whole: leave out stream", "stream")
            return prepare(asked, model, _ASKER, limits)

        if url == "/v1/chat/completions":
            return prepared(ChatRequest, chat.prepare)
        return prepared(CompletionRequest, completions.prepare)

    def _drain(self, answers: Answers, *, wait: bool) -> None:
        """Take what the worker has told; with `wait`, until it tells something or some time has passed."""
        while True:
            try:
                number, job, event = self._events.get(timeout=LOOK_S) if wait else self._events.get_nowait()
            except Empty:
                return
            wait = False
            self._take(answers, self._under_way[number], job, event)

    def _take(self, answers: Answers, request: _UnderWay, job: int, event: Event) -> None:
        if isinstance(event, Failed):
            request.error = request.error or event.error
        elif request.error is None:
            list(request.shape.take(job, event))
        if isinstance(event, Finished):
            self.summary.prompt_tokens += event.prompt_tokens
            self.summary.reused_tokens += event.reused_tokens
            self.summary.generated_tokens += event.generated
        if not isinstance(event, (Finished, Failed)):
            return
        self._jobs -= 1
        request.left -= 1
        if request.left:
            return
        del self._under_way[request.line.number]
        if request.error is not None and not isinstance(request.error, InputError):
            raise request.error
        answer = (
            self._refused(request.line, request.error) if request.error is not None
            else _answer(request.line, _response(200, request.shape.whole()), None)
        )  # fmt: skip
        self._write(answers, request.line, answer)

    def _refused(self, line: Line, error: Exception) -> dict[str, Any]:
        """The answer to a request that the API would refuse."""
        told = as_api_error(error)
        return _answer(line, _response(told.status, told.body), None)

    def _write(self, answers: Answers, line: Line, answer: dict[str, Any]) -> None:
        answers.append(answer, line, time.monotonic())
        response = answer["response"]
        if response is not None and response["status_code"] == 200:
            self.summary.answered += 1
            return
        self.summary.failed += 1
        if self.summary.first_failure is None:
            error = answer["error"] if response is None else response["body"]["error"]
            self.summary.first_failure = f"line {line.number}: {error['message'].removeprefix(f'line {line.number}: ')}"


class _NoRequest(Exception):
    """A line is no request at all."""


def _request_of(line: Line, limits: Limits) -> tuple[dict[str, Any], str]:
    """The body and url of a line. Raises _NoRequest."""
    if line.raw is None:
        raise _NoRequest("it is longer than a request may be")
    try:
        value = json.loads(line.raw)
    except (ValueError, RecursionError) as error:
        raise _NoRequest(f"it is no JSON ({str(error)[:120]})") from None
    if not isinstance(value, dict):
        raise _NoRequest("it is no JSON object")
    if line.custom_id is None:
        raise _NoRequest("it has no custom_id that is a text")
    if not line.custom_id or len(line.custom_id) > MAX_ID:
        raise _NoRequest(f"its custom_id has {len(line.custom_id)} characters: give 1 to {MAX_ID}")
    if value.get("method", "POST") != "POST":
        raise _NoRequest("its method is not POST")
    url = value.get("url")
    if url not in URLS:
        raise _NoRequest(f"its url is {str(url)[:60]!r}: give {' or '.join(URLS)}")
    body = value.get("body")
    if not isinstance(body, dict):
        raise _NoRequest("its body is no JSON object")
    return parse(json.dumps(body).encode("utf-8", "surrogatepass"), limits), str(url)


URLS = ("/v1/chat/completions", "/v1/completions")
MAX_ID = 512


def _response(status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req-{secrets.token_hex(12)}", "body": body}


def _answer(line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    id = f"batch_req_{secrets.token_hex(12)}"
    return {"id": id, "custom_id": line.custom_id, "response": response, "error": error}
