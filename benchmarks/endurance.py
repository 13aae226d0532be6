"""`sluice serve` under half an hour of everything: is each answer deserved, is memory kept, and do the counters agree?

    python benchmarks/endurance.py                     # the demo model, 30 minutes
    python benchmarks/endurance.py --minutes 2

Theory. Clients keep asking, one request after the other, of kinds drawn at random (mixture.py): chats and prompts,
streamed and not, choices, long prompts, beginnings in common, structured output, tools, log-probabilities, the same
seeds again and again; clients that leave while a prompt is fed, while tokens come, while they wait, or in the middle of
their body; bodies too large, no JSON, no request, wrong keys; and now and then a burst of more than fit. The pool holds
a part of the experts, so all the while some are read and evicted. Nothing of that may hurt anything else:

    answers that were not deserved                           0 (429 is deserved during a burst alone)
    seeded answers that differ from their first              0
    peak resident memory ÷ budget                            at most 1
    growth of memory over the second half ÷ budget           at most 0.01 (a line fitted to a sample a second)
    requests and jobs counted otherwise than clients saw     0
    tokens counted outside of what clients saw               0

A client that leaves doesn't learn what its request came to, so the last two are bounds for those, and exact for all
others. Afterwards, with nobody leaving, the seeded requests come once more, and every counter must go up by exactly
what clients were told; all streams must still run at once, and none be taken when all is over. At last SIGTERM comes
while an answer streams: it must be finished, and the exit code be that of a command which SIGTERM ends.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import flag, log, report, row, run_main
from mixture import LONG_TOKENS, Crowd, Tally
from served import COMPLETIONS, TERMINATED, Server, Texts, ask, metrics, streamed

from sluice.cli.opening import resolve_model
from sluice.config import parse_size

Json = dict[str, Any]
KEY = "a-key-for-the-endurance-run"
LEAST_CTX = LONG_TOKENS + 400
IDLE_S = 120.0  # for what was left behind to end


def total(counted: Mapping[str, float], name: str, *labels: str) -> int:
    """A counter's sum over its labels, or over those with one of `labels`."""
    full = f"sluice_{name}_total"
    each = ((key, value) for key, value in counted.items() if key == full or key.startswith(full + "{"))
    return int(sum(value for key, value in each if not labels or any(f'"{label}"' in key for label in labels)))


def off(counted: int, least: int, unsure: int = 0) -> int:
    """By how much a counter lies outside of what clients saw: at least `least`, at most `unsure` more."""
    return max(least - counted, counted - least - unsure, 0)


async def watch(server: Server, samples: list[tuple[float, int]]) -> None:
    """Note the server's memory every second, until cancelled."""
    clock = asyncio.get_running_loop().time
    while True:
        samples.append((clock(), server.memory_bytes("VmRSS")))
        await asyncio.sleep(1.0)


async def settled(client: httpx.AsyncClient) -> dict[str, float]:
    """The counters once nothing runs and nobody waits, or as they are when that takes too long."""
    counted = await metrics(client)
    for _ in range(int(IDLE_S / 0.2)):
        if not counted["sluice_running"] and not counted["sluice_queued"]:
            break
        await asyncio.sleep(0.2)
        counted = await metrics(client)
    return counted


async def bursts(crowd: Crowd, every_s: float, until: float) -> None:
    clock = asyncio.get_running_loop().time
    while clock() + every_s < until:
        await asyncio.sleep(every_s)
        await crowd.burst()


async def quiet(client: httpx.AsyncClient, crowd: Crowd, before: Mapping[str, float]) -> int:
    """The seeded requests once more, a few at a time: by how much counters rise by something else than was told."""
    every = []
    for i in range(0, len(crowd.pool), 4):
        every += await asyncio.gather(*(crowd.repeat(j) for j in range(len(crowd.pool))[i : i + 4]))
    after = await settled(client)

    def rise(name: str, *labels: str) -> int:
        return total(after, name, *labels) - total(before, name, *labels)

    usage = [told.usage or {} for told in every]
    told = {
        ("jobs_submitted",): len(every), ("answers", "answered"): len(every), ("answers",): len(every),
        ("jobs_ended", "stop", "length"): len(every), ("jobs_ended",): len(every),
        ("jobs_ended", "stop"): sum(told.finished == ["stop"] for told in every),
        ("generated_tokens",): sum(one["completion_tokens"] for one in usage),
        ("reused_prompt_tokens",): sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage),
        ("requests_refused",): 0,
    }  # fmt: skip
    wrong = {name: (rise(*name), n) for name, n in told.items() if rise(*name) != n}
    prompts = rise("prompt_tokens") + rise("reused_prompt_tokens")
    if prompts != sum(one["prompt_tokens"] for one in usage):
        wrong["prompt_tokens",] = prompts, sum(one["prompt_tokens"] for one in usage)
    for name, (counted, seen) in wrong.items():
        log(f"  {' '.join(name)}: counted {counted}, told {seen}")
    return len(wrong)


