"""Options that several commands share, as groups of fields that become parameters; knows how they parse, no more."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from sluice.config import KV_TYPE_NAMES, READERS, EngineConfig, parse_lora, parse_reroute, parse_size
from sluice.errors import InputError
from sluice.experts.policies import AUTO, POLICIES

MAX_SEED = (1 << 63) - 1
_MEMORY, _SAMPLING, _PROMPT = "Memory and speed", "Sampling", "Prompt"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A GGUF file, any shard of it, demo (the default), or nano.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object as the last line of stdout.")]


def _option(panel: str, *names: str, help: str, metavar: str = "") -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, show_default=False)


@dataclass(frozen=True)
class EngineOptions:
    """How to open a model. None is what was tuned, or else the engine's own default."""

    ram: Annotated[
        str | None,
        _option(
            _MEMORY, "--ram", metavar="SIZE", help="Memory of the whole process, like 4G. Default: ¾ of what is free."
        ),
    ] = None
    ctx: Annotated[
        int | None,
        _option(_MEMORY, "--ctx", metavar="N", help="Positions of context. Default: 4096 or the model's, if smaller."),
    ] = None
    threads: Annotated[
        int | None, _option(_MEMORY, "--threads", metavar="N", help="Threads for arithmetic. Default: the cores.")
    ] = None
    kv: Annotated[
        str,
        _option(
            _MEMORY, "--kv", metavar="TYPE", help=f"KV cache: {', '.join(KV_TYPE_NAMES)}; K,V for two. Default f16."
        ),
    ] = "f16"
    routing: Annotated[
        str,
        _option(
            _MEMORY, "--routing", metavar="MODE", help="exact: the model's own routes, the default. Lossy: prerouted, "
            "routes as --prerouter predicts them a token ahead.",
        ),
    ] = "exact"  # fmt: skip
    prerouter: Annotated[
        str | None,
        _option(_MEMORY, "--prerouter", metavar="FILE", help="Heads that predict routes a token ahead: experts are "
                "read as they say, on the processor. Same output, unless --routing prerouted."),
    ] = None  # fmt: skip
    reroute: Annotated[
        str | None,
        _option(_MEMORY, "--reroute", metavar="MARGIN[:J]", help="Lossy: in decode steps, experts not in memory give "
                "way to ones that are and score at most MARGIN less, but for a token's J best (1). No prefetch."),
    ] = None  # fmt: skip
    lora: Annotated[
        list[str] | None,
        _option(_MEMORY, "--lora", metavar="FILE[:SCALE]", help="A LoRA adapter, GGUF or saved by PEFT, served beside "
                "the weights. May be repeated."),
    ] = None  # fmt: skip
    top_k_experts: Annotated[
        int | None,
        _option(
            _MEMORY,
            "--top-k-experts",
            metavar="N",
            help="Lossy: only N experts a token, fewer than the model's own number.",
        ),
    ] = None
    no_prefetch: Annotated[
        bool, _option(_MEMORY, "--no-prefetch", help="Do not read experts ahead of their demand. Same output.")
    ] = False
    policy: Annotated[
        str | None,
        _option(
            _MEMORY, "--policy", metavar="NAME", help=f"Cache policy: auto, {', '.join(sorted(POLICIES))}. Default "
            "auto: lru, or cyclic where the pool is small for one step. Same output.",
        ),
    ] = None  # fmt: skip
    plan: Annotated[
        str | None,
        _option(_MEMORY, "--plan", metavar="FILE", help="Start with the experts that a plan file names, and keep its "
                "pins. Same output."),
    ] = None  # fmt: skip
    expert_slots: Annotated[
        int | None, _option(_MEMORY, "--expert-slots", metavar="N", help="Set the expert pool itself, in slots.")
    ] = None
    pool_share: Annotated[
        float | None, _option(_MEMORY, "--pool-share", metavar="X", help="Make only this share of the slots that --ram "
                              "holds. Default 1.")
    ] = None  # fmt: skip
    io_threads: Annotated[
        int | None, _option(_MEMORY, "--io-threads", metavar="N", help="Threads that read experts. Default 4.")
    ] = None
    device: Annotated[
        str,
        _option(_MEMORY, "--device", metavar="NAME", help="auto: a graphics processor, if the ggml in use brings one; "
                "cpu; or a name that `sluice doctor` lists. It rounds otherwise than the processor."),
    ] = "auto"  # fmt: skip
    vram: Annotated[
        str | None,
        _option(_MEMORY, "--vram", metavar="SIZE", help="Memory of the device to use. Default: 80 % of what is free."),
    ] = None
    gpu_layers: Annotated[
        int | None,
        _option(_MEMORY, "--gpu-layers", metavar="N", help="The last N layers' attention goes to the device. Default: "
                "as many as fit."),
    ] = None  # fmt: skip
    cpu_moe_layers: Annotated[
        int,
        _option(_MEMORY, "--cpu-moe-layers", metavar="N", help="The first N layers' experts stay off the device."),
    ] = 0
    reader: Annotated[
        str,
        _option(_MEMORY, "--reader", metavar="NAME", help=f"What reads experts: {', '.join(READERS)}."),
    ] = "auto"
    ggml: Annotated[
        str | None, _option(_MEMORY, "--ggml", metavar="PATH", help="A folder with other ggml libraries.")
    ] = None
    no_tuned: Annotated[
        bool, _option(_MEMORY, "--no-tuned", help="Leave out what `sluice tune` found for this model. Same output.")
    ] = False

    def config(self, *, ctx: int | None = None, **more: Any) -> EngineConfig:
        """As the engine takes it; `ctx` stands in where none was given. Raises InputError."""
        if self.routing == "prerouted" and self.prerouter is None and more.get("routes") is None:
            raise InputError(
                "--routing prerouted needs predictions: give --prerouter FILE, which `sluice prerouter init` makes"
            )
        if self.reroute is not None:
            more["reroute"], more["reroute_keep"] = parse_reroute(self.reroute)
        if self.plan is not None and self.policy is not None:
            raise InputError("--plan brings its own policy: leave out --policy, or make the plan with it")
        if self.ggml is not None and not Path(self.ggml).expanduser().exists():
            raise InputError(f"--ggml {self.ggml}: no such file or folder: name one that holds ggml's libraries")
        return EngineConfig(
            ram=None if self.ram is None else parse_size(self.ram),
            expert_slots=self.expert_slots,
            ctx=ctx if self.ctx is None else self.ctx,
            threads=self.threads,
            kv=self.kv,
            policy=AUTO if self.policy is None else self.policy,
            routing=self.routing,
            top_k_experts=self.top_k_experts,
            lora=tuple(parse_lora(text) for text in self.lora or ()),
            prefetch=not self.no_prefetch,
            **{name: value for name in ("io_threads", "pool_share") if (value := getattr(self, name)) is not None},
            reader=self.reader,
            device=self.device,
            vram=None if self.vram is None else parse_size(self.vram),
            gpu_layers=self.gpu_layers,
            cpu_moe_layers=self.cpu_moe_layers,
            ggml=None if self.ggml is None else Path(self.ggml),
            plan=None if self.plan is None else Path(self.plan),
            prerouter=None if self.prerouter is None else Path(self.prerouter),
            **more,
        )


