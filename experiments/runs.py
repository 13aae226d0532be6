"""The reference experiment's runs: which commands each is, and what it needs first. Runs nothing.

data                         text of four domains, its tokens, held-out passages
base-s1 … base-s3            a small model from scratch, and what it costs
weak-s1 …                    the same with a locality loss: the paper's strengths, then tries of ours
choose                       which try is claimed, by a rule that was written down before: `chosen`
local-s2, local-s3           that try, with the other seeds
divided-s1 …                 tries of keeping a domain's text to few experts, over the second half
choose-domain                which of them is claimed, by a rule too
domain-s2, domain-s3         that try, with the other seeds
stack-s1 … stack-s3          cache-aware rerouting on the base, on a more local try, and on one trained rerouted
control                      the negative control: loading a domain's experts at a switch
live                         the engine's own counters on the exported files, against the simulator
text-sN, prerouter-sN, recover-sN, onpolicy-sN, stages-sN    three stages on 4 bits, and what each won back
survival                     what merging the adapter would leave
speed                        misses and tokens a second at 15 % of the experts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import choosing
import parts
from recipes import DOMAINS, LOCALITY, Sections, Size, late
from runner import Run, Step, Work

SEEDS = (1, 2, 3)
Steps = Callable[[Work], Sequence[Step]]
STAGES = {
    "text": ("text that the unquantised base writes", 5),
    "prerouter": ("stage 1: heads imitate the next layer's router", 4),
    "recover": ("stage 2: heads and adapter on the teacher's text", 10),
    "onpolicy": ("stage 3: the student writes, the teacher scores", 6),
}


def table(size: Size, texts: Mapping[str, str] | None = None) -> dict[str, Run]:
    """All runs by name, in an order in which they can be done. `texts` by domain are taken instead of the packages'."""
    runs: dict[str, Run] = {}

    def add(name: str, about: str, needs: tuple[str, ...], steps: Steps, minutes: float) -> None:
        runs[name] = Run(name, about, needs, steps, minutes)

    def trained(name: str, about: str, seed: int, changes: Sections) -> None:
        minutes = 10 if late(changes) else 18
        base = (f"base-s{seed}",) if late(changes) or "distill" in changes else ()
        add(name, about, ("data", *base), partial(parts.pretrained_steps, size, name, seed, changes), minutes)

    add("data", "text of four domains, its tokens, held-out passages", (), partial(parts.data_steps, size, texts), 5)
    for seed in SEEDS:
        trained(f"base-s{seed}", f"the base model, seed {seed}", seed, {})
    for name, (about, changes) in LOCALITY.items():
        trained(f"{name}-s1", f"locality: {about}", 1, changes)
    add("choose", "which of the tries that are done is claimed", ("base-s1",), choosing.choose_steps, 0)
    for seed in SEEDS[1:]:
        steps = partial(parts.local_steps, size, seed)
        add(f"local-s{seed}", f"the chosen try, seed {seed}", ("choose", f"base-s{seed}"), steps, 18)
    for name, (about, changes) in DOMAINS.items():
        trained(f"{name}-s1", f"domains: {about}", 1, changes)
    add("choose-domain", "which try of domains is claimed", ("base-s1",), choosing.choose_domain_steps, 0)
    for seed in SEEDS[1:]:
        steps = partial(parts.domain_steps, size, seed)
        needs = ("choose-domain", f"base-s{seed}")
        add(f"domain-s{seed}", f"the chosen try of domains, seed {seed}", needs, steps, 10)
    needs = ("choose", "base-s1")
    add("stack-s1", "rerouting on the base and on tries", needs, partial(parts.stack_steps, size, 1), 30)
    for seed in SEEDS[1:]:
        needs, steps = ("stack-s1", f"base-s{seed}"), partial(parts.stronger_steps, size, seed)
        add(f"stronger-s{seed}", f"the stack's model, where it isn't the claimed one, seed {seed}", needs, steps, 18)
        needs, steps = (f"stronger-s{seed}", f"local-s{seed}"), partial(parts.stack_steps, size, seed)
        add(f"stack-s{seed}", f"what was claimed of rerouting, seed {seed}", needs, steps, 5)
    needs = ("base-s1", "choose-domain")
    add("control", "loading a domain's experts at a switch", needs, partial(parts.control_steps, size), 2)
    needs = ("choose", "base-s1")
    add("live", "the engine's counters against the simulator", needs, partial(parts.live_steps, size), 5)
    for seed in SEEDS:
        previous = f"base-s{seed}"
        for stage, (about, minutes) in STAGES.items():
            steps = partial(parts.stage_steps, size, seed, stage)
            add(f"{stage}-s{seed}", f"{about}, seed {seed}", (previous,), steps, minutes)
            previous = f"{stage}-s{seed}"
        steps = partial(parts.stages_steps, size, seed)
        add(f"stages-s{seed}", f"what the stages won back, seed {seed}", (previous,), steps, 7)
    needs = ("onpolicy-s1",)
    add("survival", "what merging the adapter would leave", needs, partial(parts.survival_steps, size), 3)
    about = "misses and tokens a second at 15 % of the experts"
    add("speed", about, ("choose", *needs), partial(parts.speed_steps, size), 10)
    return runs
