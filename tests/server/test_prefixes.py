"""Which stream a prompt gets and what it takes over: as much as there is, only what is the same, losing least."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.server.prefixes import Held, Place, best, place, shared

CHUNK = 3
# few tokens, so that beginnings are often the same
tokens = st.lists(st.integers(0, 1), max_size=14).map(lambda more: [7] * (len(more) // 2) + more)


@st.composite
def streams(draw: st.DrawFn) -> list[Held]:
    held = []
    for used in draw(st.permutations(range(draw(st.integers(1, 6))))):
        own = draw(tokens)
        held.append(Held(own, draw(st.integers(0, len(own) // CHUNK)) * CHUNK, draw(st.booleans()), used))
    i = draw(st.integers(0, len(held) - 1))
    held[i] = held[i]._replace(busy=False)
    return held


def most(prompt: list[int], held: Held) -> int:
    """The slow way."""
    return max(
        n for n in range(0, min(held.reusable, max(0, len(prompt) - 1)) + 1, CHUNK) if held.tokens[:n] == prompt[:n]
    )


@settings(max_examples=300, deadline=None)
@given(tokens, streams())
def test_a_prompt_takes_over_as_much_as_there_is(prompt: list[int], held: list[Held]) -> None:
    at, source, n = place(prompt, held, CHUNK)
    assert not held[at].busy
    assert n == max(most(prompt, one) for one in held)
    assert n == shared(prompt, held[source], CHUNK) and n < max(1, len(prompt)) and n % CHUNK == 0
    assert best(prompt, held, CHUNK)[1] == n
    idle = [one for one in held if not one.busy]
    lost = held[at].reusable - (n if at == source else 0)
    if at == source and n == held[at].reusable:
        assert lost == 0
    elif any(not one.reusable for one in idle):
        assert held[at].reusable == 0, "a stream that keeps nothing was idle"
    elif len(idle) > 1 and n:
        assert at != source, "what was shared is lost, and another stream was idle"
    elif len(idle) > 1:
        assert held[at].used == min(one.used for one in idle)


def held(n: int, *, first: int = 0, busy: bool = False, used: int = 0) -> Held:
    """A stream with `n` reusable tokens and two more."""
    return Held([first, *range(1, n + 2)], n, busy, used)


def test_the_next_turn_of_a_chat_goes_where_the_last_was() -> None:
    prompt = list(range(20))
    assert place(prompt, [held(3), held(9, used=5), held(0)], CHUNK) == Place(1, 1, 9)


def test_a_shared_beginning_is_copied_and_stays() -> None:
    prompt = [*range(6), 99, 98]
    assert place(prompt, [held(12, used=1), held(0)], CHUNK) == Place(1, 0, 6)
    assert place(prompt, [held(12, used=1), held(9, first=5, used=9)], CHUNK) == Place(1, 0, 6)
    assert place(prompt, [held(12, busy=True), held(9, first=5, used=9)], CHUNK) == Place(1, 0, 6)
    assert place(prompt, [held(12)], CHUNK) == Place(0, 0, 6), "the only idle stream gives up what is not shared"


def test_the_last_token_is_always_fed() -> None:
    assert place(list(range(9)), [held(12)], CHUNK) == Place(0, 0, 6)
    assert place(list(range(10)), [held(9)], CHUNK) == Place(0, 0, 9)


def test_nothing_shared_goes_to_the_stream_least_missed() -> None:
    assert place([50, 51, 52, 53], [held(9, used=2), held(3, used=1), held(6, used=3)], CHUNK) == Place(1, 1, 0)
    assert place([], [held(9, used=2), held(0, used=9)], CHUNK) == Place(1, 1, 0)
