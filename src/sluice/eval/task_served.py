"""A server with OpenAI's API as lm-eval's model: its `local-completions`, with a model file's tokenizer. Knows no task.

Prompts go as token ids, so the server tokenizes nothing. Multiple choice needs `echo` with `logprobs`, which scores an
answer as part of the prompt: modes that change decode steps alone are not seen there.
"""

from __future__ import annotations

import contextlib
import io
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

from sluice.errors import InputError, SluiceError, words_of

if TYPE_CHECKING:
    from sluice.text.tokenizer import Tokenizer

_Base: Any = LocalCompletionsAPI  # a decorator hides its type
TIMEOUT_S = 3600
_ANSWER_BYTES = 1 << 20


class ServedLM(_Base):
    """lm-eval's requests, sent to `url`, the address of a server (with or without /v1), `concurrent` at a time."""

    def __init__(self, url: str, tokenizer: Tokenizer, *, ctx: int, concurrent: int, key: str | None = None) -> None:
        base = base_of(url)
        header = {"Authorization": f"Bearer {key}"} if key else {"Accept": "application/json"}
        super().__init__(
            base_url=f"{base}/v1/completions", tokenizer_backend=None, model=served_model(base, header),
            max_length=ctx + 1, num_concurrent=max(2, concurrent), timeout=TIMEOUT_S, max_retries=3, header=header,
        )  # fmt: skip
        self.url = base
        self.text = tokenizer
        self.tokenizer = tokenizer  # lm-eval asks whether there is one
        self.tokenizer_backend = "sluice"
        self.tokenized_requests = True
        self.truncated = 0

    @property
    def eot_token_id(self) -> int:
        return min(self.text.eos_ids, default=0)

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.text.bos_id is None else self.text.bos_id

    @property
    def eos_string(self) -> str:
        return self.text.token_bytes(self.eot_token_id).decode(errors="replace")

    def tok_encode(self, string: Any, *_: Any, add_special_tokens: bool | None = None, **kwargs: Any) -> Any:
        if not isinstance(string, str):
            return [self.tok_encode(each) for each in string]
        return self.text.encode(string, bos=None if add_special_tokens is None else add_special_tokens)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        with _quiet(self.url):
            return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        with _quiet(self.url):
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        with _quiet(self.url):
            return super().generate_until(requests, disable_tqdm=True)


@contextlib.contextmanager
def _quiet(url: str) -> Any:
    """Without lm-eval's own progress bars; what goes wrong with the server is said in a line."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except (SluiceError, MemoryError):
        raise
    except Exception as error:  # of whatever library lm-eval sends with
        said = words_of(error)
        raise SluiceError(f"{url}: does not answer as needed ({said}): check the server and its log") from None


def base_of(url: str) -> str:
    """The address of a server, without /v1 and what follows. Raises InputError for what is no http address."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InputError(f"--url {url[:100]!r} is no address: write it like http://127.0.0.1:8000")
    path = parts.path.partition("/v1")[0].rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def served_model(base: str, header: dict[str, str]) -> str:
    """The id of the first model that a server lists. Raises InputError where it can't be asked."""
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{base}/v1/models", headers=header), timeout=30) as answer:
            listed: Sequence[Any] = json.loads(answer.read(_ANSWER_BYTES))["data"]
            return str(listed[0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{base}: lists no model ({error}): check the address, and that it is served") from None
