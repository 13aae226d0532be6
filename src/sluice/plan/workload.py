"""Says how many of each layer's experts a pool of some size lacks: by a trace, or by an assumption that is named.

A pool begins empty, and a read takes a slot that was never used as long as there is one. Knows nothing of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from sluice.errors import InputError
from sluice.experts.policies import suited
from sluice.lab.replay import Demands
from sluice.lab.simulate import free_before, policy_for, replay
from sluice.lab.stack_distance import LruStack
from sluice.lab.tiers import TierSlots, replay_tiers
from sluice.trace import TraceReader

# SPEC S4: on Qwen3-30B-A3B an LRU cache that holds 13.4 % of all experts serves 65.9 % of the requests. A power law
# through that point and (1, 1): 54 % at 5 %, 82 % at 40 %.
PAPER_SHARE, PAPER_HITS = 0.134, 0.659
PAPER_POWER = float(np.log(PAPER_HITS) / np.log(PAPER_SHARE))
ASSUMED_STEPS = 32


@dataclass(frozen=True)
class Absences:
    """Experts that each layer of each step runs, and those of them that must be read: [n_steps, n_moe_layers].

    `absent_share` is how likely an expert that nobody needs is to be absent from the full pool: what a wrong prediction
    reads. `free`: slots that were never used, before each step, [n_steps] or the same number for all.
    """

    needed: np.ndarray
    absent: np.ndarray
    absent_share: float
    free: np.ndarray | float = 0.0

    @classmethod
    def of(cls, demands: Demands, misses: np.ndarray, slots: int, phase: str) -> Absences:
        """The steps of a phase of a trace that was replayed from an empty pool; `misses` are of its executions."""

        def by_step(values: np.ndarray) -> np.ndarray:
            return demands.by_step(values.astype(float), phase)

        free = by_step(free_before(misses, slots)).max(axis=1, initial=0)  # what its first layer found
        return cls(by_step(demands.counts), by_step(misses), max(0.0, 1 - slots / demands.n_experts), free)

    def resident(self) -> Absences:
        """The same with every expert there."""
        return replace(self, absent=np.zeros_like(self.absent), absent_share=0.0, free=0.0)

    def only(self, steps: np.ndarray) -> Absences:
        """Some of the steps."""
        free = np.broadcast_to(self.free, len(self.needed))
        return replace(self, needed=self.needed[steps], absent=self.absent[steps], free=free[steps])

    @property
    def fresh(self) -> np.ndarray:
        """[n_steps, n_moe_layers]: those of the absent that are read into slots never used, with nothing read ahead."""
        return first_uses(self.absent, np.broadcast_to(self.free, len(self.absent)))

    @property
    def hit_rate(self) -> float | None:
        """Share of demands that were resident; None without demands."""
        total = float(self.needed.sum())
        return 1 - float(self.absent.sum()) / total if total else None


@dataclass(frozen=True)
class PhaseAbsences:
    """Both phases. `prompt_tokens[i]` is how many the i-th prompt step feeds."""

    decode: Absences
    prefill: Absences
    prompt_tokens: tuple[int, ...]


def first_uses(reads: np.ndarray, free: np.ndarray) -> np.ndarray:
    """[…, n_moe_layers]: how many of a step's `reads`, in the order of its layers, go into its `free` […] slots."""
    return np.diff(np.minimum(np.cumsum(reads, axis=-1), free[..., None]), axis=-1, prepend=0)


class Ahead(NamedTuple):
    """What reading ahead does to a pool: [n_steps, n_moe_layers] each.

    `needless` experts are read that nobody needs, and a share of `fresh` of all reads goes into slots never used.
    """

    needless: np.ndarray
    fresh: np.ndarray


def on_demand(absences: Absences) -> Ahead:
    """Nothing is read ahead."""
    return Ahead(np.zeros_like(absences.absent), _ratio(absences.fresh, absences.absent))


