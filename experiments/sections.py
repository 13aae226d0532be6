"""What each question of the reference experiment came to, as sections of a page. Measures and draws nothing.

A figure's place is a line <!-- NAME -->.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from choosing import LEAST_HITS, alike, comparable, misses, ppl
from measures import asked, seeds
from page import NOT_RUN, change, number, percent, prose, rows, section, spread
from parts import LABELS, SLOW_DISK
from recipes import DOMAINS, LOCALITY, Sections
from runner import Json, Work
from runs import SEEDS

HEADS = (
    "model", "perplexity", "change", "by domain", "misses a token", "change", "own experts serve", "evenness of load",
)  # fmt: skip
STATES = {
    "quantised": "4 bits",
    "untrained": "+ predicted routes, heads untrained",
    "stage1": "+ stage 1: heads imitate",
    "stage2": "+ stage 2: heads and adapter on the teacher's text",
    "stage3": "+ stage 3: on its own text",
}


def _row(name: str, one: Json, base: Json | None) -> list[str]:
    domains = " / ".join(number(each["ppl"], ".2f") for each in one["per_domain"].values())
    return [
        name,
        number(ppl(one)),
        "" if base is None else change(ppl(one) / ppl(base) - 1, 2),
        domains,
        number(one["cache"]["results"][0]["reads_per_token"], ".2f"),
        "" if base is None else change(misses(one) / misses(base) - 1),
        percent(one["domains"]["mean_pinned_hit_rate"]),
        number(one["load"]["load_entropy"]),
    ]


def base(work: Work) -> str:
    found = seeds(work, "base", "evaluate")
    if not found:
        return section("The base model", rows((), ()))
    some = next(iter(found.values()))
    shape, cache = some["experts"], some["cache"]["results"][0]
    about = prose(f"""{some["parameters"] / 1e6:.1f} million parameters; {shape["layers"]} layers of {shape["each"]}
        experts, {shape["top_k"]} a token; {cache["capacity_slots"]} slots, of which a token demands
        {some["cache"]["demands_per_token"]:g}; {some["texts"]} passages, {some["cache"]["tokens"]} tokens. Domains
        are in the order {", ".join(some["per_domain"])}. *Own experts serve* is explained below, under Domains;
        *evenness* is the entropy of the least even layer's load, 1 where all its experts are used alike.""")
    return section("The base model", about, rows(HEADS, [_row(f"seed {s}", one, None) for s, one in found.items()]))


def _tries(work: Work, tries: Mapping[str, tuple[str, Sections]]) -> tuple[list[list[str]], str]:
    """A row for each try of seed 1 that is done and can be compared with its base, and what became of the others."""
    start = asked(work, "base-s1", "evaluate")
    found = {name: one for name in tries if (one := asked(work, f"{name}-s1", "evaluate")) is not None}
    apart = [name for name in found if start is None or not comparable(work, name)]
    body = [_row(f"{name}: {tries[name][0]}", one, start) for name, one in found.items() if name not in apart]
    begun = {name: said for name in tries if (said := work.last_words(f"{name}-s1")) is not None}
    left = [name for name in tries if name not in found and name not in begun]
    notes = [
        "\n".join(f"- Begun and not done: {name}, last heard of: {said[:300]}" for name, said in begun.items()),
        f"Run on another machine than the base, so not compared: {', '.join(apart)}." if apart else "",
        f"Not run: {', '.join(left)}." if left else "",
    ]
    return body, "\n\n".join(note for note in notes if note)


def locality(work: Work, numbers: Json) -> str:
    body, others = _tries(work, LOCALITY)
    claimed = ""
    if numbers["chosen"]:
        moved, cost = numbers["locality"]["misses_change"], numbers["locality"]["ppl_change"]
        claimed = f"Claimed: **{numbers['chosen']}**: misses {spread(moved)}, perplexity {spread(cost, 2)}."
    return section(
        "Locality",
        prose("""Every try, one seed each. The one that is claimed, and run with more seeds, is that with the
        fewest misses of those within +0.5 % perplexity, half of what the gate allows, or else the one that
        costs least; those that were trained on rerouted routes are for the stack alone. (It was +1 % before any
        other seed was run; a bound over three seeds asks for room.) The seed and the passages by which it is
        chosen are among those that it is judged by, which flatters it a little. Training losses of rerouted tries
        are those of rerouted routes; everything else here is measured with the router's own."""),
        rows(HEADS, body),
        others,
        claimed,
        "<!-- tradeoff -->\n\n<!-- curves -->\n\n<!-- training -->",
    )


