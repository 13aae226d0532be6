"""What clients of `sluice serve` wait for: many streams at once, a long prompt among short ones, and exactness.

    python benchmarks/serving.py                       # the demo model, all of its experts resident
    python benchmarks/serving.py --parts latency --ram 400M

A real server in a process of its own and clients that speak HTTP to it, on the same cores: what clients and HTTP cost
is in the figures.

Theory, batching. A decode step reads the resident weights once for all streams; what is left grows with its width:
attention and the experts' products. So all streams together are at least as quick as half as many, and once arithmetic
fills the cores, as quick. A round goes through all widths, every second one backwards; each doubling is compared with
the width before within its round.

    tokens a second of all streams ÷ those of half as many     at least 0.95, each doubling up to 64
    bytes of experts read meanwhile                            0

Theory, latency. Short requests arrive at random (Poisson, an open loop: they don't wait for each other), with and
without prompts of 2,000 tokens among them. A long prompt is fed in chunks of at most 512 tokens, and after each chunk's
step every stream that generates gets a token: so c = ⌈2000 ÷ 512⌉ times, a chunk's step stands between two of its
tokens. No two tokens are further apart than one chunk's step and a decode step. And prompts take half of the time at
most while streams generate, so a request of G tokens has as long for decode steps as for prompts, a chunk's step aside:
its time a token is at most 2 × that without + chunk ÷ (G − 1), however many long prompts there are. A chunk's step is
what the long prompt takes alone ÷ c. Both arms of a round have the same short requests at the same times, and each must
get the same answer in both. The bars leave a quarter, and a half, for what piles up meanwhile: more streams are there,
and steps are wider. No bound holds for an open loop that offers more work than there is time for, so that is a row too:
what each request takes alone, summed up, ÷ time, which overestimates it, as steps together are cheaper.

    TPOT p95 with ÷ without          at most 1.25 × (2 + chunk ÷ ((G − 1) × TPOT p95 without))
    work offered ÷ time              at most 1
    longest time between two tokens ÷ (chunk + TPOT p95 without)     at most 1.5
    TTFT and TPOT, p50 and p95       reported

Theory, exactness. A stream's bits don't depend on its company, nor on what was reused of earlier prompts or evicted
meanwhile. So each of 32 greedy streams, together and in two orders, says what it says alone: the same tokens, with the
same log-probabilities to the last bit. The pool holds a third of the experts. Prompts have 8 to 700 tokens.

    answers that differ from those alone     0
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import EVERY_SLOT, flag, log, middle, ratio, report, row, run_main
from served import COMPLETIONS, Server, Texts, Told, ask, metrics, streamed

from sluice.cli.opening import resolve_model
from sluice.config import EngineConfig
from sluice.engine import Engine
from sluice.engine.report import quantile
from sluice.engine.workspace import CHUNK

Json = dict[str, Any]
PARTS = ("batching", "latency", "exactness")
TALKERS = 8  # different users that short requests come from
WARM_UPS = 16  # of eight prompts each, at most


def body(prompt: list[int], n: int, seed: int, **more: Any) -> Json:
    """A request for exactly `n` tokens."""
    return streamed(prompt=prompt, max_tokens=n, seed=seed, temperature=1.0, top_p=1.0, ignore_eos=True) | more


async def together(client: httpx.AsyncClient, bodies: Sequence[Json]) -> list[Told]:
    """All at once. Every answer must be complete: anything else ends the benchmark."""
    every = await asyncio.gather(*(ask(client, COMPLETIONS, each) for each in bodies))
    for told in every:
        assert told.complete, f"{told.status}: {told.error}"
    return every


async def warm_up(client: httpx.AsyncClient, texts: Texts, rng: np.random.Generator, ctx: int) -> None:
    """Feed prompts until the pool is full, which some experts' rareness may prevent; untimed."""
    for _ in range(WARM_UPS):
        await together(client, [body(texts.piece(min(ctx - 8, CHUNK), rng), 4, 1) for _ in range(8)])
        counted = await metrics(client)
        if counted["sluice_expert_slots_resident"] == counted["sluice_expert_slots"]:
            return


# --- batching


async def width(client: httpx.AsyncClient, texts: Texts, args: argparse.Namespace, n: int, seed: int) -> float:
    """Tokens a second of `n` requests at once, from the first one's sending to the last one's last token."""
    rng = np.random.default_rng(seed)
    bodies = [body(texts.piece(args.prompt, rng), args.gen, seed + i) for i in range(n)]
    every = await together(client, bodies)
    assert all(told.tokens == args.gen for told in every)
    took = max(told.ended for told in every) - min(told.sent for told in every)
    return n * args.gen / took


