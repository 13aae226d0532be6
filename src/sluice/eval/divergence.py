"""How far the predictions of two engines are apart on the same tokens, which run one after the other. It opens neither.

Of every scored token (`sluice.eval.windows`) there is KL(reference ‖ other) = Σ p (ln p − ln q) over the vocabulary, in
nats, p the reference's probabilities and q the other's, both taken in float64 from float32 logits; and whether both
hold the same token for the likeliest.

The two may be too large to be in memory together, so the reference's logits wait in a temporary file, as the float32
that the engine computed: 4 bytes × vocabulary a token. Less would be cheaper and no longer KL. Half precision moves a
logit of 16 by up to 0.008, so that even equal engines would differ by about 1e-5; the likeliest K, with the rest as one
lump, give a lower bound.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from sluice.errors import InputError, SluiceError
from sluice.eval.perplexity import Tally, pooled
from sluice.eval.windows import Progress, Row, Score, each_scored, lead_of, log_softmax, n_scored

if TYPE_CHECKING:
    from sluice.engine import Engine


@dataclass(frozen=True)
class Vocabulary:
    """What two models must have in common for their predictions to be compared."""

    n_logits: int
    digest: str  # of the tokens' texts, in order

    @classmethod
    def of(cls, engine: Engine) -> Vocabulary:
        digest = hashlib.sha256()
        for i in range(engine.tokenizer.n_vocab):
            text = engine.tokenizer.token_bytes(i)
            digest.update(len(text).to_bytes(8, "little") + text)
        return cls(engine.spec.n_vocab, digest.hexdigest())


@dataclass
class Difference:
    """Two engines on the same tokens. `kl`: nats, one a token. `same`: tokens with the same likeliest next."""

    kl: list[float] = field(default_factory=list)
    same: int = 0
    reference: Tally = field(default_factory=Tally)
    other: Tally = field(default_factory=Tally)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form. `ppl_change` is the other's perplexity ÷ the reference's − 1."""
        kl = np.array(self.kl)
        return {
            "tokens": len(kl),
            "kl": {
                "mean": float(kl.mean()),
                "median": float(np.quantile(kl, 0.5)),
                "p95": float(np.quantile(kl, 0.95)),
                "max": float(kl.max()),
            },
            "same_top": self.same / len(kl),
            "ppl": self.other.ppl,
            "ppl_reference": self.reference.ppl,
            "ppl_change": self.other.ppl / self.reference.ppl - 1,
        }


def together(differences: Iterable[Difference]) -> Difference:
    """All tokens of several texts as one."""
    each = list(differences)
    return Difference(
        [kl for one in each for kl in one.kl],
        sum(one.same for one in each),
        pooled(one.reference for one in each),
        pooled(one.other for one in each),
    )


@dataclass(frozen=True)
class Recorded:
    """A reference's logits in a file, and what they were computed for."""

    file: IO[bytes]
    texts: Mapping[str, Sequence[int]]  # tokens, without a BOS
    lead: tuple[int, ...]  # what was fed before each window
    ctx: int
    vocabulary: Vocabulary


def spooled_bytes(engine: Engine, texts: Mapping[str, Sequence[int]]) -> int:
    """What `record` will write."""
    n_lead = len(lead_of(engine))
    return sum(n_scored(len(ids), n_lead) for ids in texts.values()) * engine.spec.n_vocab * 4


def record(
    engine: Engine, texts: Mapping[str, Sequence[int]], file: IO[bytes], progress: Progress | None = None
) -> Recorded:
    """Write the reference's logits of each text, given as tokens without a BOS, to `file`, open for reading too.

    Raises as `sluice.eval.perplexity.perplexity` does.
    """

    def score(token: int, logits: Row) -> None:
        file.write(np.asarray(logits, np.float32).tobytes())

    each_scored(engine, texts, lambda name: score, progress=progress)
    file.flush()
    return Recorded(file, texts, lead_of(engine), engine.n_ctx, Vocabulary.of(engine))


def compare(engine: Engine, recorded: Recorded, progress: Progress | None = None) -> dict[str, Difference]:
    """How `engine` differs from a reference, text by text. Raises InputError where the two can't be compared."""
    if Vocabulary.of(engine) != recorded.vocabulary:
        raise InputError(
            "the two models have different vocabularies, so their predictions can't be compared: name a reference with "
            "the same tokenizer"
        )
    if engine.n_ctx != recorded.ctx:
        raise InputError(
            f"the reference's context is {recorded.ctx} and the other's {engine.n_ctx}: give both the same"
        )
    recorded.file.seek(0)
    found: dict[str, Difference] = {}
    n_bytes = engine.spec.n_vocab * 4

    def use(name: str) -> Score:
        difference = found[name] = Difference()

        def score(token: int, logits: Row) -> None:
            raw = recorded.file.read(n_bytes)
            if len(raw) < n_bytes:
                raise SluiceError("the reference's logits in the temporary file end too early: run it again")
            reference = np.frombuffer(raw, np.float32)
            theirs, ours = log_softmax(reference), log_softmax(logits)
            difference.reference.add(float(theirs[token]))
            difference.other.add(float(ours[token]))
            difference.same += int(reference.argmax() == logits.argmax())
            # never negative but for rounding, of which equal logits have none
            difference.kl.append(max(0.0, float(np.exp(theirs) @ (theirs - ours))))

        return score

    each_scored(engine, recorded.texts, use, lead=recorded.lead, progress=progress)
    return found