def domain(work: Work, numbers: Json) -> str:
    body, others = _tries(work, DOMAINS)
    chosen, claimed = asked(work, "choose-domain", "choose"), ""
    if chosen is not None:
        hits, cost = numbers["domain"]["hit_rate"], numbers["domain"]["ppl_change"]
        claimed = f"Claimed: **{chosen['chosen']}**: hits {spread(hits, said=percent)}, perplexity {spread(cost, 2)}."
        for seed in SEEDS[1:]:
            base, one = (asked(work, f"{name}-s{seed}", "evaluate") for name in ("base", "domain"))
            if base is not None and one is not None and alike(work, f"base-s{seed}", f"domain-s{seed}"):
                body.append(_row(f"{chosen['chosen']}, seed {seed}", one, base))
    about = f"""Beginning at 0.55 of a run, a loss comes to keep a domain's text to an even share of every layer's
        experts, those that it used. *Own experts serve* is the share of a domain's choices that fall on the experts of
        each layer that it uses most, as many as that share, picked on training text: what pinning them would hit. Of
        tries where that is at least {LEAST_HITS:.0%}, the one that costs least is claimed, or else the one with the
        most; the seed by which it is chosen is among those that it is judged by."""
    return section("Domains", prose(about), rows(HEADS, body), others, claimed)


def stack(work: Work, numbers: Json) -> str:
    body: list[list[str]] = []
    for seed, found in seeds(work, "stack", "claim").items():
        for one in found["tries"]:
            mark = ", claimed" if (one["model"], one["rule"]) == (found["model"], found["rule"]) else ""
            figures = change(one["misses_change"]), change(one["ppl_change"], 2)
            body.append([str(seed), LABELS[one["model"]], one["rule"] + mark, *figures])
    about = """Live, by the engine, on the exported files: `sluice eval ppl --reroute MARGIN:J` over the same passages
        with as many slots; J best experts of a token are never replaced, 1 unless given. Changes are to the base
        without a margin. Margins are tried with one seed; of those within +3.0 % perplexity the one with the fewest
        misses is claimed. *More local* is the try with the fewest misses within +2.4 % (without a margin), where that
        is another than the claimed one; *trained rerouted* is that of those that were trained on the routes that
        rerouting takes."""
    moved, cost = numbers["stack"]["misses_change"], numbers["stack"]["ppl_change"]
    return section(
        "The stack: rerouting on a locality-trained model",
        prose(about),
        rows(["seed", "model", "margin", "misses", "perplexity"], body),
        f"Claimed: misses {spread(moved)}, perplexity {spread(cost, 2)}." if body else "",
        "<!-- stack -->",
    )


def control(work: Work) -> str:
    body = [
        [
            which, str(each["capacity_slots"]), str(each["loaded_experts"]), str(each["switches"]), str(each["loads"]),
            str(each["misses"]), str(each["misses_alone"]), change(each["reads_change"]),
        ]
        for which in ("base", "domain")
        for one in [asked(work, "control", which)] if one is not None
        for each in one["domains"]["switching"]
    ]  # fmt: skip
    about = """At each switch the new domain's most used experts are read before it begins. The paper found no gain:
        LRU warms up again quickly. *Reads* are loads and misses together, against LRU left alone."""
    heads = ["model", "slots", "loaded", "switches", "loads", "misses", "misses alone", "reads"]
    return section("Negative control: loading a domain's experts at a switch", prose(about), rows(heads, body))


def recall(work: Work) -> str:
    parts: list[str] = []
    for seed, one in seeds(work, "stages", "recall").items():
        names = list(one["recall"]["mean"])
        body = [[str(each["layer"]), *(percent(each[name]) for name in names)] for each in one["recall"]["layers"]]
        body.append(["**mean**", *(percent(one["recall"]["mean"][name]) for name in names)])
        parts.append(f"Seed {seed}:\n\n" + rows(["layer", *names], body))
    about = """Of the experts that a layer's router chooses at the next token, the share that is named a token
        ahead: by the trained head, by its skip path untrained, by the experts of the token before, by those most
        used on this very text, by chance."""
    return section("Stage 1: recall@k of heads", prose(about), *(parts or [rows((), ())]), "<!-- recall -->")