@dataclass(frozen=True)
class SamplingOptions:
    """How to pick tokens; None is the command's own default."""

    temperature: Annotated[
        float | None,
        _option(_SAMPLING, "--temperature", metavar="T", help="0: always the likeliest. Default 0.7 (bench: 1)."),
    ] = None
    sample_top_k: Annotated[
        int, _option(_SAMPLING, "--sample-top-k", metavar="K", help="Keep the K likeliest tokens. Default 0: all.")
    ] = 0
    top_p: Annotated[
        float | None,
        _option(
            _SAMPLING, "--top-p", metavar="P", help="Keep the likeliest with that probability. Default 0.95 (bench: 1)."
        ),
    ] = None
    min_p: Annotated[
        float,
        _option(_SAMPLING, "--min-p", metavar="P", help="Keep those at that share of the likeliest. Default 0: all."),
    ] = 0.0
    repeat_penalty: Annotated[
        float, _option(_SAMPLING, "--repeat-penalty", metavar="R", help="Weaken what came lately. Default 1: off.")
    ] = 1.0
    seed: Annotated[
        int | None, _option(_SAMPLING, "--seed", metavar="S", help="Same seed, same tokens. Default: random, printed.")
    ] = None
    stop: Annotated[
        list[str] | None, _option(_SAMPLING, "--stop", metavar="TEXT", help="End before this text; may be repeated.")
    ] = None

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InputError(f"--seed {self.seed} is out of range: give 0 to {MAX_SEED}")
        if any(not text for text in self.stop or ()):
            raise InputError("--stop is empty: give at least one character")

    def params(self, *, temperature: float = 0.7, top_p: float = 0.95) -> dict[str, Any]:
        """SamplingParams' fields but the seed; the arguments stand in for what was not given."""
        return {
            "temperature": temperature if self.temperature is None else self.temperature,
            "sample_top_k": self.sample_top_k,
            "top_p": top_p if self.top_p is None else self.top_p,
            "min_p": self.min_p,
            "repeat_penalty": self.repeat_penalty,
        }


