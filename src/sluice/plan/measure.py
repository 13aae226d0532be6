"""Takes a model's machine profile: opens engines and has the probe measure them. Knows no command line."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep

from sluice.config import EngineConfig
from sluice.engine import Engine
from sluice.io.files import ModelFiles
from sluice.plan.probe import Check, Probe, expert_bytes, probe_slots, ram_rate, raw_rate
from sluice.plan.profile import MachineProfile
from sluice.store import Run, expert_layout

PROBE_CTX = 1024  # positions: a chunk of a prompt, and some

Opener = Callable[[EngineConfig], AbstractContextManager[Engine]]
Progress = Callable[[float, float], None]

SETTLE_S = 30.0  # until a host has taken back nearly all of what was freed: a part every 2 s
SETTLE_STEP_S = 0.1
BALLOONS = Path("/sys/bus/virtio/drivers/virtio_balloon")
PAGE_REPORTING = 5  # VIRTIO_BALLOON_F_REPORTING of the virtio specification, 5.5.3


def probe_config(planned: Engine, free: int) -> EngineConfig:
    """How to open the model of `planned` (opened with `plan_only`) to measure it, within `free` bytes."""
    plan, spec, config = planned.plan, planned.spec, planned.config
    room = max(spec.top_k, int(free * 0.9 - plan.needs.fixed) // plan.slot_bytes)
    slots = max(spec.top_k, probe_slots(plan.floor_slots, len(spec.moe_layers) * spec.n_expert, room))
    ctx = min(spec.n_ctx_train, PROBE_CTX) if config.ctx is None else config.ctx
    return replace(config, ram=None, expert_slots=slots, ctx=ctx, policy="lru", streams=1)


def measure(
    config: EngineConfig, opener: Opener, *, machine: str, check: Check = lambda: None,
    progress: Progress = lambda done, total: None,
) -> MachineProfile:  # fmt: skip
    """The profile of the model that `opener` opens, twice: with reads ahead, and on demand. Takes half a minute.

    It waits first where memory that other programs have freed is about to be taken from this machine: touching it
    before that would look cheaper than what a run touches later.
    """
    parts = 8

    def done(n: int) -> None:
        check()
        progress(n, parts)

    settle(check)
    with opener(replace(config, prefetch=True)) as engine:
        probe = Probe(engine, check)
        done(1)
        fresh = probe.fresh()  # fills the pool
        prompts = probe.prompts()
        done(2)
        raw = raw_rate(engine.files, _runs(engine), raw_depth(engine.config))
        loads = probe.loads()
        done(3)
        natural = probe.natural()
        done(4)
        ahead = probe.step_cost()
        done(5)
        beside, host_read_s = probe.contention(loads)
        if natural.reads:  # within a step, Python's own code and data are cold: it takes several times as long
            host_read_s = max(host_read_s, (natural.host_s - ahead.host_s) / natural.reads)
        done(6)
        prefetching, spec = engine.prefetching, engine.spec
        embedding = 0 if spec.tied_embeddings else engine.file.tensors["token_embd.weight"].n_bytes
        about = MachineProfile(
            fingerprint=engine.fingerprint, machine=machine, threads=engine.threads, reader=engine.store.reader.name,
            ggml=engine.library.version, taken=datetime.now(UTC).isoformat(timespec="seconds"),
            moe_layers=len(spec.moe_layers), n_expert=spec.n_expert, top_k=spec.top_k,
            expert_bytes=expert_bytes(engine), dense_bytes=max(0, engine.plan.needs.dense - embedding),
            ram_bytes_per_s=0.0, raw_bytes_per_s=raw, raw_depth=raw_depth(engine.config),
            load_a_s=loads.a_s, load_b_s=loads.b_s, load_error_s=loads.error_s,
            read_beside=beside.read, compute_beside=beside.compute, host_read_s=host_read_s,
            fresh_host_s=fresh.host_s, fresh_load_s=fresh.load_s,
            sampling_s=natural.sampling_s, recall=natural.recall, demand=ahead, prefetch=ahead if prefetching else None,
            prompts=tuple(prompts),
        )  # fmt: skip
    with opener(replace(config, prefetch=False)) as engine:
        done(7)
        demand = Probe(engine, check).step_cost()
    return replace(about, demand=demand, ram_bytes_per_s=ram_rate(about.threads))


def settle(check: Check = lambda: None) -> None:
    """Wait until touching memory costs what it usually does, where that depends on what has just ended."""
    waits_until = monotonic() + (SETTLE_S if host_takes_back(BALLOONS) else 0.0)
    while monotonic() < waits_until:
        check()
        sleep(SETTLE_STEP_S)


def host_takes_back(balloons: Path) -> bool:
    """Whether this is a virtual machine that tells its host of freed memory, by the system's folder of such devices."""
    try:
        features = [path.read_text() for path in balloons.glob("*/features")]  # a digit a bit, the lowest first
    except OSError:
        return False
    return any(bits[PAGE_REPORTING : PAGE_REPORTING + 1] == "1" for bits in features)


def raw_now(planned: Engine, profile: MachineProfile) -> float:
    """Plain reading of a model's file as the profile has it, measured again. `planned` is opened with `plan_only`."""
    with ModelFiles(planned.file.paths) as files:
        layout = expert_layout(planned.file, planned.spec.moe_layers, [files[i].block for i in range(len(files))])
        return raw_rate(files, [run for runs in layout.runs.values() for run in runs], profile.raw_depth)


def raw_depth(config: EngineConfig) -> int:
    return config.io_threads


def machine_name(cpu: str, cores: int) -> str:
    """What a profile holds for: figures of one machine say nothing of another."""
    return f"{cpu}, {cores} cores, {platform.system()}"


def _runs(engine: Engine) -> list[Run]:
    return [run for runs in engine.store.layout.runs.values() for run in runs]
