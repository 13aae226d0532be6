"""SentencePiece-style BPE as llama.cpp does it, by best score. It knows pieces and scores, not special tokens.

The pair of neighbours whose union is the token with the highest score is merged first, the leftmost of equals; what
ends up as no token is spelt in byte tokens. (`tokenizers` merges by a list of pairs, which can't say that two pairs
making the same token rank the same.) Source: llama.cpp, llm_tokenizer_spm_session.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

SPACE = "\u2581"
_CACHED_PIECES = 1 << 14
_CACHED_LENGTH = 64  # characters; longer pieces are rare and not worth their memory


class SpmEncoder:
    """Turns text, spaces already U+2581, into ids.

    `ids` maps the text of each token that text may become to its id, `scores[id]` ranks merges. A character no token
    covers becomes its UTF-8 bytes' `<0xXX>` tokens, or `unk_id` where those are missing, or nothing if that is None.
    """

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float], unk_id: int | None) -> None:
        self._ids = ids
        self._scores = scores
        self._bytes = [ids.get(f"<0x{b:02X}>", ids.get(chr(b), unk_id) if b < 128 else unk_id) for b in range(256)]
        # Neighbouring characters that no token contains side by side never end up in one token, so text can be cut
        # there without changing the result: what makes the pieces short and the cache useful.
        self._pairs = {text[i : i + 2] for text in ids for i in range(len(text) - 1)}
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        pairs, cache, out = self._pairs, self._cache, []
        start = 0
        for end in range(1, len(text) + 1):
            if end < len(text) and text[end - 1 : end + 1] in pairs:
                continue
            piece = text[start:end]
            start = end
            found = cache.get(piece)
            if found is None:
                found = self._merge(piece)
                if len(piece) <= _CACHED_LENGTH:
                    if len(cache) >= _CACHED_PIECES:
                        cache.clear()
                    cache[piece] = found
            out += found
        return out

    def _merge(self, piece: str) -> list[int]:
        ids, scores = self._ids, self._scores
        n = len(piece)
        whole = list(piece)  # the symbol that starts at each character; "" once merged into one on its left
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))
        queue: list[tuple[float, int, int, int]] = []  # (-score, left, right, length of the union)

        def offer(left: int, right: int) -> None:
            union = whole[left] + whole[right]
            token = ids.get(union)
            if token is not None:
                heapq.heappush(queue, (-scores[token], left, right, len(union)))

        for i in range(n - 1):
            offer(i, i + 1)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            if not whole[left] or not whole[right] or len(whole[left]) + len(whole[right]) != length:
                continue  # one of the two has changed since
            whole[left] += whole[right]
            whole[right] = ""
            after[left] = after[right]
            if after[left] < n:
                before[after[left]] = left
                offer(left, after[left])
            if before[left] >= 0:
                offer(before[left], left)
        out: list[int] = []
        for symbol in whole:
            if not symbol:
                continue
            token = ids.get(symbol)
            if token is not None:
                out.append(token)
            else:
                out += [b for b in map(self._bytes.__getitem__, symbol.encode()) if b is not None]
        return out