async def all_at_once(client: httpx.AsyncClient, texts: Texts, rng: np.random.Generator, streams: int) -> int:
    """How many of as many requests as there are streams run at once."""
    bodies = [streamed(prompt=texts.piece(8, rng), max_tokens=96, ignore_eos=True) for _ in range(streams)]
    asking = asyncio.gather(*(ask(client, COMPLETIONS, body) for body in bodies))
    most = 0
    while not asking.done():
        most = max(most, int((await metrics(client))["sluice_running"]))
    await asking
    return most


async def end(server: Server, client: httpx.AsyncClient, texts: Texts, rng: np.random.Generator) -> bool:
    """SIGTERM while an answer streams: whether that was finished."""
    body = streamed(prompt=texts.piece(8, rng), max_tokens=64, ignore_eos=True)
    asking = asyncio.create_task(ask(client, COMPLETIONS, body))
    while not asking.done() and not (await metrics(client))["sluice_running"]:
        pass
    server.ask_to_end()
    told = await asking
    return told.complete and told.tokens == 64


async def run(server: Server, texts: Texts, args: argparse.Namespace) -> tuple[Tally, Json]:
    clock = asyncio.get_running_loop().time
    samples: list[tuple[float, int]] = []
    rng = np.random.default_rng(args.seed)
    async with server.client() as client:
        crowd = Crowd(
            server, client, texts, streams=args.streams, queue=args.queue, n_ctx=args.ctx, seed=args.seed
        )  # fmt: skip
        await crowd.find_out()
        watching = asyncio.create_task(watch(server, samples))
        until = clock() + 60 * args.minutes
        clients = asyncio.gather(*(crowd.live(until) for _ in range(args.clients)), bursts(crowd, args.every, until))
        while not clients.done():
            await asyncio.wait({clients}, timeout=60)
            log(f"  {sum(crowd.tally.kinds.values())} requests, {len(crowd.tally.unexpected)} not as deserved, "
                f"{samples[-1][1] / 1e6:.0f} MB")  # fmt: skip
        await clients
        counted = await settled(client)
        mixed = deepcopy(vars(crowd.tally))
        found: Json = {"counted": counted, "wrong_when_quiet": await quiet(client, crowd, counted)}
        found["at_once"] = await all_at_once(client, texts, rng, args.streams)
        found["last"] = await settled(client)
        watching.cancel()
        found["peak_bytes"] = server.memory_bytes("VmHWM")
        found["finished_at_end"] = await end(server, client, texts, rng)
    found |= {"samples": [(t - samples[0][0], n) for t, n in samples], "mixed": mixed}
    return crowd.tally, found