def ahead(absences: Absences, recall: float, top_k: int, n_expert: int) -> Ahead:
    """All layers' experts but the first one's are predicted with `recall`.

    What is predicted wrongly for one of a step's tokens may be right for another. Where it is read, it takes one of the
    slots never used, as long as there are some, so that they are gone sooner. In the mean: that such an expert is
    resident from then on, and may be needed after all, is left out.
    """
    layers = absences.needed.shape[1]
    nobodys = np.clip((n_expert - absences.needed) / max(1, n_expert - top_k), 0, 1)
    wrong = absences.needed * (1 - recall) * nobodys
    wrong[:, :1] = 0
    free = np.array(np.broadcast_to(absences.free, len(wrong)), float)
    needless, fresh = wrong * absences.absent_share, np.zeros_like(wrong)
    taken = 0.0  # of the slots never used, by needless reads
    for i in np.flatnonzero(free).tolist():
        left = max(0.0, free[i] - taken)
        needless[i] = wrong[i] * min(1.0, absences.absent_share + left / (layers * n_expert))
        reads = absences.absent[i] + needless[i]
        fresh[i] = _ratio(first_uses(reads, np.array(left)), reads)
        taken += float(fresh[i] @ needless[i])
    return Ahead(needless, fresh)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(part.shape), where=whole > 0)


class TierPrompts(NamedTuple):
    """What a device's slots and the pool below it do in each prompt step, of so many `tokens`.

    `absences` are those of both together; of the layers that have slots there, `above` demands are met on the device,
    `below` aren't, and `copies` experts go up or down: all without uploads for one step.
    """

    absences: Absences
    tokens: tuple[int, ...]
    above: Sequence[float]
    below: Sequence[float]
    copies: Sequence[float]


class TierLoad(NamedTuple):
    """What a device's slots and the pool below it do in a decode step: `absences` are those of both together.

    `above` demands are met on the device, `copies` experts go up or down, `read` are read, a step in the mean.
    """

    absences: Absences
    above: float
    copies: float
    read: float
    prompts: TierPrompts


class Workload(Protocol):
    """What is run."""

    @property
    def label(self) -> str:
        """What it is, in words, for whoever reads a prediction."""
        ...

    def absences(self, slots: int) -> PhaseAbsences:
        """What a pool of `slots` slots lacks."""
        ...

    def tiers(self, groups: Sequence[TierSlots], slots: int) -> TierLoad:
        """What steps find in a device's slots and in `slots` in RAM."""
        ...


