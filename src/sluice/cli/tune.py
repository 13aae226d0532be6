"""`sluice tune`: faster settings for a model on this machine, found by short runs and used from then on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Annotated, Any

import typer

from sluice.cli.children import result_of
from sluice.cli.opening import file_of, load_ggml, machine_with, resolve_model
from sluice.cli.options import EngineOptions, Json, Model, arguments, check_count
from sluice.cli.signals import Terminated
from sluice.cli.terminal import emit, note, print_facts, print_table, progress_bar
from sluice.config import EngineConfig, usable_cores
from sluice.errors import InputError

Budget = Annotated[
    str | None,
    typer.Option("--ram", metavar="SIZE", help="Memory of the whole process, as for run. Default: ¾ of what is free.",
                 show_default=False),
]  # fmt: skip
Context = Annotated[
    int | None,
    typer.Option("--ctx", metavar="N", help="Positions of context, which take memory too. Default: what the runs need.",
                 show_default=False),
]  # fmt: skip
Minutes = Annotated[float, typer.Option("--minutes", metavar="M", help="Take about so long at most.")]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", metavar="N", help="Of each run's prompt.")]
Gen = Annotated[int, typer.Option("--gen", metavar="N", help="Tokens that each run decodes.")]
Device = Annotated[
    str, typer.Option("--device", metavar="NAME", help="auto, cpu, or a name that `sluice doctor` lists, as for run.")
]
Vram = Annotated[
    str | None,
    typer.Option("--vram", metavar="SIZE", help="Memory of the device to use. Default: 80 % of what is free.",
                 show_default=False),
]  # fmt: skip
Ggml = Annotated[
    str | None,
    typer.Option("--ggml", metavar="PATH", help="A folder with other ggml libraries.", show_default=False),
]
Forget = Annotated[
    bool, typer.Option("--forget", metavar="", help="Forget what was found for this model, and measure nothing.")
]
SHARES = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
IO_THREADS = (1, 2, 4, 8, 16)


def tune(
    model: Model = "demo", ram: Budget = None, ctx: Context = None, minutes: Minutes = 10.0,
    prompt_tokens: PromptTokens = 32, gen: Gen = 32, device: Device = "auto", vram: Vram = None, ggml: Ggml = None,
    forget: Forget = False, json: Json = False,
) -> int:  # fmt: skip
    """Find settings with which this model decodes faster here, and use them from then on.

    Short runs of `sluice bench`, each a process of its own, compare settings in pairs, in turns: the share of the pool
    that is made, threads, prefetch, threads that read, reader, policy. More of anything is not assumed to be faster,
    and output stays the same. A change is kept if it wins by more than chance makes likely, and all of them together if
    they do so once more at the end. Commands that run the model then use them, for the same file on the same machine,
    where nothing else is asked for; --no-tuned leaves them out. Ctrl-C keeps the best so far. With a device, which is
    used as far as it goes, from how many layers its slots should take experts is tuned first.
    """
    from sluice.plan.tune import Knob, Sample, Search, Settings, Stopped
    from sluice.plan.tuned import Tuned, save
    from sluice.plan.tuned import forget as forget_settings

    check_count("--gen", gen)
    check_count("--prompt-tokens", prompt_tokens)
    if not 0 < minutes < 1e5:
        raise InputError(f"--minutes {minutes:g} can't be: give a number above 0")
    plain = EngineOptions(ram=ram, ctx=ctx, device=device, vram=vram, ggml=ggml, no_tuned=True)
    config = plain.config()  # checks the options too
    machine = machine_with(config)
    if forget:
        if (path := file_of(model)) is not None:
            forget_settings(path, machine)
        return 0
    path = resolve_model(model)
    layers = _device_layers(path, config)
    began = monotonic()
    budget: int | None = None
    interrupted = 0

    with progress_bar("tuning") as progress:

        def measure(settings: Settings) -> Sample:
            nonlocal budget, interrupted
            progress(min(monotonic() - began, minutes * 59), minutes * 60)
            started = monotonic()
            words = (f"--prompt-tokens={prompt_tokens}", f"--gen={gen}", "--repeat=1", "--temperature=0", "--seed=0")
            try:
                result = result_of("bench", str(path), *words, *arguments(replace(plain, **settings)))
            except (KeyboardInterrupt, Terminated) as end:
                interrupted = end.number if isinstance(end, Terminated) else 2
                raise Stopped("it was interrupted") from None
            budget = result["budget_bytes"]
            speed = result["tok_per_s"]
            if not speed:
                raise InputError(f"--gen {gen} is too few to measure a speed: give more")
            return Sample(settings, speed, monotonic() - started, result["tokens"])

        cores = usable_cores()
        threads = tuple(range(1, cores + 1)) if cores <= 8 else tuple(sorted({1, 2, 4, cores // 2, cores - 1, cores}))
        knobs = (
            *([Knob("cpu_moe_layers", _steps(layers))] if layers else []), Knob("pool_share", SHARES),
            Knob("threads", threads), Knob("no_prefetch", (False, True), ordered=False),
            Knob("io_threads", IO_THREADS), Knob("reader", ("auto", "threads"), ordered=False),
            Knob("policy", ("auto", "lru", "lfu"), ordered=False),
        )  # fmt: skip
        start = {
            **({"cpu_moe_layers": 0} if layers else {}), "pool_share": 1.0,
            "threads": cores, "no_prefetch": False, "io_threads": 4, "reader": "auto",
            "policy": "auto",
        }  # fmt: skip
        search = Search(start, knobs, measure, lambda: minutes * 60 - (monotonic() - began))
        found = search.run()
    changed = {name: value for name, value in found.best.items() if value != start[name]}
    saved = None
    if changed:
        gain = found.gain if found.gain is not None else search.gain_so_far()
        saved = save(Tuned.of(
            path, machine, budget=budget, settings=changed, gain=gain,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
        ))  # fmt: skip
    elif found.stopped is None:
        forget_settings(path, machine)  # the defaults have just been the best
    result = {
        "model": str(path), "machine": machine, "budget_bytes": budget, "start": start, "best": found.best,
        "settings": changed, "confirmed": found.confirmed, "gain": found.gain, "stopped": found.stopped,
        "start_tok_per_s": _speed(found.samples, start), "best_tok_per_s": _speed(found.samples, found.best),
        "tried": [
            {"knob": one.knob, "value": one.value, "ratios": one.ratios, "gain": one.gain, "verdict": one.verdict}
            for one in found.tried
        ],
        "runs": len(found.samples), "took_s": monotonic() - began, "saved": None if saved is None else str(saved),
    }  # fmt: skip
    if json:
        emit(result)
    else:
        _show(result)
    return 128 + interrupted if interrupted else 0


def _device_layers(path: Path, config: EngineConfig) -> int:
    """Layers of the model at `path` if it is run with a device, else 0. Raises InputError."""
    from sluice.engine.devices import device_of
    from sluice.gguf import open_gguf
    from sluice.models import family_of

    library = load_ggml(config.ggml)
    if device_of(library, config) is None:
        return 0
    file = open_gguf(path, library)
    return family_of(file).read_spec(file).n_layers


def _steps(layers: int) -> tuple[int, ...]:
    """Numbers of layers to try, from none to all: eighths."""
    return tuple(sorted({round(layers * i / 8) for i in range(9)}))


def _speed(samples: list[Any], settings: Mapping[str, Any]) -> float | None:
    """The median speed of the runs with these settings."""
    some = [sample.tok_per_s for sample in samples if sample.settings == settings]
    return median(some) if some else None


def _show(result: Mapping[str, Any]) -> None:
    rows = [
        [
            f"{one['knob']} {one['value']}",
            "" if one["gain"] is None else f"{one['gain']:+.1%}",
            str(len(one["ratios"])),
            one["verdict"],
        ]
        for one in result["tried"]
    ]
    print_table(("setting", "change", "pairs", "verdict"), rows)
    flags = " ".join(arguments(EngineOptions(**result["settings"])))
    facts = [("found", flags or "nothing that is faster than the defaults")]
    if result["start_tok_per_s"] is not None:
        facts.append(("tok/s", f"{result['best_tok_per_s']:.2f}, with the defaults {result['start_tok_per_s']:.2f}"))
    if result["gain"] is not None:
        kept = "kept" if result["confirmed"] else "not kept"
        facts.append(("last comparison", f"{result['gain']:+.1%}, {kept}"))
    print_facts(facts)
    if result["stopped"]:
        note(f"ended early: {result['stopped']}")
    if result["saved"]:
        note("used from now on for this file on this machine; --no-tuned leaves it out, `sluice tune --forget` forgets")
