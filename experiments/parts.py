"""The steps of each of the reference experiment's runs, as commands, and the numbers taken from their results.

It knows which run's files another needs, not which runs there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from choosing import MOST_STACK_PPL, best, misses, ppl
from recipes import DOMAINS, LOCALITY, Sections, Size, late, recipe, toml
from runner import Json, Step, Work

CAPACITY = 0.134  # of all experts
SPEED_CAPACITY = 0.15
ONE_THREAD = ("--kv", "f32", "--threads", "1")  # models this small gain nothing by a second, which others may need
SLOW_DISK = "8M"  # bytes a second: at 14 KB an expert, all of a token's 16 would take 27 ms
LABELS = {"base": "base", "local": "locality-trained", "stronger": "more local", "rerouted": "trained rerouted"}
TEXTS = ("code", "mathematics", "medicine", "prose")


def slots(size: Size, share: float) -> int:
    """A share of all experts in whole slots, rounded as the laboratory rounds."""
    model = size.base["model"]
    return int(share * model["num_experts"] * model["num_hidden_layers"] + 0.5)


# --- names of files, relative to the work folder


def model_of(name: str) -> str:
    return f"runs/{name}/train/model"


def file_of(name: str, kind: str) -> str:
    """A run's model as GGUF: f32, or q4."""
    return f"runs/{name}/{kind}.gguf"


def local(work: Work, seed: int) -> str:
    """The name of the run of the claimed try with a seed."""
    chosen = work.step("choose", "choose")["chosen"]
    return f"{chosen}-s1" if seed == 1 else f"local-s{seed}"


def own(work: Work, seed: int) -> str:
    """The name of the run of the claimed try of domains with a seed."""
    chosen = work.step("choose-domain", "choose")["chosen"]
    return f"{chosen}-s1" if seed == 1 else f"domain-s{seed}"


def stacked(work: Work, seed: int) -> str:
    """The name of the run whose model rerouting was claimed on, with a seed."""
    which = work.step("stack-s1", "claim")["model"]
    if which == "local":
        return local(work, seed)
    return f"{work.step('choose', 'choose')[which]}-s1" if seed == 1 else f"stronger-s{seed}"


def half_of(size: Size, name: str) -> str:
    """A run's checkpoint after half of its steps."""
    return f"runs/{name}/train/checkpoints/step-{size.base['train']['steps'] // 2:06d}"


# --- what runs are made of


