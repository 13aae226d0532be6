"""From a MODEL argument to an open engine, with what the user should be told; knows no command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.cli.signals import Stop
from sluice.cli.terminal import note, progress_bar
from sluice.config import EngineConfig, format_size, parse_size, usable_cores
from sluice.errors import ContextError, GgmlError, InputError
from sluice.nano import ADAPTER, HEADS, MODEL, NAME, nano_file

if TYPE_CHECKING:
    from sluice.cli.options import EngineOptions
    from sluice.engine import Engine, Session
    from sluice.ggml import Library
    from sluice.io.files import ModelFiles
    from sluice.plan.tuned import Tuned


def resolve_model(model: str) -> Path:
    """The file of a MODEL argument; builds the demo model the first time. Raises InputError."""
    if model == NAME:
        return nano_file()
    if model != "demo":
        return Path(model)
    from sluice.demo import demo_path, ensure_demo

    if not demo_path().exists():
        note("building the demo model, once")
    with progress_bar("building the demo model") as progress:
        return ensure_demo(lambda share: progress(share, 1.0))


def settled(model: str, engine: EngineOptions) -> EngineOptions:
    """`engine` with what was tuned for the model where nothing else is asked for.

    For predicted routes of nano without --prerouter also with nano's own heads, and its adapter before others.
    """
    if model == NAME and engine.routing == "prerouted" and engine.prerouter is None:
        engine = replace(engine, prerouter=str(nano_file(HEADS)), lora=[str(nano_file(ADAPTER)), *(engine.lora or ())])
    path = file_of(model)
    if engine.no_tuned or path is None or (found := tuned_for(path, engine.config())) is None:
        return engine
    from sluice.engine.budget import DEFAULT_SHARE
    from sluice.memory import free_bytes

    budget = int(free_bytes() * DEFAULT_SHARE) if engine.ram is None else parse_size(engine.ram)
    settings = (found.without_pool() if engine.expert_slots is not None else found.for_budget(budget)).settings
    kept = {name for name, given in (("policy", engine.plan), ("no_prefetch", engine.prerouter)) if given is not None}
    plain = {each.name: each.default for each in fields(engine)}
    changes = {n: v for n, v in settings.items() if n not in kept and getattr(engine, n) == plain[n]}
    return replace(engine, **changes)


def file_of(model: str) -> Path | None:
    """The file of a MODEL argument, if it is there already."""
    from sluice.demo import demo_path

    path = {"demo": demo_path(), NAME: MODEL}.get(model) or Path(model)
    return path if path.is_file() else None


def tuned_for(path: Path, config: EngineConfig) -> Tuned | None:
    """What `sluice tune` has kept for a model file on this machine, and the device of it that is asked for."""
    from sluice.plan.tuned import find, folder

    return find(path, machine_with(config)) if folder().is_dir() else None


def machine_with(config: EngineConfig) -> str:
    """This machine by name, and by that of the device beside the processor that would be used."""
    from sluice.cli.machine import cpu_name
    from sluice.plan.measure import machine_name

    machine, device = machine_name(cpu_name(), usable_cores()), device_for(config)
    return machine if device is None else f"{machine}, with {device}"


def device_for(config: EngineConfig) -> str | None:
    """The name of the device beside the processor that would be used; None for none. Raises InputError."""
    from sluice.engine.devices import device_of

    device = device_of(load_ggml(config.ggml), config)
    return None if device is None else f"{device.name} ({device.description})"


def load_ggml(path: str | Path | None) -> Library:
    """ggml's library; one that the user named and that does not do is the input's fault."""
    from sluice.ggml import load_library

    try:
        return load_library(path)
    except GgmlError as error:
        if path is not None:
            raise InputError(str(error)) from error
        raise


def open_engine(
    path: Path, config: EngineConfig, stop: Stop, *,
    open_files: Callable[[Sequence[Path]], ModelFiles] | None = None,
) -> Engine:  # fmt: skip
    """An engine, ready. Ends where `stop` asks for it."""
    from sluice.engine import Engine

    load_ggml(config.ggml)
    stop.check()
    what = "the resident weights" if config.plan is None else "the resident weights and the planned experts"
    with progress_bar(f"loading {what}") as show:

        def progress(done: int, total: int) -> None:
            stop.check()
            show(done, total)

        engine = Engine(path, config, progress=progress, open_files=open_files)
    try:
        stop.check()
    except BaseException:
        engine.close()
        raise
    return engine


def announce(engine: Engine) -> None:
    """Say on stderr what was chosen and what is doubtful; for when nothing is left that could be refused."""
    from sluice.engine.budget import DEFAULT_SHARE, budget_for, round_up_size

    plan, spec, config = engine.plan, engine.spec, engine.config
    if config.ram is None and config.expert_slots is None and plan.budget is not None:
        of = len(spec.moe_layers) * spec.n_expert
        note(
            f"budget {format_size(plan.budget)}, {DEFAULT_SHARE:.0%} of the memory that is free (--ram sets it): "
            f"{plan.slots} of {of} experts fit"
        )
    if (placed := engine.placed) is not None:
        note(
            f"plan {placed.name}: {placed.loaded} experts loaded ({format_size(placed.bytes_read)} in "
            f"{placed.seconds:.1f} s), {placed.pins} of them pinned, the rest left to {placed.policy}"
        )
    for line in engine.notes:
        note(line)
    if (device := engine.device) is not None:
        note(
            f"{device['name']}: {device['layers']} of {spec.n_layers} layers and {device['slots']} slots for experts, "
            f"{format_size(device['bytes'])} of {format_size(device['budget_bytes'])} (--device cpu leaves it out)"
        )
    if plan.below_floor and engine.device is None:
        enough = round_up_size(budget_for(plan.needs, plan.slot_bytes, plan.floor_slots))
        note(
            f"warning: {plan.slots} expert slots are fewer than the {plan.floor_slots} experts that one token needs, "
            f"so most are read anew for each: --ram {enough} holds them"
        )
    if tuned := _tuned_text(engine.config, engine.file.paths[0]):
        note(f"tuned for this model: {tuned} (--no-tuned leaves it out)")
    if spec.skipped:
        note(f"left in the file: {len(spec.skipped)} tensors of multi-token prediction or other modalities")
    if engine.threads > (cores := usable_cores()):
        note(f"warning: {engine.threads} threads on {cores} cores wait for one another: fewer are faster")
    if not engine.library.tried:
        note(f"warning: ggml {engine.library.version} is newer than any that Sluice was tried with")


def _tuned_text(config: EngineConfig, path: Path) -> str:
    """Those of the tuned settings that are in use."""
    found = tuned_for(path, config)

    def used(name: str) -> Any:
        return not config.prefetch if name == "no_prefetch" else getattr(config, name)

    return ", ".join(f"{n} {v}" for n, v in (found.settings if found else {}).items() if used(n) == v)


def check_prompt(engine: Engine, ids: Sequence[int]) -> None:
    """Raise InputError or ContextError for a prompt that a new session of `engine` can't take."""
    if not ids:
        raise InputError("the prompt has no tokens: give it some text")
    if (last := max(ids)) >= engine.spec.n_vocab:
        raise InputError(f"token id {last} is outside of the vocabulary of {engine.spec.n_vocab}: give smaller ids")
    if len(ids) > engine.n_ctx:
        raise ContextError(
            f"the prompt has {len(ids)} tokens and the context {engine.n_ctx} positions: shorten it, or raise --ctx"
        )


def feed_ahead(session: Session, ids: list[int], stop: Stop) -> list[int]:
    """Feed all of a prompt but its last chunk, which is returned; looks at `stop` between chunks.

    The chunks are those that feeding it at once would make, so the result has the same bits.
    """
    from sluice.engine.workspace import chunks

    begun, pieces = len(session.tokens), list(chunks(len(session.tokens), ids))
    with progress_bar("reading the prompt") as show:
        for piece in pieces[:-1]:
            session.feed(piece)
            stop.check()
            show(len(session.tokens) - begun, len(ids))
    return pieces[-1] if pieces else []