def stages(work: Work) -> str:
    body: list[list[str]] = []
    checks: list[str] = []
    bases = seeds(work, "base", "evaluate")
    elsewhere: list[str] = []
    for seed, found in seeds(work, "stages", "recovered").items():
        if seed in bases and abs(found["teacher_ppl"] / ppl(bases[seed]) - 1) > 1e-4:
            elsewhere.append(f"Seed {seed} was run on another machine, with the base that the same recipe gave there.")
        repeated = percent(found["teacher_repetition"])
        body.append(
            [str(seed), "the teacher: unquantised, its own routes", number(found["teacher_ppl"]), "", repeated, ""]
        )
        for state, label in STATES.items():
            one = found["states"][state]
            kl, won = number(one["kl"], ".3g"), percent(one["won_back"])
            body.append([str(seed), label, number(one["ppl"]), kl, percent(one["repetition"]), won])
        mine, engine = found["states"]["stage3"], found["engine"]
        checks.append(f"seed {seed}: {number(engine['ppl'])} (KL {number(engine['kl'], '.3g')}) against "
                      f"{number(mine['ppl'])} ({number(mine['kl'], '.3g')}) in PyTorch")  # fmt: skip
    about = """*Won back*: of the perplexity that 4 bits and predicted routes with untrained heads cost. *Repeated*:
        the share of 4-grams that a greedy continuation has had before. Stage 1 alone is expected to leave text that
        repeats itself."""
    check = f"After stage 3, the engine on the exported files has the perplexity {'; '.join(checks)}." if checks else ""
    heads = ["seed", "state", "perplexity", "KL to the teacher", "repeated", "won back"]
    apart = prose(" ".join(elsewhere))
    return section("Three stages", prose(about), rows(heads, body), prose(check), apart, "<!-- stages -->")


def survival(work: Work) -> str:
    one = asked(work, "survival", "survival")
    title = "What merging the adapter would leave"
    if one is None:
        return section(title, rows((), ()))
    body = [[name, percent(each["share"]), number(each["error"])] for name, each in one["types"].items()]
    body.append(["all", percent(one["all"]["share"]), number(one["all"]["error"])])
    about = """`sluice lora survival`. The paper, on its models: 34 % on an attention projection, 2 % on a dense
        one, 18 % in the output distribution."""
    left = "" if one["output"] is None else f"Of the output distribution {percent(one['output']['share'])} survives."
    return section(title, prose(about), rows(["matrices stored as", "survives", "error"], body), left)


def speed(work: Work) -> str:
    names = {"base": "base, exact", "local": "locality-trained, exact", "prerouted": "base, prerouted, with adapter"}
    body: list[list[str]] = []
    for rate, disk in (("cached", "page cache"), (SLOW_DISK, f"{SLOW_DISK}B/s")):
        for step, label in names.items():
            if (one := asked(work, "speed", f"{step}-{rate}")) is not None:
                ledger = one["ledger"]["decode"]
                reads = number(ledger["reads"] / ledger["tokens"], ".2f")
                counts = [str(ledger[key]) for key in ("demands", "late_hits", "misses")]
                body.append([label, disk, str(one["slots"]), *counts, reads, number(one["tok_per_s"], ".1f")])
    about = f"""`sluice bench` on the 4-bit files: from the page cache, where files of this size lie, and through an
        emulated disk of {SLOW_DISK}B/s. Models write different texts, so their demands differ."""
    heads = ["model", "disk", "slots", "demands", "late hits", "misses", "reads a token", "tokens/s"]
    return section("Speed at 15 % of the experts", prose(about), rows(heads, body))


def live(work: Work) -> str:
    found: dict[str, Json] = asked(work, "live", "compare") or {}
    body = [
        [
            LABELS[which], str(one["engine_demands"]), str(one["engine_misses"]), str(one["simulated_misses"]),
            str(one["torch_misses"]), change(one["torch_misses"] / one["engine_misses"] - 1, 2),
        ]
        for which, one in found.items()
    ]  # fmt: skip
    about = """The same passages decoded by the engine with as many slots. The simulator replays the engine's own
        trace, which must give its counters exactly, and the PyTorch model's, whose routes differ where rounding
        decides."""
    heads = ["model", "demands", "engine's misses", "simulated", "simulated on PyTorch's routes", "difference"]
    return section("Simulator and live engine", prose(about), rows(heads, body))


SECTIONS: tuple[Callable[[Work], str], ...] = (control, recall, stages, survival, speed, live)
__all__ = ["NOT_RUN", "SECTIONS", "base", "domain", "locality", "stack"]