def _written(work: Work, run: str, name: str, sections: Sections) -> str:
    """A recipe's file, relative to the work folder; the same recipe gives the same file."""
    path = work.at(run) / name
    text = toml(sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return path.relative_to(work.folder).as_posix()


def evaluated(size: Size, name: str, model: str, *more: str, generate: bool = True) -> Step:
    """`sluice train evaluate` of a model as this experiment measures all of them."""
    words = (
        "sluice",
        "train",
        "evaluate",
        model,
        "data",
        "--passages",
        str(size.passages),
        "--length",
        str(size.length),
    )
    said = ("--generate", str(size.generate)) if generate else ()
    return Step(name, (*words, *said, *more, "--json"))


def data_steps(size: Size, texts: Mapping[str, str] | None, work: Work) -> list[Step]:
    steps: list[Step] = []
    if texts is None:
        steps.append(Step("corpora", ("corpora.py", "corpora", "--megabytes", str(size.megabytes))))
        texts = {domain: f"corpora/{domain}" for domain in TEXTS}
    domains = [word for name, path in texts.items() for word in ("--domain", f"{name}={path}")]
    words = ("sluice", "train", "data", "data", *domains, "--vocab", str(size.vocab), "--valid", str(size.valid))
    steps.append(Step("prepare", (*words, "--force", "--json")))
    steps.append(evaluated(size, "texts", "data", "--texts", "texts", generate=False))
    return steps


def pretrained_steps(size: Size, name: str, seed: int, changes: Sections, work: Work) -> list[Step]:
    kind = "locality" if {"locality", "domain"} & set(changes) else "pretrain"
    begins = ("--teacher", model_of(f"base-s{seed}")) if "distill" in changes else ()
    if late(changes):
        begins = (*begins, "--branch", half_of(size, f"base-s{seed}"))
    asked = _written(work, name, "recipe.toml", recipe(size, seed, changes))
    out = f"runs/{name}/train"
    return [
        Step("train", ("sluice", "train", kind, "data", out, "--recipe", asked, *begins, "--json")),
        evaluated(size, "evaluate", model_of(name)),
        _exported(name, "f32", "f32"),
        _exported(name, "q4", size.quantised),
    ]


def _exported(name: str, kind: str, type: str) -> Step:
    words = ("sluice", "train", "export", model_of(name), file_of(name, kind), "--type", type, "--force", "--json")
    return Step(kind, words)


def local_steps(size: Size, seed: int, work: Work) -> list[Step]:
    return _again(size, f"local-s{seed}", "chosen", seed, work)


def domain_steps(size: Size, seed: int, work: Work) -> list[Step]:
    """The claimed try of domains with another seed."""
    _, changes = DOMAINS[work.step("choose-domain", "choose")["chosen"]]
    return pretrained_steps(size, f"domain-s{seed}", seed, changes, work)


def stronger_steps(size: Size, seed: int, work: Work) -> list[Step]:
    """Nothing where rerouting was claimed on the claimed try."""
    which = work.step("stack-s1", "claim")["model"]
    return [] if which == "local" else _again(size, f"stronger-s{seed}", which, seed, work)


def _again(size: Size, name: str, which: str, seed: int, work: Work) -> list[Step]:
    """The try that `choose` calls `which`, with another seed."""
    _, changes = LOCALITY[work.step("choose", "choose")[which]]
    return pretrained_steps(size, name, seed, changes, work)


def passages_of(work: Work, *, labels: bool) -> list[str]:
    """--domain for each held-out passage, in their order: by its file's name, or (`labels`) its domain's."""
    words: list[str] = []
    for one in work.step("data", "texts")["texts"]:
        words += ["--domain", f"{one['domain'] if labels else Path(one['file']).stem}={one['file']}"]
    return words


def _decoding(size: Size, share: float = CAPACITY) -> tuple[str, ...]:
    """The engine as the simulator has it: on demand, LRU, a pool of a share of all experts, a passage a window."""
    n = str(slots(size, share))
    return ("--ctx", str(size.length), "--expert-slots", n, "--policy", "lru", "--no-prefetch", *ONE_THREAD)


def stack_steps(size: Size, seed: int, work: Work) -> list[Step]:
    """With the first seed all margins on the base and on up to two tries; with others what was claimed of them."""
    if seed == 1:
        chosen = work.step("choose", "choose")
        which = "local" if chosen["stronger"] == chosen["chosen"] else "stronger"
        models = {"base": "base-s1", which: f"{chosen['stronger']}-s1"}
        if "rerouted" in chosen:
            models["rerouted"] = f"{chosen['rerouted']}-s1"
        asked = [(which, rule) for which in models for rule in ("0", *size.margins)]
    else:
        claim = work.step("stack-s1", "claim")
        models = {"base": f"base-s{seed}", claim["model"]: stacked(work, seed)}
        asked = [("base", "0"), (claim["model"], claim["rule"])]

    def named(which: str, rule: str) -> str:
        return f"{which}-{rule.replace(':', '-keep')}"

    words = (*passages_of(work, labels=False), *_decoding(size), "--json")
    steps = [
        Step(named(which, rule), ("sluice", "eval", "ppl", file_of(models[which], "f32"), *words, "--reroute", rule))
        for which, rule in asked
    ]

    def claimed(done: Mapping[str, Json]) -> Json:
        base = live_of(done["base-0"])
        tries = [
            {
                "model": which,
                "rule": rule,
                "misses_change": one["misses"] / base["misses"] - 1,
                "ppl_change": one["ppl"] / base["ppl"] - 1,
                **{key: one[key] for key in ("misses", "ppl")},
            }
            for which, rule in asked
            for one in [live_of(done[named(which, rule)])]
        ]
        rerouted = {str(i): one for i, one in enumerate(tries) if one["model"] != "base" and one["rule"] != "0"}
        return {**rerouted[best(rerouted, MOST_STACK_PPL)], "base": base, "tries": tries}

    return [*steps, Step("claim", ("compute", "claim"), claimed)]


def live_of(said: Json) -> Json:
    """Of `sluice eval ppl` over passages: perplexity with domains weighted alike, and what decoding demanded."""
    losses: dict[str, list[tuple[float, int]]] = {}
    for name, one in said["per_domain"].items():
        losses.setdefault(name.partition("-")[2], []).append((one["ppl"], one["tokens"]))
    return {"ppl": balanced_ppl(losses), **{key: said["ledger"]["decode"][key] for key in ("demands", "misses")}}


def balanced_ppl(losses: Mapping[str, Sequence[tuple[float, int]]]) -> float:
    """Of (perplexity, tokens) of each domain's passages."""
    means = [sum(math.log(p) * n for p, n in some) / sum(n for _, n in some) for some in losses.values()]
    return math.exp(sum(means) / len(means))


def control_steps(size: Size, work: Work) -> list[Step]:
    return [
        evaluated(size, which, model_of(name), "--capacity", "13.4%,25%,40%", "--switching", generate=False)
        for which, name in (("base", "base-s1"), ("domain", own(work, 1)))
    ]


def live_steps(size: Size, work: Work) -> list[Step]:
    steps: list[Step] = []
    for which, name in (("base", "base-s1"), ("local", local(work, 1))):
        trace = f"runs/live/{which}.parquet"
        words = ("sluice", "trace", "record", file_of(name, "f32"), trace, *passages_of(work, labels=True))
        steps.append(Step(f"{which}-recorded", (*words, "--decode", *_decoding(size), "--force", "--json")))
        n = str(slots(size, CAPACITY))
        words = ("sluice", "simulate", trace, "--policies", "lru", "--capacity", n, "--phase", "decode", "--json")
        steps.append(Step(f"{which}-simulated", words))

    def compare(done: Mapping[str, Json]) -> Json:
        found: Json = {}
        for which, name in (("base", "base-s1"), ("local", local(work, 1))):
            engine = done[f"{which}-recorded"]["ledger"]["decode"]
            simulated = done[f"{which}-simulated"]["results"][0]
            found[which] = {
                "engine_misses": engine["misses"], "engine_demands": engine["demands"],
                "simulated_misses": simulated["misses"], "torch_misses": misses(work.step(name, "evaluate")),
            }  # fmt: skip
        return found

    return [*steps, Step("compare", ("compute", "compare"), compare)]


def stage_steps(size: Size, seed: int, stage: str, work: Work) -> list[Step]:
    base, texts = f"base-s{seed}", f"runs/text-s{seed}/train"
    out, quantised = f"runs/{stage}-s{seed}/train", file_of(base, "q4")
    numbers = [
        word for name, value in size.stages[stage].items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    numbers += ["--seed", str(seed), "--json"]
    if stage == "text":
        return [Step("train", ("sluice", "train", "text", file_of(base, "f32"), "data", out, *numbers))]
    words = ("sluice", "train", stage, model_of(base), "data" if stage == "prerouter" else texts, out)
    words = (*words, "--weights", quantised)
    before = {"recover": "prerouter", "onpolicy": "recover"}.get(stage)
    if before is not None:
        words = (*words, "--heads", f"runs/{before}-s{seed}/train/heads.safetensors")
    if stage == "onpolicy":
        words = (*words, "--adapter", f"runs/recover-s{seed}/train/adapter")
    return [Step("train", (*words, *numbers))]


def stages_steps(size: Size, seed: int, work: Work) -> list[Step]:
    base = f"base-s{seed}"
    quantised, untrained = file_of(base, "q4"), f"runs/stages-s{seed}/untrained.safetensors"

    def heads(path: str) -> tuple[str, ...]:
        return ("--routing", "prerouted", "--prerouter", path)

    def stage(name: str) -> str:
        return f"runs/{name}-s{seed}/train"

    states: dict[str, tuple[str, ...]] = {
        "quantised": (),
        "untrained": heads(untrained),
        "stage1": heads(f"{stage('prerouter')}/heads.safetensors"),
        "stage2": (*heads(f"{stage('recover')}/heads.safetensors"), "--lora", f"{stage('recover')}/adapter"),
        "stage3": (*heads(f"{stage('onpolicy')}/heads.safetensors"), "--lora", f"{stage('onpolicy')}/adapter"),
    }
    trained = f"{stage('prerouter')}/heads.safetensors"
    steps = [
        Step("heads", ("sluice", "prerouter", "init", quantised, untrained, "--force", "--json")),
        evaluated(size, "recall", model_of(base), "--prerouter", trained, generate=False),
    ]
    steps += [
        evaluated(size, state, model_of(base), "--weights", quantised, "--teacher", model_of(base), *flags)
        for state, flags in states.items()
    ]
    served = ("--routing", "prerouted", "--prerouter", f"{stage('onpolicy')}/heads.safetensors")
    lora = ("--lora", f"{stage('onpolicy')}/adapter.gguf")
    decoding = ("--ctx", str(size.length), *ONE_THREAD)
    words = ("sluice", "eval", "kl", quantised, "--reference", file_of(base, "f32"))
    domains = passages_of(work, labels=False)
    steps.append(Step("engine", (*words, *domains, *decoding, *served, *lora, "--json")))

    def won_back(done: Mapping[str, Json]) -> Json:
        teacher = ppl(work.step(base, "evaluate"))
        found = {
            state: {
                "ppl": ppl(done[state]),
                "kl": done[state]["balanced"]["kl"],
                "repetition": done[state]["repetition"]["rate"],
                "distinct": done[state]["repetition"]["distinct"],
            }
            for state in states
        }
        cost = found["untrained"]["ppl"] - teacher
        for one in found.values():
            one["won_back"] = 1 - (one["ppl"] - teacher) / cost if cost > 0 else None
        return {
            "teacher_ppl": teacher,
            "teacher_repetition": work.step(base, "evaluate")["repetition"]["rate"],
            "states": found,
            "recovered": found["stage3"]["won_back"],
            "engine": stage_of(done["engine"]),
        }

    return [*steps, Step("recovered", ("compute", "recovered"), won_back)]


def stage_of(said: Json) -> Json:
    """Of `sluice eval kl` over passages: perplexities and KL with domains weighted alike."""
    found: dict[str, dict[str, list[tuple[float, int]]]] = {"ppl": {}, "reference_ppl": {}, "kl": {}}
    for name, one in said["per_domain"].items():
        values = {"ppl": one["ppl"], "reference_ppl": one["ppl_reference"], "kl": math.exp(one["kl"]["mean"])}
        for key, value in values.items():
            found[key].setdefault(name.partition("-")[2], []).append((value, one["tokens"]))
    balanced = {key: balanced_ppl(some) for key, some in found.items()}
    return {**balanced, "kl": math.log(balanced["kl"])}


def survival_steps(size: Size, work: Work) -> list[Step]:
    text = work.step("data", "texts")["texts"][-1]["file"]
    words = (
        "sluice",
        "lora",
        "survival",
        file_of("base-s1", "q4"),
        "runs/onpolicy-s1/train/adapter.gguf",
        "--text",
        text,
    )
    return [Step("survival", (*words, "--json"))]


def speed_steps(size: Size, work: Work) -> list[Step]:
    common = ("--expert-slots", str(slots(size, SPEED_CAPACITY)), "--policy", "lru", "--repeat", "5", "--json")
    tokens = ("--prompt-tokens", "32", "--gen", str(size.generate))
    served = (
        "--prerouter",
        "runs/onpolicy-s1/train/heads.safetensors",
        "--lora",
        "runs/onpolicy-s1/train/adapter.gguf",
    )
    arms = {
        "base": (file_of("base-s1", "q4"),),
        "local": (file_of(local(work, 1), "q4"),),
        "prerouted": (file_of("base-s1", "q4"), *served, "--routing", "prerouted"),
    }
    return [
        Step(
            f"{name}-{rate or 'cached'}",
            ("sluice", "bench", *arm, *common, *tokens, *(("--read-rate", rate) if rate else ())),
        )
        for rate in ("", SLOW_DISK)
        for name, arm in arms.items()
    ]
