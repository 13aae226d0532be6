"""What the reference experiment's trainings are asked to do, as recipes of `sluice train`. Knows no commands.

All pretrainings of a seed begin with the same numbers and see the same rows in the same order, so a run and its base
differ in what their recipes differ in and nothing else.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.train.recipe import COUNTED, COUNTS

Sections = dict[str, dict[str, Any]]
BASE: Sections = tomllib.loads((Path(__file__).parent / "base.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Size:
    """How large an experiment is. `base` is the base model's recipe.

    `passages` of `length` tokens of each domain are what is measured on; `margins` are what rerouting tries (MARGIN:J,
    see docs/routing.md); `stages` the options of the commands that write text and train stages.
    """

    name: str
    megabytes: float  # of text in each domain
    vocab: int
    valid: float  # share of the documents that are held out
    base: Sections
    passages: int
    length: int
    generate: int
    margins: tuple[str, ...]
    stages: Mapping[str, Mapping[str, Any]]
    quantised: str = "q4_0"


REFERENCE = Size(
    name="reference",
    megabytes=6,
    vocab=4096,
    valid=0.05,
    base=BASE,
    passages=32,
    length=256,
    generate=128,
    margins=("0.1", "0.3", "0.02:0", "0.03:0", "0.05:0"),
    stages={
        "text": {"prompts": 3000, "held_out": 64, "prompt_tokens": 32, "tokens": 96},
        "prerouter": {"steps": 500, "batch": 16, "length": 256, "lr": 2e-3, "warmup": 50},
        "recover": {"steps": 600, "batch": 16, "length": 128, "lr": 3e-3, "warmup": 50, "rank": 8,
                    "targets": "attention,experts"},
        "onpolicy": {"steps": 60, "batch": 16, "length": 128, "lr": 3e-4, "warmup": 10, "generate": 64},
    },
)  # fmt: skip

TOY = Size(
    name="toy",
    megabytes=0,
    vocab=320,
    valid=0.2,
    base={
        "model": {**BASE["model"], "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
                  "num_key_value_heads": 1, "head_dim": 16, "num_experts": 16, "moe_intermediate_size": 32},
        "train": {**BASE["train"], "steps": 6, "batch": 4, "length": 32, "warmup": 2, "log_every": 2, "save_every": 3,
                  "valid_every": 0},
        "data": {"valid_rows": 2},
    },
    passages=3,
    length=48,
    generate=8,
    margins=("0.1", "0.5:0"),
    stages={
        "text": {"prompts": 12, "held_out": 4, "prompt_tokens": 8, "tokens": 12},
        "prerouter": {"steps": 3, "batch": 4, "length": 24, "lr": 1e-3, "held_out": 2, "hidden": 8},
        "recover": {"steps": 3, "batch": 4, "length": 20, "lr": 1e-3, "held_out": 2, "rank": 2,
                    "targets": "attention,experts"},
        "onpolicy": {"steps": 2, "batch": 4, "length": 20, "lr": 1e-3, "held_out": 2, "generate": 8},
    },
)  # fmt: skip
SIZES = {size.name: size for size in (REFERENCE, TOY)}

LATE: dict[str, Any] = {"loss": "set", "weight": 0.6, "slots": 4, "anneal": "late"}
NUDGE: dict[str, Any] = {"loss": "margin", "weight": 0.2, "slots": 4, "anneal": "late"}
LIGHT: dict[str, Any] = {**NUDGE, "loss": "weight", "weight": 1.0, "tau": 0.03}
EASED: Sections = {"balance": {"final": 0.2}}
TAUGHT: Sections = {"distill": {"weight": 0.5, "anneal": "late"}}
STRICT: Sections = {"distill": {"weight": 0.8, "anneal": "late"}}

# The paper's three strengths of its loss, then tries of ours at its gate: what each changes of the base's recipe.
LOCALITY: Mapping[str, tuple[str, Sections]] = {
    "weak": ("chance that neighbours draw the same expert, λ 0.1", {"locality": {"loss": "overlap", "weight": 0.1}}),
    "medium": ("chance that neighbours draw the same expert, λ 0.4", {"locality": {"loss": "overlap", "weight": 0.4}}),
    "strong": ("chance that neighbours draw the same expert, λ 1.6", {"locality": {"loss": "overlap", "weight": 1.6}}),
    "margin": (
        "only where the router is nearly indifferent, against an LRU of its layer's own, λ rising over the second half",
        {"locality": {"loss": "margin", "weight": 1.0, "slots": 4, "anneal": "late"}},
    ),
    "set": (
        "the chosen set, straight through, against an LRU of its layer's own, from the first step",
        {"locality": {"loss": "set", "weight": 0.3, "slots": 4}},
    ),
    "late": (
        "the chosen set, λ rising over the second half",
        {"locality": LATE},
    ),
    "bias": (
        "as late; loads kept even by a bias instead of a loss",
        {"locality": LATE, "balance": {"loss": 0.0, "bias": 0.003}},
    ),
    "distill": (
        "as late, and half of the loss is the base model's distribution",
        {"locality": LATE, "distill": {"weight": 0.5}},
    ),
    "nudge": (
        "as margin, with a fifth of its λ",
        {"locality": NUDGE},
    ),
    "taught": (
        "as nudge, λ 0.25, and over the second half the base model's distribution comes to be half of the loss",
        {"locality": {**NUDGE, "weight": 0.25}, **TAUGHT},
    ),
    "firm": (
        "as taught, λ 0.35, and the base model's distribution comes to be all of the loss",
        {"locality": {**NUDGE, "weight": 0.35}, "distill": {"weight": 1.0, "anneal": "late"}},
    ),
    "hump": (
        "as taught, λ 0.4 at three quarters of the run and 0 at its end",
        {"locality": {**NUDGE, "weight": 0.4, "anneal": "hump"}, **TAUGHT},
    ),
    "routers": (
        "as hump, and by the locality loss the routers alone learn, not what they read",
        {
            "locality": {**NUDGE, "weight": 0.4, "anneal": "hump", "learns": "routers"},
            **TAUGHT,
        },
    ),
    "near": (
        "as nudge, λ 0.5, and indifferent is what is three times as near",
        {"locality": {**NUDGE, "weight": 0.5, "tau": 0.3}},
    ),
    "nearer": (
        "as near, λ 1.5, and ten times as near",
        {"locality": {**NUDGE, "weight": 1.5, "tau": 0.1}},
    ),
    "loose": (
        "as nudge, and over the second half the loss that keeps loads even falls to a fifth",
        {"locality": NUDGE, **EASED},
    ),
    "ease": (
        "as nearer, λ 1.0, and over the second half the loss that keeps loads even falls to a fifth",
        {"locality": {**NUDGE, "weight": 1.0, "tau": 0.1}, **EASED},
    ),
    "calm": (
        "as ease, λ 1.15, and over the second half the base model's distribution comes to be half of the loss",
        {"locality": {**NUDGE, "weight": 1.15, "tau": 0.1}, **EASED, **TAUGHT},
    ),
    "light": (
        "as ease, and near is what would move little of what a token's experts add: τ 0.03 of their weight",
        {"locality": LIGHT, **EASED},
    ),
    "feather": (
        "as light, and over the second half the base model's distribution comes to be half of the loss",
        {"locality": LIGHT, **EASED, **TAUGHT},
    ),
    "plume": (
        "as feather, λ 1.6",
        {"locality": {**LIGHT, "weight": 1.6}, **EASED, **TAUGHT},
    ),
    "quill": (
        "as feather, λ 1.2",
        {"locality": {**LIGHT, "weight": 1.2}, **EASED, **TAUGHT},
    ),
    "pinion": (
        "as feather, λ 2.4: as the stack's beginning",
        {"locality": {**LIGHT, "weight": 2.4}, **EASED, **TAUGHT},
    ),
    "wing": (
        "as pinion, run as rerouting by a margin that rises to 0.03 over the second half would run it; "
        "the base model's distribution comes to be four fifths of the loss",
        {"locality": {**LIGHT, "weight": 2.4, "reroute": 0.03, "keep": 0}, **EASED, **STRICT},
    ),
    "echo": (
        "a control, no locality: over the second half the base model's distribution comes to be half of the loss",
        TAUGHT,
    ),
    "gentle": (
        "chance that neighbours draw the same expert, λ 0.2; half of the loss is the base model's distribution",
        {"locality": {"loss": "overlap", "weight": 0.2}, "distill": {"weight": 0.5}},
    ),
}  # fmt: skip
OWN: dict[str, Any] = {"weight": 0.3, "begin": 0.55, "full": 0.75, "experts": "used", "enough": 0.95}
SHARED: dict[str, Any] = {**OWN, "experts": "hottest"}

# Tries of keeping each domain's text to few experts.
DOMAINS: Mapping[str, tuple[str, Sections]] = {
    "divided": (
        "experts divided over the domains by use, and tokens pushed until theirs have 95 % of their probability",
        {"domain": OWN},
    ),
    "shared": (
        "as divided, but each domain has those that it uses most, whoever else does; over the second half the loss "
        "that keeps loads even falls to a fifth, and the base model's distribution comes to be half of the loss",
        {"domain": SHARED, **EASED, **TAUGHT},
    ),
    "swapped": (
        "as shared, and pushed is what would move little of what a token's experts add, τ 0.1 of their weight, λ 1.5, "
        "while less than 93 % of choices are the domain's own",
        {"domain": {**SHARED, "loss": "weight", "weight": 1.5, "tau": 0.1, "enough": 0.93}, **EASED, **TAUGHT},
    ),
    "traded": (
        "as swapped, τ 0.07, λ 2, from 0.65 of the run in full, while less than 92 % of choices are the domain's own; "
        "the base model's distribution comes to be four fifths of the loss",
        {
            "domain": {**SHARED, "loss": "weight", "weight": 2.0, "tau": 0.07, "full": 0.65, "enough": 0.92},
            **EASED,
            **STRICT,
        },
    ),
}


def late(changes: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether changes do nothing before half of a run, so that it can branch off the base's."""
    return bool(changes) and all(
        _domain_late(values) if name == "domain"
        else values.get("anneal") in ("late", "hump") or set(values) == {"final"}
        for name, values in changes.items()
    )  # fmt: skip


def _domain_late(values: Mapping[str, Any]) -> bool:
    counted = COUNTED if values.get("experts") in COUNTS else 0
    return values.get("begin", 0) - counted >= 0.5 and not values.get("prior")


def recipe(size: Size, seed: int, *more: Sections) -> Sections:
    """The base's recipe with `more` on top."""
    found: Sections = {name: dict(values) for name, values in size.base.items()}
    for sections in ({"train": {"seed": seed}}, *more):
        for name, values in sections.items():
            found[name] = {**found.get(name, {}), **values}
    return found


def toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of numbers, texts and truths as TOML."""
    parts = []
    for name, values in sections.items():
        lines = [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in values.items())]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)
