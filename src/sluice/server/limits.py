"""How much a request may ask for, and how much all of them together may hold. Knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

# what the description of the routes states; the model's own bounds (context, vocabulary) stand where they are checked
MAX_FIELDS = 256
MAX_MESSAGES = 4096
MAX_PARTS = 256  # of a message
MAX_CHOICES = 64  # of one prompt
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_TOOLS = 128
MAX_USER_CHARACTERS = 256
MAX_TOP_LOGPROBS = 20
MAX_FIGURES = 1 << 17  # log-probabilities of an answer that are held; as JSON is made of them, 450 bytes each
MAX_TEMPERATURE = 100.0
MAX_COUNT = 1 << 31  # of counts whose real bound is the model's
_BYTES_PER_TOKEN = 32  # of a body: ids spelled out in JSON, or long words of code
# What a server takes beside its engine while it runs, of a budget: requests under way, the vocabulary's and schemas'
# tables of structured output, graphs of changing company. In one mixed load of minutes it grew by 105 MiB, 40 of which
# the engine counts.
SERVER_BYTES = 96 << 20


@dataclass(frozen=True)
class Limits:
    """Bounds on how requests arrive and answers leave.

    `body_bytes`: of one request; all that are read or prepared at a time may hold `BODIES` times as much. `depth`: of
    its JSON; `containers`: lists and objects in it, of which three bytes take seventy of memory. `choices`: prompts by
    n. `pending_events`: tokens that a client has not taken yet before it is cut off. `connections`: open at a time.
    Times in seconds: `head_s` that a connection may stay open without a request, `body_s` for a body to arrive,
    `headers_s` until a stream's headers are sent though nothing has been generated, `comment_s` between the comments
    that keep a silent stream open, `send_s` for a client to take what is sent.
    """

    BODIES: ClassVar[int] = 4

    body_bytes: int = 8 << 20
    depth: int = 64
    containers: int = 1 << 16
    choices: int = MAX_CHOICES
    pending_events: int = 2048
    connections: int = 512
    head_s: float = 30.0
    body_s: float = 60.0
    headers_s: float = 5.0
    comment_s: float = 15.0
    send_s: float = 30.0

    @classmethod
    def for_context(cls, n_ctx: int) -> Limits:
        """Bounds that suit a context of `n_ctx` positions: a longer body could not hold a prompt that fits."""
        return cls(body_bytes=min(cls.body_bytes, (1 << 20) + n_ctx * _BYTES_PER_TOKEN))
