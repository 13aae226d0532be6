"""What is served: a model's id, what its answers should name, and its tokens as text. Knows no requests.

Safe to use from several threads: nothing here computes with the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from sluice.engine import Engine
from sluice.server.errors import ApiError
from sluice.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity; this is what OpenAI writes for it


BUILT_IN = ("demo", "nano")


def model_id(model: str, path: Path) -> str:
    """The id of the MODEL that a command was given, whose file is `path`: its own if it comes with Sluice, else the
    file's name without ending and shard number."""
    if model in BUILT_IN:
        return model
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.name.removesuffix(".gguf")) or "model"


@dataclass(frozen=True)
class ServedModel:
    """The open model and the id that requests name it by. `created`: seconds since 1970, when it was opened."""

    engine: Engine
    id: str
    created: int

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def n_ctx(self) -> int:
        return self.engine.n_ctx

    @cached_property
    def mode(self) -> Mapping[str, Any]:
        """Every knob that can change an answer, resolved."""
        return self.engine.mode | {"ctx": self.engine.n_ctx}

    @cached_property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: another one, other answers."""
        said = json.dumps([self.id, dict(self.mode)], sort_keys=True, default=str)
        return f"sluice-{sha256(said.encode()).hexdigest()[:12]}"

    def check(self, name: str | None) -> None:
        """Raise ApiError (404) if a request names another model."""
        if name is not None and name != self.id:
            raise ApiError(
                404, f"the model {name[:100]!r} is not served: this server has {self.id!r}", param="model",
                code="model_not_found",
            )  # fmt: skip

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a prompt without a chat template; control tokens' text stands for those, as the client's own
        template may have written it, and the start token comes first where the model wants one."""
        tokenizer = self.tokenizer
        ids = tokenizer.encode(prompt, special=True, bos=False)
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def token(self, id: int) -> str:
        """A token's text; bytes that are no characters in themselves are spelled out, as OpenAI does."""
        raw = self.tokenizer.token_bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_bytes(self, id: int) -> list[int]:
        return list(self.tokenizer.token_bytes(id))


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)
