"""Carries the events of a request's jobs from the worker's thread into the event loop. Knows no HTTP, no text shapes.

The worker never waits for a client: what it tells is queued. A client that leaves more than a bound of it waiting is
cut off by name, so it holds up nobody and fills no memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from sluice.errors import SluiceError
from sluice.server.jobs import Event, Failed, Finished, Job, Service


class SlowClient(SluiceError):
    """A client doesn't read what it asked for."""


class Run:
    """The jobs of one request, under way in `service`; use it in the event loop that made it.

    Making it submits the jobs, all or none. Raises what `Service.submit_all` does.
    """

    def __init__(self, service: Service, jobs: Sequence[Job], *, max_pending: int) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._max_pending = max_pending
        self._pending: list[tuple[int, Event]] = []
        self._news = asyncio.Event()
        self._cut = False
        self._tickets = dict(enumerate(service.submit_all(jobs, self._from_worker)))  # of jobs that have not ended

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return not self._tickets and not self._pending

    def cancel(self) -> None:
        """End what has not ended; what it would still tell is dropped."""
        self._cut = True
        for ticket in self._tickets.values():
            self._service.cancel(ticket)
        self._tickets.clear()
        self._pending.clear()

    async def events(self, timeout_s: float | None = None) -> list[tuple[int, Event]]:
        """What has come since the last call, in order, each with its job's index; waits for something to come.

        Empty after `timeout_s`, and at the end. Raises SlowClient when too much was left waiting.
        """
        if not self._pending and self._tickets:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
        if self._cut:
            raise SlowClient(f"more than {self._max_pending} tokens waited for this client, which reads too slowly")
        self._news.clear()
        came, self._pending = self._pending, []
        return came

    def _from_worker(self, index: int, event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is there to be told
            self._loop.call_soon_threadsafe(self._take, index, event)

    def _take(self, index: int, event: Event) -> None:
        if self._cut:
            return
        if isinstance(event, (Finished, Failed)):
            self._tickets.pop(index, None)
        self._pending.append((index, event))
        if len(self._pending) > self._max_pending:
            self.cancel()
        self._news.set()
