"""Cache-aware rerouting on the demo model: experts read and perplexity against the margin, simulated and live.

    python benchmarks/rerouting.py                      # the demo model, a quarter of its experts in memory

Theory. A chosen expert that would have to be read gives way to one in memory whose score is at most the margin lower,
so misses fall with the margin, and routing strays from the router's. Nothing in the model was trained for that:
perplexity rises. Two questions: what a margin costs, and whether a trace recorded without it foretells what it saves.
The simulation takes every token's scores as the exact run had them; a live run routes on hidden states that earlier
replacements have moved. Both start with an empty pool and read the same tokens, one at a time, so that at margin 0 they
must count the same, and live perplexity is then the exact model's.

    live ÷ simulated misses at margin 0                  1
    misses replaced at the widest margin, live           above 0
    live ÷ simulated misses, every other margin          reported
    perplexity ÷ that at margin 0, every other margin    reported

A result is a count or a mean over the texts in benchmarks/texts, and the same in every run: nothing is timed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import HERE, log, ratio, report, row, run_main

from sluice.cli.opening import resolve_model
from sluice.config import EngineConfig, parse_reroute
from sluice.engine import Engine
from sluice.eval.perplexity import perplexity, pooled
from sluice.eval.windows import tokenize
from sluice.experts.rerouting import Rerouting
from sluice.lab.replay import Demands
from sluice.lab.rerouting import simulate_rerouting
from sluice.trace import TraceReader

Json = dict[str, Any]
TEXTS = HERE / "texts"
POLICY = "lru"


def live(path: Path, args: argparse.Namespace, rule: Rerouting, trace: Path | None) -> Json:
    """One margin: the texts scored token by token from an empty pool, and what that read."""
    config = EngineConfig(
        expert_slots=args.slots, ctx=args.ctx, threads=args.threads, policy=POLICY, reroute=rule.margin,
        reroute_keep=rule.keep, trace=trace, trace_scores=trace is not None,
    )  # fmt: skip
    with Engine(path, config) as engine:
        texts = {file.stem: file.read_text()[: args.characters] for file in sorted(TEXTS.glob("*.txt"))}
        tallies = perplexity(engine, tokenize(engine, texts))
        decode = engine.stats()["decode"]
    counted = ("demands", "misses", "substituted", "native_agreement", "reroute_kl")
    return pooled(tallies.values()).as_dict() | {name: decode[name] for name in counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo")
    add("--slots", type=int, help="expert slots; by default a quarter of all experts")
    add("--margins", default="0,0.01,0.03,0.1,0.3,1", help="the first must be 0")
    add("--keep", type=int, default=1, help="best experts of a token that are never replaced")
    add("--ctx", type=int, default=128, help="positions of a window")
    add("--characters", type=int, default=1500, help="of each text")
    add("--threads", type=int)
    args = parser.parse_args()
    rules = [Rerouting(parse_reroute(text)[0], args.keep) for text in args.margins.split(",")]
    if rules[0].margin or len(rules) < 2:
        parser.error("the margins are 0 and some more")
    path = resolve_model(args.model)
    if args.slots is None:
        spec = Engine(path, EngineConfig(expert_slots=1 << 20), plan_only=True).spec
        args.slots = max(len(spec.moe_layers) * spec.n_expert // 4, spec.top_k)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "native.parquet"
        ran = []
        for rule in rules:
            log(f"margin {rule.margin:g}, live")
            ran.append(live(path, args, rule, None if ran else trace))
        log("simulating")
        with TraceReader(trace) as reader:
            simulated = simulate_rerouting(reader, Demands.of(reader), [POLICY], [args.slots], rules, phase="decode")
    exact, table, rows = ran[0], [], []
    for rule, one, guess in zip(rules, ran, simulated, strict=True):
        apart = ratio(one["misses"], guess.misses)
        cost = one["ppl"] / exact["ppl"]
        table.append({"margin": rule.margin, "live": one, "simulated": guess.as_dict()})
        name = f"margin {rule.margin:g}"
        if rule.margin:
            rows.append(row(f"{name}: live ÷ simulated misses", apart))
            rows.append(row(f"{name}: live misses ÷ those at margin 0", ratio(one["misses"], exact["misses"])))
            rows.append(row(f"{name}: perplexity ÷ that at margin 0", cost))
        else:
            rows.append(row(f"{name}: live ÷ simulated misses", apart, at_least=1, at_most=1))
    rows.append(row(f"margin {rules[-1].margin:g}: experts replaced, live", ran[-1]["substituted"], at_least=1))
    log(f"{'margin':>8} {'misses':>8} {'simulated':>9} {'replaced':>8} {'agreement':>9} {'KL':>9} {'perplexity':>10}")
    for one in table:
        ran_as, guess = one["live"], one["simulated"]
        log(
            f"{one['margin']:8g} {ran_as['misses']:8} {guess['misses']:9} {ran_as['substituted']:8} "
            f"{ran_as['native_agreement']:9.2%} {ran_as['reroute_kl']:9.3g} {ran_as['ppl']:10.3f}"
        )
    report("rerouting", rows, vars(args) | {"policy": POLICY}, {"table": table})


if __name__ == "__main__":
    run_main(main)
