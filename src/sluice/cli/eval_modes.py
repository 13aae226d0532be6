"""The modes that `sluice eval tasks --compare` names, as configurations of an engine. It opens none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sluice.cli.options import EngineOptions
from sluice.config import EngineConfig, parse_reroute
from sluice.errors import InputError

EXACT = "exact"
FORMS = ("exact", "reroute:MARGIN[:J]", "topk:N", "kv:TYPE", "kv:K/V", "prerouted", "lora")
_REMEDY = f"choose from {', '.join(FORMS)}, or several joined by +, as a,b+c,d"


def given_mode(engine: EngineOptions, **more: Any) -> dict[str, EngineConfig]:
    """What the flags themselves describe, by the name "given", or "exact" where they change no output."""
    config = engine.config(**more)
    plain = replace(config, routing="exact", reroute=None, kv="f16", top_k_experts=None, lora=())
    return {EXACT if config == replace(plain, prefetch=config.prefetch) else "given": config}


def parse_modes(text: str, engine: EngineOptions, **more: Any) -> dict[str, EngineConfig]:
    """Each mode's configuration, the reference first. Raises InputError for an unknown one, or one given twice.

    Flags that change output say the same as modes, so they are refused; --lora and --prerouter name files for the modes
    that use them.
    """
    for flag, given in (
        ("--routing", engine.routing != EXACT), ("--reroute", engine.reroute is not None), ("--kv", engine.kv != "f16"),
        ("--top-k-experts", engine.top_k_experts is not None),
    ):  # fmt: skip
        if given:
            raise InputError(f"--compare names what each mode changes: leave out {flag} and name a mode that says it")
    plain = replace(engine, lora=None, prerouter=None).config(**more)
    files = engine if engine.prerouter is None else replace(engine, routing="prerouted")
    known = files.config(**more) if engine.lora or engine.prerouter else plain
    found: dict[str, EngineConfig] = {}
    used: set[str] = set()
    for name in (mode.strip() for mode in text.split(",")):
        parts = [part.strip() for part in name.split("+")]
        used.update(parts)
        config = _mode(name, parts, plain, known)
        if config in found.values():
            raise InputError(f"--compare {text[:200]}: {name} is there twice: name each mode once")
        found[name] = config
    for flag, given, mode in (("--lora", engine.lora, "lora"), ("--prerouter", engine.prerouter, "prerouted")):
        if given and mode not in used:
            raise InputError(f"{flag} is for the mode {mode} of --compare: name that mode, or leave it out")
    return found


def _mode(name: str, parts: Sequence[str], plain: EngineConfig, known: EngineConfig) -> EngineConfig:
    changes: dict[str, Any] = {}
    for part in parts:
        change = _change(part, known)
        if (part == EXACT and len(parts) > 1) or changes.keys() & change.keys():
            raise InputError(f"--compare {name[:100]!r} says the same thing twice: {_REMEDY}")
        changes |= change
    return replace(plain, **changes)


def _change(part: str, known: EngineConfig) -> dict[str, Any]:
    """The fields that a part of a mode's name sets."""
    kind, _, value = part.partition(":")
    if part == EXACT:
        return {}
    if kind == "reroute" and value:
        margin, keep = parse_reroute(value)
        return {"reroute": margin, "reroute_keep": keep}
    if kind == "topk" and value.isdecimal() and len(value) < 6:
        return {"top_k_experts": int(value)}
    if kind == "kv" and value:
        return {"kv": value.replace("/", ",")}
    if part == "lora":
        if not known.lora:
            raise InputError("--compare lora needs --lora FILE")
        return {"lora": known.lora}
    if part == "prerouted":
        if known.prerouter is None:
            raise InputError("--compare prerouted needs --prerouter FILE, which `sluice prerouter init` makes")
        return {"routing": "prerouted", "prerouter": known.prerouter}
    raise InputError(f"--compare {part[:60]!r} is unknown: {_REMEDY}")