async def batching(server: Server, texts: Texts, args: argparse.Namespace) -> tuple[list[Json], Json]:
    widths = [1 << i for i in range(args.widest.bit_length()) if 1 << i <= args.widest]
    speeds: dict[int, list[float]] = {n: [] for n in widths}
    async with server.client() as client:
        await warm_up(client, texts, np.random.default_rng(args.seed), args.prompt + args.gen)
        before = await metrics(client)
        for i in range(args.rounds):
            for n in widths[:: -1 if i % 2 else 1]:
                speeds[n].append(await width(client, texts, args, n, args.seed + 1000 * i))
                log(f"  round {i + 1}, {n} streams: {speeds[n][-1]:.1f} tok/s")
        after = await metrics(client)
    read = _sum(after, "sluice_bytes_read_total") - _sum(before, "sluice_bytes_read_total")
    rows = []
    for n in widths:
        rows.append(row(f"{n} streams: tok/s", middle(speeds[n]), n=args.rounds))
        if n > 1:
            doubling = [ratio(a, b) for a, b in zip(speeds[n], speeds[n // 2], strict=True)]
            rows.append(row(f"{n} streams ÷ {n // 2}", middle(doubling), at_least=0.95, n=args.rounds))
    rows.append(row("batching: bytes of experts read", read, at_most=0 if args.ram is None else None))
    return rows, {"tok_per_s": {str(n): each for n, each in speeds.items()}}


# --- latency


async def at(client: httpx.AsyncClient, due_s: float, request: Json) -> tuple[float, Told]:
    """Send `request` when it is due, by the event loop's clock; how late that was, and what came of it."""
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(max(0.0, due_s - clock()))
    late = clock() - due_s
    [told] = await together(client, [request])
    return late, told


async def arm(
    client: httpx.AsyncClient, texts: Texts, args: argparse.Namespace, number: int, *, long: bool
) -> tuple[Json, list[str]]:
    """One arm of a round: figures of the short requests, and their answers."""
    rng = np.random.default_rng((args.seed, number))
    gaps = rng.exponential(1 / args.rate, size=int(3 * args.rate * args.seconds) + 20)
    times = [float(t) for t in np.cumsum(gaps) if t < args.seconds]
    prompts = [texts.piece(int(rng.integers(16, 65)), rng) for _ in times]
    begin = asyncio.get_running_loop().time() + 0.1
    shorts = [
        at(client, begin + t, body(prompt, args.gen, i, user=f"user {i % TALKERS}"))
        for i, (t, prompt) in enumerate(zip(times, prompts, strict=True))
    ]
    starts = np.arange(1.0, args.seconds, args.every) if long else ()
    longs = [
        at(client, begin + float(t), body(texts.piece(args.long, rng), 8, i, user="the reader"))
        for i, t in enumerate(starts)
    ]
    done, read = await asyncio.gather(asyncio.gather(*shorts), asyncio.gather(*longs))
    every = [told for _, told in done]
    ttft, tpot = [told.ttft_s for told in every], [told.tpot_s for told in every]
    figures = {
        "requests": len(every), "long": len(read), "longest_gap_s": max(max(told.gaps_s) for told in every),
        "sent_late_s": max(late for late, _ in done), "long_ttft_s": middle([told.ttft_s for _, told in read]),
        **{f"ttft_p{p}_s": quantile(ttft, p / 100) for p in (50, 95)},
        **{f"tpot_p{p}_s": quantile(tpot, p / 100) for p in (50, 95)},
        "ttft_s": ttft, "tpot_s": tpot,
    }  # fmt: skip
    log(f"  {'with' if long else 'without'}: {len(every)} requests, TPOT p95 {1e3 * figures['tpot_p95_s']:.0f} ms")
    return figures, [told.text for told in every]


async def latency(server: Server, texts: Texts, args: argparse.Namespace) -> tuple[list[Json], Json]:
    chunks = -(-args.long // CHUNK)
    arms: dict[str, list[Json]] = {"without": [], "with": []}
    differing = 0
    async with server.client() as client:
        rng = np.random.default_rng(args.seed)
        await warm_up(client, texts, rng, args.latency_ctx)
        alone = [(await together(client, [body(texts.piece(args.long, rng), 8, 1)]))[0].ttft_s for _ in range(3)]
        short = [(await together(client, [body(texts.piece(40, rng), args.gen, 1)]))[0] for _ in range(3)]
        for i in range(args.rounds):
            said: list[list[str]] = []
            for name in ("without", "with")[:: -1 if i % 2 else 1]:
                figures, texts_said = await arm(client, texts, args, i, long=name == "with")
                arms[name].append(figures)
                said.append(texts_said)
            differing += sum(a != b for a, b in zip(*said, strict=True))
    chunk_s = (middle(alone) or 0.0) / chunks
    factors, bounds, stalls = [], [], []
    for without, with_ in zip(arms["without"], arms["with"], strict=True):
        base = without["tpot_p95_s"]
        factors.append(with_["tpot_p95_s"] / base)
        bounds.append(2 + chunk_s / ((args.gen - 1) * base))
        stalls.append(with_["longest_gap_s"] / (chunk_s + base))
    n = args.rounds
    offered = args.rate * (middle([told.ended - told.sent for told in short]) or 0.0) + chunks * chunk_s / args.every

    def seconds(name: str, figure: str) -> float | None:
        return middle([each[figure] for each in arms[name]])

    rows = [
        row(f"latency {name}: {kind.upper()} {p}, s", seconds(name, f"{kind}_{p}_s"), n=n)
        for name in arms for kind in ("ttft", "tpot") for p in ("p50", "p95")
    ]  # fmt: skip
    rows += [
        row("latency: a chunk's step, s", chunk_s, n=len(alone)),
        row("latency: work offered ÷ time", offered, at_most=1.0),
        row("latency: the long prompt's TTFT in company, s", seconds("with", "long_ttft_s"), n=n),
        row("latency: TPOT p95 with ÷ without", middle(factors), at_most=1.25 * (middle(bounds) or 0), n=n),
        row("latency: longest time between tokens ÷ (chunk + TPOT p95)", middle(stalls), at_most=1.5, n=n),
        row("latency: answers that differ with and without", differing, at_most=0),
    ]  # fmt: skip
    return rows, {"alone_ttft_s": alone, "arms": arms, "bounds": bounds}


# --- exactness


async def exactness(server: Server, texts: Texts, args: argparse.Namespace) -> tuple[list[Json], Json]:
    rng = np.random.default_rng(args.seed)
    lengths = np.linspace(8, args.exact_longest, args.exact).astype(int)
    common = {"max_tokens": args.exact_gen, "temperature": 0, "logprobs": 0}
    bodies = [{"prompt": texts.piece(int(n), rng), **common} for n in lengths]

    def said(every: Sequence[Told]) -> list[tuple[Any, Any]]:
        each = [told.choices[0]["logprobs"] for told in every]
        return [(logprobs["tokens"], logprobs["token_logprobs"]) for logprobs in each]

    async with server.client() as client:
        first = said(await together(client, bodies))
        alone = said([(await together(client, [each]))[0] for each in bodies])
        again = said((await together(client, bodies[::-1]))[::-1])
        counted = await metrics(client)
    differing = sum(a != b for many in (first, again) for a, b in zip(many, alone, strict=True))
    rows = [
        row(f"exactness: answers of {args.exact} at once that differ from those alone", differing, at_most=0, n=2),
        row("exactness: experts evicted meanwhile", _sum(counted, "sluice_evictions_total")),
        row("exactness: prompt tokens reused", counted["sluice_reused_prompt_tokens_total"]),
    ]
    return rows, {"answers": [len(tokens) for tokens, _ in alone]}


def _sum(counted: dict[str, float], name: str) -> float:
    return sum(value for each, value in counted.items() if each.startswith(name))


# --- all of it


def words(args: argparse.Namespace, path: Path, part: str) -> list[object]:
    """The server's flags for a part."""
    streams = {"batching": args.widest, "latency": args.streams, "exactness": args.exact}[part]
    ctx = {
        "batching": args.prompt + args.gen + 8, "latency": args.latency_ctx,
        "exactness": args.exact_longest + args.exact_gen + 8,
    }[part]  # fmt: skip
    pool: list[object] = flag("--ram", args.ram) or ["--expert-slots", EVERY_SLOT]
    if part == "exactness":
        spec = Engine(path, EngineConfig(expert_slots=EVERY_SLOT), plan_only=True).spec
        pool = ["--expert-slots", max(len(spec.moe_layers) * spec.n_expert // 3, spec.top_k)]
    return ["--max-streams", streams, "--ctx", ctx, *pool, *flag("--threads", args.threads)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo")
    add("--parts", default=",".join(PARTS))
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=7)
    add("--threads", type=int)
    add("--ram", help="the server's budget in batching and latency; by default the pool holds every expert")
    add("--widest", type=int, default=64, help="streams at once, a power of 2")
    add("--prompt", type=int, default=16, help="tokens of each prompt in batching")
    add("--gen", type=int, default=64, help="tokens of each answer in batching and latency")
    add("--rate", type=float, default=0.25, help="short requests a second")
    add("--seconds", type=float, default=120.0, help="of an arm, while requests arrive")
    add("--every", type=float, default=30.0, help="seconds between long prompts; more than one takes")
    add("--long", type=int, default=2000, help="tokens of a long prompt")
    add("--streams", type=int, default=16, help="of the server in latency")
    add("--exact", type=int, default=32, help="streams in exactness")
    add("--exact-gen", type=int, default=48, help="tokens of each answer there")
    add("--exact-longest", type=int, default=700, help="tokens of the longest prompt there")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    counts = ("rounds", "widest", "prompt", "streams", "exact", "exact_gen")
    if any(getattr(args, name) < 1 for name in counts) or args.gen < 2 or args.long < 2 or args.exact_longest < 8:
        parser.error("counts must be at least 1, tokens of answers and long prompts 2, the longest prompt 8")
    args.latency_ctx = max(args.long + 8, 64 + args.gen)
    path = resolve_model(args.model)
    texts = Texts(path)
    rows: list[Json] = []
    raw: Json = {}
    for part in parts:
        log(part)
        with Server(args.model, *words(args, path, part)) as server:
            measure = {"batching": batching, "latency": latency, "exactness": exactness}[part]
            more, raw[part] = asyncio.run(measure(server, texts, args))
            server.ask_to_end()
            server.wait()
        rows += more
    report("serving", rows, settings=vars(args), raw=raw)


if __name__ == "__main__":
    run_main(main)
