"""Stage 3: the student writes, and learns from what its teacher would have written at each of its own tokens.

The student continues prompts on the path that is served. Loss: the mean over its tokens of KL(student ‖ teacher) on the
full distributions at that place, the teacher being the unquantised, natively routed model; gradients pass through the
student's distribution and not through the draws (on-policy distillation: Agarwal et al., arXiv 2306.13649). The
divergence is the reverse one: what the teacher would not write is what costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice.errors import InputError
from sluice.train import processes
from sluice.train.objective import Metrics
from sluice.train.prerouter import kl
from sluice.train.recover import OnStudentPath, Served
from sluice.train.repetition import repetition_rate
from sluice.train.texts import Text, TextBatch, text_batch

STAGE = "onpolicy"
_HELD_OUT_SEED = 1 << 40  # beyond those of steps


class OnPolicy(OnStudentPath):
    """Stage 3, on batches whose prompts are continued; what a teacher made of them is passed over in training."""

    stage = STAGE

    def __init__(self, served: Served, n_tokens: int, end: int, *, temperature: float = 1.0, seed: int = 0) -> None:
        """`n_tokens` at most are written for each prompt, `end` ends a text. Raises InputError as its base does."""
        super().__init__(served)
        if self.teacher is None:
            raise InputError("the student's own text is scored by a teacher, and there is none: give one")
        if n_tokens < 1 or not 0 < temperature < float("inf"):
            raise InputError(f"{n_tokens} tokens at temperature {temperature}: give at least 1, and more than 0")
        self.n_tokens, self.end, self.temperature, self.seed = n_tokens, end, temperature, seed
        self._step = 0

    def begin_step(self, step: int, steps: int) -> None:
        self._step = step  # decides what is drawn, so that a run that goes on draws what it would have drawn

    def loss(self, batch: TextBatch) -> tuple[Tensor, Metrics]:
        written = self.write(batch, (self.seed << 20) + self._step)
        share = processes.weight(int(written.answered.sum()))
        return share * self._divergence(written), self._manner(written)

    @torch.no_grad()
    def validate(self) -> Metrics:
        """`loss`: the reverse divergence on the student's own continuations of held-out prompts, the same draws each
        time; `repetition` in them; and what stage 2 measures on the teacher's texts: `text_loss`, `kl`, `teacher_loss`.
        """
        found = super().validate()
        if not found:
            return {}
        sums: dict[str, float] = {}
        seen = 0
        for i, batch in enumerate(self.served.held_out):
            written = self.write(batch, _HELD_OUT_SEED + i)
            n = int(written.answered.sum())
            values = {"loss": float(self._divergence(written)), **self._manner(written)}
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value * n
            seen += n
        own = {name: value / seen for name, value in sums.items()}
        return {"loss": own.pop("loss"), **own, "text_loss": found.pop("loss"), **found}

    @torch.no_grad()
    def write(self, batch: TextBatch, seed: int) -> TextBatch:
        """The batch with the student's continuations in place of the teacher's."""
        batch = batch.to(self.device)
        prompts = [row[: int(n)] for row, n in zip(batch.ids, batch.n_prompt, strict=True)]
        grown = self.student.generate(
            prompts, self.n_tokens, temperature=self.temperature, seed=seed, stop=(self.end,)
        )  # fmt: skip
        texts = [
            Text(row.cpu().numpy(), len(prompt), int(domain))
            for row, prompt, domain in zip(grown, prompts, batch.domain, strict=True)
        ]
        return text_batch(texts, max(map(len, grown)), self.end).to(self.device)

    def _divergence(self, written: TextBatch) -> Tensor:
        logits = self.student(written.ids, written.native).logits[written.answered].float()
        return kl(logits, self.taught(written))

    def _manner(self, written: TextBatch) -> Metrics:
        rates = [repetition_rate(ids) for ids in _answers(written)]
        some = [rate for rate in rates if rate is not None]
        n = written.n - written.n_prompt
        return {"repetition": sum(some) / max(1, len(some)), "written": float(n.float().mean())}


def _answers(batch: TextBatch) -> Sequence[list[int]]:
    return [
        row[int(first) : int(last)].tolist()
        for row, first, last in zip(batch.ids, batch.n_prompt, batch.n, strict=True)
    ]  # fmt: skip
