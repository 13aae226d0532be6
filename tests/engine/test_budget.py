"""The memory budget, as the operating system sees it: runs in a memory cgroup of that size, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import opened
from tiny import T, write_tiny

from sluice.config import EngineConfig, parse_size
from sluice.engine import Engine
from sluice.engine.budget import DEFAULT_SHARE, MemoryNeeds, plan_memory
from sluice.errors import BudgetError, ContextError, InputError

MiB = 1 << 20
N_EXPERTS_IN_ALL = 4 * 64
EXPERT_BYTES = 3 * 384 * 256 * 4  # float32: 302 MB in all, quick to write and to compute

RUN = """
import json, os, sys
from pathlib import Path
if sys.argv[1]:
    Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
sys.path[:0] = sys.argv[2:4]
import numpy as np
from sluice.engine import Engine
from sluice.errors import BudgetError
path, ram, n_prompt, n_decode, options = sys.argv[4], sys.argv[5], *json.loads(sys.argv[6])
try:
    engine = Engine.open(path, ram=ram or None, **options)
except BudgetError as error:
    print(json.dumps({"refused": str(error)}))
    sys.exit(0)
with engine, engine.session() as session:
    ids = np.random.default_rng(0).integers(0, 400, n_prompt + n_decode).tolist()
    if n_prompt:
        logits = session.feed(ids[:n_prompt])
    for token in ids[n_prompt:]:
        (logits,) = engine.decode([session], [token])
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) << 10
    stats = engine.stats()
    print(json.dumps({
        "peak": peak, "slots": engine.plan.slots, "budget": engine.plan.budget,
        "finite": bool(np.isfinite(logits).all()) if n_prompt else None,
        "evictions": sum(phase["evictions"] for phase in stats.values()),
    }))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("budget") / "m.gguf"
    write_tiny(path, n_layers=4, n_expert=64, top_k=4, n_ff_exp=384, expert_type=T.F32)
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf").path


# --- in a cgroup


def _hierarchy() -> tuple[Path, str, str] | str:
    """Where a cgroup can be made, and its files of limit and swap; or why there is none."""
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    if (first / "memory.limit_in_bytes").exists():
        found = first, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    elif (second / "cgroup.controllers").exists():
        if "memory" not in (second / "cgroup.subtree_control").read_text().split():
            return "the root cgroup doesn't hand on its memory controller"
        found = second, "memory.max", "memory.swap.max"
    else:
        return "no memory cgroup on this system"
    return found if os.access(found[0], os.W_OK) else f"{found[0]} can't be written: run as root"


@contextlib.contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """A cgroup whose processes are killed when they, with their page cache, take more than `limit` bytes."""
    found = _hierarchy()
    if isinstance(found, str):
        pytest.skip(found)
    parent, limit_file, swap_file = found
    group = parent / f"sluice-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {parent}: {error.strerror}")
    try:
        (group / limit_file).write_text(str(limit))
        with contextlib.suppress(OSError):  # kernels without swap accounting
            (group / swap_file).write_text(str(limit) if "memsw" in swap_file else "0")
        yield group
    finally:
        group.rmdir()