@dataclass(frozen=True)
class PromptOptions:
    """What to continue."""

    prompt: Annotated[
        str | None,
        _option(_PROMPT, "-p", "--prompt", metavar="TEXT", help="The prompt, put into the model's chat template."),
    ] = None
    prompt_ids: Annotated[
        str | None,
        _option(_PROMPT, "--prompt-ids", metavar="1,2,3", help="The prompt as token ids, taken as they are."),
    ] = None
    raw: Annotated[bool, _option(_PROMPT, "--raw", help="Take the prompt as it is, without the chat template.")] = False

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt_ids is not None:
            raise InputError("-p and --prompt-ids are both given: give one of them")
        if self.prompt == "":
            raise InputError("the prompt is empty: give -p some text")

    @property
    def ids(self) -> list[int] | None:
        """The ids of --prompt-ids; None if it wasn't given. Raises InputError."""
        if self.prompt_ids is None:
            return None
        try:
            ids = [int(part) for part in self.prompt_ids.split(",")]
        except ValueError:
            ids = []
        if not ids or min(ids) < 0:
            raise InputError(f"--prompt-ids {self.prompt_ids[:60]!r} is not a list of token ids: write it like 1,2,3")
        return ids


def check_count(name: str, value: int) -> int:
    """`value`, a whole number of at least 1. Raises InputError."""
    if value < 1:
        raise InputError(f"{name} {value} is too small: give a whole number of at least 1")
    return value


def grouped(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Let `command` take option groups: each parameter that is one becomes its fields, for the parser to see."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        group = groups.get(name)
        if group is None:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        types = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=types[f.name])
            for f in fields(group)
        ]
    parameters.sort(key=lambda p: p.kind)

    @wraps(command)
    def expanded(**given: Any) -> int | None:
        for name, group in groups.items():
            values = {each.name: given.pop(each.name) for each in fields(group)}
            given[name] = group(**values)  # type: ignore[operator]
        return command(**given)

    del expanded.__wrapped__  # type: ignore[attr-defined]  # or the parser would look through
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {p.name: p.annotation for p in parameters}
    return expanded


def arguments(group: Any) -> list[str]:
    """The command-line arguments that make `group` again: what differs from its defaults."""
    types = get_type_hints(type(group), include_extras=True)
    words: list[str] = []
    for each in fields(group):
        value = getattr(group, each.name)
        if value == each.default or value == []:
            continue
        option = next(a for a in get_args(types[each.name]) if hasattr(a, "param_decls"))
        name = [option.default, *option.param_decls][-1]  # typer keeps the first name as the "default"
        for one in value if isinstance(value, list) else [value]:
            words += [name] if one is True else [f"{name}={one}"]
    return words