def growth_bytes(samples: list[tuple[float, int]]) -> float | None:
    """By how much memory grew over the second half of the run: of a line fitted to it."""
    half = samples[len(samples) // 2 :]
    if len(half) < 8:
        return None
    times, sizes = np.array(half, float).T
    return float(np.polyfit(times, sizes, 1)[0] * (times[-1] - times[0]))


def judge(tally: Tally, found: Json, args: argparse.Namespace, code: int | None, faults: int) -> list[Json]:
    counted, last, mixed = found["counted"], found["last"], found["mixed"]
    by_label = {key.split('"')[1]: int(n) for key, n in counted.items() if key.startswith("sluice_requests_refused")}
    refused = {int(status): n for status, n in by_label.items()}
    seen = mixed["refused"]
    unsure = {429: mixed["unsure"], 400: mixed["halves"]}
    by_status = sum(off(refused.get(status, 0), seen[status], unsure.get(status, 0)) for status in {*refused, *seen})
    everything = mixed["complete"] + mixed["left"] + mixed["unsure"] + sum(seen.values())
    budget = parse_size(args.ram)
    growth = growth_bytes(found["samples"])
    unfinished = total(last, "jobs_submitted") - total(last, "jobs_ended")
    unfinished += int(last["sluice_running"] + last["sluice_queued"])
    return [
        row("requests", sum(tally.kinds.values())),
        row("answers that were not deserved", len(tally.unexpected), at_most=0),
        row("refused in bursts (429)", seen[429], at_least=1),
        row("seeded answers that differ from their first", tally.differing, at_most=0, n=tally.repeated),
        row("peak memory ÷ budget", found["peak_bytes"] / budget, at_most=1),
        row("growth of memory in the second half ÷ budget", None if growth is None else growth / budget, at_most=0.01),
        row("complete answers, counted otherwise than seen",
            off(total(counted, "answers", "answered"), mixed["complete"]), at_most=0),
        row("clients that left, counted otherwise than seen",
            off(total(counted, "answers", "ClientGone"), mixed["left"], mixed["unsure"]), at_most=0),
        row("refusals by status, counted otherwise than seen", by_status, at_most=0),
        row("requests in all, counted otherwise than sent",
            off(total(counted, "answers") + sum(refused.values()), everything, mixed["halves"]), at_most=0),
        row("finished jobs, counted otherwise than seen",
            off(total(counted, "jobs_ended", "stop", "length"), mixed["finished"], mixed["left_jobs"]), at_most=0),
        row("generated tokens, counted outside of what was seen",
            off(total(counted, "generated_tokens"), mixed["generated"], mixed["left_tokens"]), at_most=0),
        row("counters that are off when nobody leaves", found["wrong_when_quiet"], at_most=0),
        row("jobs that never ended", unfinished, at_most=0),
        row("streams that run at once at the end", found["at_once"], at_least=args.streams),
        row("faults that the server reported", faults, at_most=0),
        row("the answer under way at SIGTERM was finished", int(found["finished_at_end"]), at_least=1),
        row(f"exit code after SIGTERM ({TERMINATED})", code, at_least=TERMINATED, at_most=TERMINATED),
        row("tokens generated", total(last, "generated_tokens")),
        row("prompt tokens reused ÷ all", _share(last)),
        row("experts evicted", total(last, "evictions")),
    ]  # fmt: skip


def _share(counted: Mapping[str, float]) -> float | None:
    reused, fed = total(counted, "reused_prompt_tokens"), total(counted, "prompt_tokens")
    return reused / (reused + fed) if reused + fed else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="demo")
    add("--minutes", type=float, default=30.0)
    add("--ram", default="768M", help="the server's budget")
    add("--ctx", type=int, default=LEAST_CTX + 104)
    add("--streams", type=int, default=4)
    add("--queue", type=int, default=12)
    add("--clients", type=int, default=5, help="of which each has up to two jobs at a time")
    add("--every", type=float, default=60.0, help="seconds between bursts")
    add("--threads", type=int)
    add("--seed", type=int, default=7)
    args = parser.parse_args()
    if args.ctx < LEAST_CTX or args.minutes <= 0 or min(args.streams, args.clients) < 1:
        parser.error(f"--ctx must be at least {LEAST_CTX}, the minutes above 0, streams and clients at least 1")
    if 2 * args.clients > args.streams + args.queue:
        parser.error("clients with two jobs each must fit streams and queue, or 429 would be deserved without bursts")
    texts = Texts(resolve_model(args.model))
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"# one key\n{KEY}\n")
        words = (
            "--ram", args.ram, "--ctx", args.ctx, "--max-streams", args.streams, "--max-queue", args.queue,
            "--api-key-file", keys, *flag("--threads", args.threads),
        )  # fmt: skip
        with Server(args.model, *words, key=KEY) as server:
            tally, found = asyncio.run(run(server, texts, args))
            code = server.wait()
    faults = [line for line in server.said if "fault" in line or "Traceback" in line]
    for said in tally.unexpected[:20]:
        log(f"  not deserved: {said}")
    rows = judge(tally, found, args, code, len(faults))
    report("endurance", rows, settings=vars(args), raw=found | {"unexpected": tally.unexpected, "faults": faults})


if __name__ == "__main__":
    run_main(main)