def run_apart(
    model: Path, ram: str, n_prompt: int, n_decode: int, group: Path | None = None, **options: Any
) -> dict[str, Any]:
    """Open, feed and decode in another process, from its first moment in `group`."""
    here = Path(__file__).parent
    places = [str(group) if group else "", str(here.parent), str(here), str(model)]
    work = json.dumps([n_prompt, n_decode, {"threads": 1, **options}])
    done = subprocess.run(
        [sys.executable, "-c", RUN, *places, ram, work], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"exit {done.returncode} (-9: killed for memory): {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("ram", ["190M", "260M"])
def test_a_run_stays_inside_its_budget(model: Path, ram: str) -> None:
    with memory_cgroup(parse_size(ram)) as group:
        found = run_apart(model, ram, 1100, 60, group, ctx=2048)
    assert found["finite"]
    assert found["peak"] <= found["budget"] == parse_size(ram)
    assert found["slots"] < N_EXPERTS_IN_ALL and found["evictions"] > 0
    # The budget is used, too: most of what the slots can't have is fixed needs.
    assert found["slots"] * EXPERT_BYTES > 0.1 * parse_size(ram)


def test_the_budget_that_a_refusal_names_works(model: Path) -> None:
    named = smallest_named(run_apart(model, "60M", 0, 0, ctx=2048)["refused"])
    # Each process measures itself a little differently: one step of the refusal's own rounding is allowed.
    with memory_cgroup(parse_size(named)) as group:
        found = run_apart(model, named, 700, 3, group, ctx=2048)
        if "refused" in found:
            again = smallest_named(found["refused"])
            assert parse_size(again) - parse_size(named) <= 2 * MiB
            pytest.skip(f"this process is larger than the one that was refused: {again} instead of {named}")
    assert found["finite"] and found["slots"] >= 4
    assert found["peak"] <= parse_size(named)


def test_a_cgroup_lowers_the_default_budget(model: Path) -> None:
    free = run_apart(model, "", 0, 0)["budget"]
    limit = 400 * MiB
    assert free > limit, "this test needs a machine with more than 600 MB free"
    with memory_cgroup(limit) as group:
        found = run_apart(model, "", 600, 3, group)
    assert found["budget"] <= DEFAULT_SHARE * limit
    assert found["peak"] <= found["budget"] and found["slots"] < N_EXPERTS_IN_ALL


# --- refusals


def smallest_named(message: str) -> str:
    assert "\n" not in message
    named = re.search(r"--ram (\d+M)\b(?!.*--ram \d)", message)
    assert named, message
    return named[1]


def smallest_budget(path: Path) -> int:
    """Bytes; how much depends on what this process holds already."""
    with pytest.raises(BudgetError) as caught:
        Engine.open(path, ram=1, threads=1, ctx=512)
    return parse_size(smallest_named(str(caught.value)))


def test_too_small_a_budget_is_refused_with_one_that_works(tiny: Path) -> None:
    for ram in ("10M", "1M", "1"):
        with pytest.raises(BudgetError, match="too little for this model") as caught:
            Engine.open(tiny, ram=ram, threads=1, ctx=512)
        named = smallest_named(str(caught.value))
        with Engine.open(tiny, ram=parse_size(named) + 2 * MiB, threads=1, ctx=512) as engine:
            assert engine.plan.slots >= 2 and engine.plan.budget is not None
            engine.logits([1, 2, 3])
        with pytest.raises(BudgetError):
            Engine.open(tiny, ram=parse_size(named) - 8 * MiB, threads=1, ctx=512)


def test_a_budget_buys_slots(model: Path) -> None:
    slots = []
    least = smallest_budget(model)
    for more in (20 * MiB, 70 * MiB, 120 * MiB, 2048 * MiB):
        with Engine.open(model, ram=least + more, threads=1, ctx=512) as engine:
            slots.append(engine.plan.slots)
            assert engine.plan.floor_slots == 16 and engine.plan.below_floor == (engine.plan.slots < 16)
            assert engine.store.n_slots == engine.plan.slots
    assert slots[0] < slots[1] < slots[2] < slots[3] == N_EXPERTS_IN_ALL
    between = (slots[2] - slots[1]) * EXPERT_BYTES
    assert 0.9 * 50 * MiB < between < 50 * MiB


def test_slots_and_budget_together(model: Path) -> None:
    least = smallest_budget(model)
    with Engine.open(model, expert_slots=10, ram=least + 40 * MiB, threads=1, ctx=512) as engine:
        assert engine.plan.slots == 10 and engine.plan.budget == least + 40 * MiB
    with Engine.open(model, expert_slots=10**6, threads=1, ctx=512) as engine:
        assert engine.plan.slots == N_EXPERTS_IN_ALL and engine.plan.budget is None
    with pytest.raises(BudgetError, match="can't hold 200 expert slots") as caught:
        Engine.open(model, expert_slots=200, ram="200M", threads=1, ctx=512)
    needed = re.search(r"need (\d+M)", str(caught.value))
    assert needed
    with Engine.open(model, expert_slots=200, ram=parse_size(needed[1]) + 2 * MiB, threads=1, ctx=512) as engine:
        assert engine.plan.slots == 200
    with pytest.raises(BudgetError, match="3 is too few: one layer of one token needs 4"):
        Engine.open(model, expert_slots=3, threads=1)


def test_more_context_and_streams_cost_slots(model: Path) -> None:
    slots = {}
    variants: list[dict[str, Any]] = [
        {"ctx": 512},
        {"ctx": 2048},
        {"ctx": 512, "streams": 8},
        {"ctx": 2048, "kv": "f32"},
    ]
    ram = smallest_budget(model) + 100 * MiB
    for options in variants:
        with Engine.open(model, ram=ram, threads=1, **options) as engine:
            slots[str(options)] = engine.plan.slots
    few, long, many, wide = slots.values()
    assert few > long > wide and few > many


def test_a_context_beyond_the_models_is_refused(tiny: Path) -> None:
    with pytest.raises(InputError, match="--ctx 2049 exceeds the 2048 positions"):
        Engine.open(tiny, ctx=2049)
    with opened(tiny, ctx=40, expert_slots=2) as engine:
        with engine.session() as session, pytest.raises(ContextError, match=r"41 tokens do not fit.*raise --ctx"):
            session.feed([1] * 41)
        engine.logits([1] * 40)


@pytest.mark.parametrize("ctx", [1, 2, 15, 16, 17])
def test_short_contexts_work(tiny: Path, ctx: int) -> None:
    with opened(tiny, ctx=ctx, expert_slots=2) as engine:
        assert engine.logits([1] * ctx).shape == (ctx, 400)


def test_plans_fit_their_budget() -> None:
    needs = MemoryNeeds(process=50 * MiB, dense=MiB, kv=MiB, workspace=MiB, scratch=MiB, work=MiB)
    sizes: dict[str, Any] = {"free": 10**9, "least_slots": 2, "floor_slots": 20, "all_slots": 1000}
    for ram in range(100 * MiB, 300 * MiB, 7 * MiB):
        plan = plan_memory(needs, MiB, ram=ram, expert_slots=None, **sizes)
        assert plan.slots >= 2 and needs.fixed + plan.slots * MiB <= ram
        assert plan.below_floor == (plan.slots < 20)
    assert plan_memory(needs, MiB, ram=None, expert_slots=None, **sizes).budget == int(DEFAULT_SHARE * 10**9)


def test_options_are_checked() -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"ram": 0}, "ram"), ({"expert_slots": 0}, "expert_slots"), ({"ctx": 0}, "ctx"), ({"threads": 0}, "threads"),
        ({"threads": 513}, "512"), ({"streams": 0}, "streams"), ({"io_threads": 65}, "io_threads"),
        ({"ctx": 1.5}, "ctx"), ({"expert_slots": "9"}, "expert_slots"), ({"kv": None}, "kv"),
        ({"policy": "belady"}, "lru"), ({"kv": "f64"}, "q8_0"), ({"kv": "f16,q5"}, "q4_0"), ({"routing": "x"}, "exact"),
    )  # fmt: skip
    for options, named in refused:
        with pytest.raises(InputError, match=named):
            EngineConfig(**options)
    assert type(EngineConfig(ctx=np.int32(64)).ctx) is int  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"unknown option 'slots'.*expert_slots"):
        Engine.open("m.gguf", slots=3)


def test_a_kv_type_that_does_not_fit_the_heads_is_refused(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", head_dim=48, n_layers=1)
    for kv in ("q8_0", "f16,q4_0"):
        with pytest.raises(InputError, match="multiple of 32, this model's have 48"):
            Engine.open(model.path, kv=kv)
    with Engine.open(model.path, kv="f16", expert_slots=4) as engine:
        assert np.isfinite(engine.logits([1, 2, 3])).all()
