"""What SIGINT, SIGTERM and SIGHUP do to a command; knows nothing of what the command does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_Handler = Callable[[int, FrameType | None], object]


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived. Like KeyboardInterrupt, no Exception: only cleaning up may catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_for(number: int) -> None:
    """Raise what the signal stands for."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(number)


class Stop:
    """Whether a signal has asked for the end, and which. Cleared by setting `number` to None."""

    def __init__(self) -> None:
        self.number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None

    @property
    def exit_code(self) -> int:
        """The shell's convention: 128 + the signal's number. 0 when none came."""
        return 0 if self.number is None else 128 + self.number

    def check(self) -> None:
        """Raise KeyboardInterrupt or Terminated if a signal has come."""
        if self.number is not None:
            raise_for(self.number)


@contextmanager
def raising() -> Iterator[None]:
    """Within, signals raise KeyboardInterrupt or Terminated at once."""
    with _handled(lambda number, frame: raise_for(number)):
        yield


@contextmanager
def deferred() -> Iterator[Stop]:
    """Within, the first signal only sets `Stop`, to be looked at between steps; the second raises at once.

    So threads and native memory are never left in the middle of being made or of a step.
    """
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop:
            raise_for(number)
        stop.number = number

    with _handled(handle):
        yield stop


@contextmanager
def noted() -> Iterator[list[int]]:
    """Within, signals are only noted, in the order in which they come; none raises, however many they are."""
    came: list[int] = []
    with _handled(lambda number, frame: came.append(number)):
        yield came


@contextmanager
def _handled(handler: _Handler) -> Iterator[None]:
    before = {}
    for number in (signal.SIGINT, *_ENDING):
        if number in _ENDING and signal.getsignal(number) == signal.SIG_IGN:
            continue  # started with nohup
        before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