def draw(moe_layers: int, top_k: int, share: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps of a token each: [steps, moe_layers] needed, and absent with probability `share` each, independently.

    The same every time; scaled so that `share` is their mean too.
    """
    needed = np.full((steps, moe_layers), float(top_k))
    absent = np.random.default_rng(0).binomial(top_k, share, needed.shape).astype(float)
    if absent.any():
        absent *= share * top_k / absent.mean()
    return needed, np.minimum(absent, top_k)


@dataclass(frozen=True)
class AssumedWorkload:
    """No trace: hit rates of the paper's shape (PAPER_HITS at PAPER_SHARE), and below one token's demand none.

    A prompt step of `prompt_tokens` tokens meets `prompt_experts` experts, of which the pool holds its share of all.
    The pool is full.
    """

    moe_layers: int
    n_expert: int
    top_k: int
    prompt_tokens: int
    prompt_experts: int

    @property
    def label(self) -> str:
        return (
            f"assumed: an LRU cache of {PAPER_SHARE:.1%} of all experts serves {PAPER_HITS:.1%} (Qwen3-30B-A3B's "
            "figures), none below one token's demand; give --trace to predict your own text"
        )

    def hit_rate(self, slots: int) -> float:
        if slots < self.moe_layers * self.top_k:
            return 0.0
        return min(1.0, slots / (self.moe_layers * self.n_expert)) ** PAPER_POWER

    def absences(self, slots: int) -> PhaseAbsences:
        share = min(1.0, slots / (self.moe_layers * self.n_expert))
        missing = 1 - self.hit_rate(slots)
        met = np.full((1, self.moe_layers), self.prompt_experts / self.moe_layers)
        return PhaseAbsences(
            Absences(*draw(self.moe_layers, self.top_k, missing, ASSUMED_STEPS), 1 - share),
            Absences(met, met * (1 - share), 1 - share),
            (self.prompt_tokens,),
        )

    def tiers(self, groups: Sequence[TierSlots], slots: int) -> TierLoad:
        """The hottest experts lie on the device, the next in RAM, and nobody moves."""
        found = self.absences(min(slots + sum(g.slots for g in groups), self.moe_layers * self.n_expert))
        shares = [(len(g.layers), min(1.0, g.slots / (len(g.layers) * self.n_expert))) for g in groups]
        above = sum(n * self.top_k * share**PAPER_POWER for n, share in shares)
        above_in_prompts = self.prompt_experts * sum(n * share for n, share in shares) / self.moe_layers
        all_there = self.prompt_experts * sum(n for n, share in shares if share) / self.moe_layers
        prompts = TierPrompts(
            found.prefill, found.prompt_tokens, [above_in_prompts], [all_there - above_in_prompts], [0.0]
        )
        return TierLoad(found.decode, above, 0.0, float(found.decode.absent.sum(axis=1).mean()), prompts)


class TraceWorkload:
    """What a trace recorded, replayed as on-demand reading would have gone, from an empty pool.

    Only decode steps of a single sequence count. Raises InputError for a trace of another model, and for one whose
    decode steps all have several sequences.
    """

    def __init__(self, path: Path, *, policy: str, fingerprint: str, moe_layers: Sequence[int], n_expert: int) -> None:
        with TraceReader(path) as reader:
            info = reader.info
            known = info.fingerprint and fingerprint
            if (info.moe_layers, info.n_expert) != (tuple(moe_layers), n_expert) or (
                known and info.fingerprint != fingerprint
            ):
                raise InputError(f"{path} was recorded on another model: record one on this")
            self._demands = demands = Demands.of(reader)
        self._path, self._policy = path, policy
        self._step_demand = len(info.moe_layers) * info.top_k
        self._single = {
            phase: (demands.by_step(demands.n_sequences, phase).max(axis=1, initial=0) == 1) | (phase == "prefill")
            for phase in ("decode", "prefill")
        }
        if len(self._single["decode"]) and not self._single["decode"].any():
            raise InputError(f"{path}: every decode step has several sequences: predictions are of one, record that")
        self._stack: LruStack | None = None

    @property
    def label(self) -> str:
        return f"the routes of {self._path}, policy {self._policy}, from an empty pool"

    def absences(self, slots: int) -> PhaseAbsences:
        demands = self._demands
        policy = suited(self._policy, slots, self._step_demand)
        if policy == "lru" and LruStack.covers(demands, slots):
            self._stack = self._stack or LruStack(demands)
            misses = self._stack.misses(slots)
        else:
            misses = replay(demands, policy_for(demands, policy, slots), slots)

        def of(phase: str) -> Absences:
            return Absences.of(demands, misses, slots, phase).only(self._single[phase])

        return PhaseAbsences(of("decode"), of("prefill"), self._prompt_tokens())

    def tiers(self, groups: Sequence[TierSlots], slots: int) -> TierLoad:
        """The trace replayed through the device's slots too, from empty ones."""
        demands = self._demands
        policy = suited(self._policy, slots, self._step_demand)
        found = replay_tiers(demands, groups, slots, policy)
        everywhere = slots + sum(group.slots for group in groups)

        def absences(phase: str) -> Absences:
            lacking = Absences.of(demands, found.misses, slots, phase).only(self._single[phase])
            return replace(lacking, absent_share=max(0.0, 1 - everywhere / demands.n_experts))

        def by_step(counts: np.ndarray, phase: str) -> np.ndarray:
            return demands.by_step(counts, phase)[self._single[phase]].sum(axis=1)

        copies = found.promotions + found.demotions
        sharing = [layer for group in groups if group.slots for layer in group.layers]
        below = (found.hits + found.misses) * np.isin(demands.layer, sharing)
        prompts = TierPrompts(
            absences("prefill"), self._prompt_tokens(),
            *(by_step(counts, "prefill").tolist() for counts in (found.above, below, copies)),
        )  # fmt: skip

        def mean(counts: np.ndarray) -> float:
            steps = by_step(counts, "decode")
            return float(steps.mean()) if len(steps) else 0.0

        above, moved, read = (mean(counts) for counts in (found.above, copies, found.misses))
        return TierLoad(absences("decode"), above, moved, read, prompts)

    def _prompt_tokens(self) -> tuple[int, ...]:
        """Of each prompt step."""
        demands = self._demands
        return tuple(demands.by_step(demands.n_tokens, "prefill").max(axis=1, initial=0).tolist())
