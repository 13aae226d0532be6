"""Models divided over a second device: logits, budgets, copies, refusals. On Vulkan, a graphics processor or Mesa's."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Prompt, opened, ordered, prompt, run
from tiny import T, write_tiny

from sluice.cli import main
from sluice.cli.eval_compare import _settings
from sluice.cli.opening import device_for, machine_with
from sluice.cli.plan_device import show_splits
from sluice.config import EngineConfig
from sluice.engine import Engine
from sluice.engine import devices as trials
from sluice.engine.device_site import DeviceSite
from sluice.engine.pairs import KEPT_PAIRS
from sluice.engine.split import SplitStepper
from sluice.errors import BudgetError, GgmlError, InputError, ReadError
from sluice.ggml import Context, Device, DeviceTensors, GgmlType, Graph, devices, load_library
from sluice.io.files import ModelFiles
from sluice.lab.replay import Demands
from sluice.lab.tiers import TierSlots, replay_tiers
from sluice.plan import measure
from sluice.trace import TraceReader
from sluice.vram import DevicePool

MiB = 1 << 20
# Where all experts are chosen, so that rounding can't change a route, and weights are float32: what is left is that
# devices multiply in half precision.
NEAR = 5e-3


@pytest.fixture(scope="module")
def device(vulkan_ggml: Path) -> str:
    """The name of a device."""
    return devices(load_library(vulkan_ggml))[0].name


@pytest.fixture(scope="module")
def everyone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens take every expert."""
    path = tmp_path_factory.mktemp("m") / "everyone.gguf"
    write_tiny(
        path,
        n_layers=4,
        n_expert=4,
        top_k=4,
        n_embd=64,
        n_ff_exp=64,
        head_dim=32,
        dense_layers=(1,),
        expert_type=T.F32,
        dense_type=T.F32,
    )
    return path


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with more experts than a few slots hold, of two kinds of matrices."""
    path = tmp_path_factory.mktemp("m") / "many.gguf"
    write_tiny(
        path,
        n_layers=4,
        n_expert=12,
        top_k=3,
        n_embd=64,
        n_ff_exp=64,
        head_dim=32,
        expert_type=(T.F32, T.F16),
        dense_type=T.F32,
    )
    return path


def divided(path: Path, ggml: Path, device: str, make_reader: Any = None, **options: Any) -> Engine:
    return opened(path, make_reader, ggml=ggml, device=device, kv="f32", **options)


def here(path: Path, ggml: Path, it: Prompt, **options: Any) -> np.ndarray:
    """The processor's logits."""
    with opened(path, ggml=ggml, device="cpu", **{"kv": "f32", **options}) as engine:
        assert engine.device is None and "device" not in engine.mode
        return run(engine, it)


def apart(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Relative L2 of each row."""
    assert np.isfinite(found).all()
    return np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)


@pytest.fixture
def it() -> Prompt:
    return prompt(np.random.default_rng(3), 40, 8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gpu_layers": 2},
        {"gpu_layers": 1},
        {"cpu_moe_layers": 4},
        {"expert_slots": 4, "upload_from": 1},
        {"expert_slots": 5, "upload_from": 20, "gpu_layers": 3},
        {"prefetch": False, "overlap": False},
    ],
    ids=str,
)
def test_logits_are_the_processors(
    everyone: Path, vulkan_ggml: Path, device: str, it: Prompt, options: dict[str, Any]
) -> None:
    with divided(everyone, vulkan_ggml, device, **options) as engine:
        found = run(engine, it)
        facts, mode = engine.device, engine.mode
    assert facts is not None and mode["device"]["name"] == device
    # a segment begins with a dense layer, so layers 1 and 2 go together
    assert mode["device"]["layers"] == facts["layers"] == {1: 1, 2: 1, 3: 3}.get(options.get("gpu_layers", 4), 4)
    assert apart(found, here(everyone, vulkan_ggml, it)).max() < NEAR


@pytest.mark.parametrize("kv", ["f16", "q4_0", "q8_0,q4_0"])
def test_quantised_keys_and_values(everyone: Path, vulkan_ggml: Path, device: str, it: Prompt, kv: str) -> None:
    with opened(everyone, ggml=vulkan_ggml, device=device, kv=kv) as engine:
        found = run(engine, it)
    # the processor quantises queries too before it multiplies them by quantised keys
    assert apart(found, here(everyone, vulkan_ggml, it, kv=kv)).max() < (NEAR if kv == "f16" else 0.06)


def test_experts_move_between_disk_ram_and_device(many: Path, vulkan_ggml: Path, device: str) -> None:
    it = prompt(np.random.default_rng(5), 30, 60)
    with divided(many, vulkan_ggml, device) as engine:
        whole = engine.device
        roomy = run(engine, it)
    assert whole is not None and whole["slots"] == 4 * 12
    slots = (24 * 4 + 24 * 2) * 3 * 64 * 64  # bytes: half of the layers' in float32, half in float16
    tight = whole["bytes"] - slots * 7 // 10
    with divided(
        many, vulkan_ggml, device, ordered(7), vram=tight, expert_slots=7, upload_from=6, prefetch=True
    ) as engine:
        found, facts, stats = run(engine, it), engine.device, engine.stats()
        pool = engine._share.site.pool  # type: ignore[union-attr]
        for group in pool.groups:  # type: ignore[union-attr]
            group.level.cache.check()
            for key in group.level.cache.keys_resident():
                assert key in group.level._passing or not engine.store.cache.resident(key), "it lies in one place"
    assert facts is not None and facts["bytes"] <= tight and 0 < facts["slots"] < 20
    decode, prefill = stats["decode"], stats["prefill"]
    assert min(decode[name] for name in ("device_hits", "promotions", "demotions", "misses", "evictions")) > 0
    assert prefill["uploads"] > 0
    demanded = sum(phase["token_demands"] for phase in stats.values())
    assert decode["token_demands"] == 60 * 4 * 3 and demanded > decode["token_demands"]
    assert decode["device_hits"] + decode["demands"] == decode["token_demands"]
    # near ties of routers may fall otherwise where experts are computed elsewhere
    assert np.median(apart(found, roomy)) < NEAR


@pytest.mark.parametrize(("overlap", "n"), [(True, 200), (False, 40)])  # of 200, more pairs than are kept
def test_nothing_is_copied_to_what_the_device_reads(
    many: Path, vulkan_ggml: Path, device: str, overlap: bool, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = prompt(np.random.default_rng(6), n, 40)
    reading: set[tuple[int, int]] = set()  # slots, with their group, of graphs that were begun since it was waited for
    pairs_there, wait, parts = SplitStepper._pairs_there, DeviceSite.wait, DevicePool._parts
    beside = []
    n_pairs = 0  # of the last of them

    def begun(self: Any, i: int, group: Any, demand: Any, slots: Any, n: int) -> None:
        nonlocal n_pairs
        pairs_there(self, i, group, demand, slots, n)
        n_pairs = sum(len(demand.pairs[key.expert]) for key in slots)
        if self.site.busy:
            reading.update((id(group), slot) for slot in slots.values())

    def waited(self: Any) -> None:
        wait(self)
        reading.clear()

    def copied(self: Any, layer: int, slot: int, below: memoryview) -> Any:
        assert (id(self.group(layer)), slot) not in reading
        beside.append(n_pairs if reading else 0)
        return parts(self, layer, slot, below)

    monkeypatch.setattr(SplitStepper, "_pairs_there", begun)
    monkeypatch.setattr(DeviceSite, "wait", waited)
    monkeypatch.setattr(DevicePool, "_parts", copied)
    with divided(many, vulkan_ggml, device) as engine:
        vram = engine.device["bytes"] - (24 * 4 + 24 * 2) * 3 * 64 * 64 * 6 // 10  # type: ignore[index]
    options = {"vram": vram, "expert_slots": 12, "prefetch": False, "overlap": overlap}
    with divided(many, vulkan_ggml, device, upload_from=2, **options) as engine:
        beside.clear()
        run(engine, it)
        prefill, decode = engine.stats()["prefill"], engine.stats()["decode"]
    assert prefill["uploads"] > 0 and decode["promotions"] > 0
    assert any(beside) == overlap, "what is uploaded is copied beside pairs"
    assert (max(beside) > KEPT_PAIRS) == (n == 200)
    # a rise is copied beside the next segment, which is the device's after each of its layers
    assert decode["overlapped"] == (decode["promotions"] if overlap else 0)
    assert (prefill["overlapped"] > 0) == overlap


@pytest.mark.parametrize("slots", [4, 12])
@pytest.mark.parametrize("share", [0.3, 0.75])
def test_the_simulator_counts_what_the_engine_does(
    many: Path, vulkan_ggml: Path, device: str, tmp_path: Path, slots: int, share: float
) -> None:
    trace, bytes_of_slots = tmp_path / "t.trace", (24 * 4 + 24 * 2) * 3 * 64 * 64
    with divided(many, vulkan_ggml, device, gpu_layers=3, streams=2) as engine:
        assert engine.device is not None
        vram = engine.device["bytes"] - int(bytes_of_slots * 0.75 * (1 - share))
    options: dict[str, Any] = {"upload_from": 1 << 30, "prefetch": False, "policy": "lru", "gpu_layers": 3}
    with divided(
        many, vulkan_ggml, device, ordered(slots), vram=vram, expert_slots=slots, trace=trace, streams=2, **options
    ) as engine:
        for seed in (slots, slots + 1):
            run(engine, prompt(np.random.default_rng(seed), 5, 40))
        live, facts = engine.stats(), engine.device
    assert facts is not None
    with TraceReader(trace) as reader:
        demands = Demands.of(reader)
    counts = replay_tiers(demands, [TierSlots(*one) for one in facts["groups"]], slots, "lru")
    names = {"device_hits": "above", "hits": "hits", "misses": "misses", "promotions": "promotions",
             "demotions": "demotions"}  # fmt: skip
    for phase in ("prefill", "decode"):
        mine = counts.only(demands.of_phase(phase))
        assert {name: live[phase][name] for name in names} == {n: int(getattr(mine, m).sum()) for n, m in names.items()}
    assert live["decode"]["promotions"] and live["decode"]["device_hits"]


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8, 1.0])
def test_a_device_holds_no_more_than_it_may(many: Path, vulkan_ggml: Path, device: str, share: float) -> None:
    with divided(many, vulkan_ggml, device) as engine:
        whole = engine.device
    assert whole is not None
    vram = int(share * whole["bytes"])
    with divided(many, vulkan_ggml, device, vram=vram) as engine:
        facts, notes = engine.device, engine.notes
        rows = run(engine, prompt(np.random.default_rng(1), 20, 3))
        if engine._share.site is not None:
            assert engine._share.site.n_bytes <= vram
    assert np.isfinite(rows).all()
    assert facts["bytes"] <= vram if facts is not None else "takes no layer" in notes[-1]


def test_streams_share_a_step(everyone: Path, vulkan_ggml: Path, device: str) -> None:
    rng = np.random.default_rng(8)
    prompts = [prompt(rng, n, 6) for n in (17, 5, 33)]
    with divided(everyone, vulkan_ggml, device, streams=4) as engine:
        sessions = [engine.session() for _ in prompts]
        rows = [[] for _ in prompts]
        for i, logits in engine.prefill_many([(s, p.ids) for s, p in zip(sessions, prompts, strict=True)]):
            rows[i].append(logits.copy())
        for step in range(6):
            logits = engine.decode(sessions, [p.forced[step] for p in prompts])
            for row, one in zip(rows, logits, strict=True):
                row.append(one.copy())
        copy = engine.session()
        copy.copy(sessions[0])
        after, own = (engine.decode([session], [7])[0].copy() for session in (copy, sessions[0]))
    for row, p in zip(rows, prompts, strict=True):
        assert apart(np.stack(row), here(everyone, vulkan_ggml, p)).max() < NEAR
    assert apart(after[None], own[None]).max() < NEAR, "keys and values of the device are copied too"


def test_every_token_of_a_text(everyone: Path, vulkan_ggml: Path, device: str) -> None:
    ids = np.random.default_rng(2).integers(0, 400, 50).tolist()
    with divided(everyone, vulkan_ggml, device) as engine:
        found = engine.logits(ids)
    with opened(everyone, ggml=vulkan_ggml, device="cpu", kv="f32") as engine:
        assert apart(found, engine.logits(ids)).max() < NEAR


def test_a_prompt_of_several_chunks(everyone: Path, vulkan_ggml: Path, device: str) -> None:
    """The first of them wants no logits, and so nothing of the last layer's experts."""
    it = prompt(np.random.default_rng(4), 600, 2)
    with divided(everyone, vulkan_ggml, device, ctx=1024, expert_slots=8) as engine:
        assert engine.prefetching
        found = run(engine, it)
    assert apart(found, here(everyone, vulkan_ggml, it, ctx=1024)).max() < NEAR


def test_a_step_that_fails_leaves_nothing_wrong(many: Path, vulkan_ggml: Path, device: str, it: Prompt) -> None:
    with divided(many, vulkan_ggml, device, expert_slots=6, upload_from=4) as engine:
        expected = run(engine, it)
        site = engine._share.site
        assert site is not None
        start, calls = site.start, iter(range(1000))

        def broken(graph: Graph) -> None:
            if next(calls) == 9:
                raise GgmlError("the device is lost")
            start(graph)

        site.start = broken  # type: ignore[method-assign]
        with pytest.raises(GgmlError, match="lost"):
            run(engine, it)
        site.start = start  # type: ignore[method-assign]
        for group in site.pool.groups:  # type: ignore[union-attr]
            group.level.cache.check()
        assert np.median(apart(run(engine, it), expected)) < NEAR


def test_a_read_that_fails_is_raised(many: Path, vulkan_ggml: Path, device: str, it: Prompt) -> None:
    with divided(many, vulkan_ggml, device, expert_slots=6, cpu_moe_layers=4, reader="threads") as engine:
        run(engine, it)

        def torn(*_: Any) -> int:
            raise ReadError("m.gguf: the disk is gone")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelFiles, "read_into", torn)
            patch.setattr(ModelFiles, "read_exact", torn)
            with pytest.raises(ReadError, match="gone"):
                run(engine, it)
        assert np.isfinite(run(engine, it)).all()


# --- refusals


@pytest.fixture
def wrong_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies of experts that arrive as other bytes."""
    lift = DevicePool.lift

    def other(self: DevicePool, rise: Any, source: int) -> None:
        view = self.store.slot_view(source)
        view[:] = bytes(reversed(bytes(view)))
        lift(self, rise, source)

    monkeypatch.setattr(DevicePool, "lift", other)
    yield


def test_a_device_that_computes_experts_wrongly_is_refused(
    everyone: Path, vulkan_ggml: Path, device: str, wrong_copies: None
) -> None:
    with pytest.raises(GgmlError, match=r"computes an expert of layer \d wrongly.*--device cpu"):
        divided(everyone, vulkan_ggml, device)


def test_a_device_that_computes_layers_wrongly_is_refused(
    everyone: Path, vulkan_ggml: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceSite, "load", lambda self, files: None)  # weights stay zero
    with pytest.raises(GgmlError, match=r"computes layer \d wrongly.*--device cpu"):
        divided(everyone, vulkan_ggml, device)


def test_what_a_device_lacks_stays_on_the_processor(
    everyone: Path, vulkan_ggml: Path, device: str, it: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    supports = Device.unsupported

    def no_rows(self: Device, graph: Graph) -> str | None:
        library = self.library
        names = [
            library.ggml_op_desc(library.ggml_graph_node(graph.ptr, i))
            for i in range(library.ggml_graph_n_nodes(graph.ptr))
        ]
        first = any(name == b"GET_ROWS" for name in names[:2]) and not any(b"MUL_MAT_ID" in name for name in names)
        return "GET_ROWS" if first else supports(self, graph)

    monkeypatch.setattr(Device, "unsupported", no_rows)
    with divided(everyone, vulkan_ggml, device) as engine:
        notes, facts, found = engine.notes, engine.device, run(engine, it)
    assert facts is not None and facts["layers"] == 3 and facts["slots"] > 0
    assert len(notes) == 1 and "lacks GET_ROWS" in notes[0] and "processor" in notes[0]
    assert apart(found, here(everyone, vulkan_ggml, it)).max() < NEAR


def test_experts_stay_where_a_device_lacks_their_product(
    everyone: Path, vulkan_ggml: Path, device: str, it: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceSite, "reserve_pairs", lambda self, parts, n: "MUL_MAT_ID")
    with divided(everyone, vulkan_ggml, device) as engine:
        assert engine.device is not None and engine.device["slots"] == 0
        assert "lacks MUL_MAT_ID for experts" in engine.notes[0]
        assert apart(run(engine, it), here(everyone, vulkan_ggml, it)).max() < NEAR


def test_bad_settings_are_refused_by_name(everyone: Path, vulkan_ggml: Path, device: str) -> None:
    with pytest.raises(InputError, match=f"--device Nobody0: .* brings {device}: name one of"):
        divided(everyone, vulkan_ggml, "Nobody0")
    with pytest.raises(BudgetError, match=f"--vram .* can't hold the last 4 layers.* on {device}"):
        divided(everyone, vulkan_ggml, device, gpu_layers=4, vram=MiB // 4)
    with divided(everyone, vulkan_ggml, device) as engine:
        assert engine.device is not None and engine.device["layers"] == 4
        tight = engine.device["weights_bytes"] + engine.device["kv_bytes"]
    with divided(everyone, vulkan_ggml, device, vram=tight) as engine:  # fewer, where nobody said how many
        assert engine.device is None or engine.device["layers"] < 4
    with pytest.raises(BudgetError, match="give fewer --gpu-layers"):
        divided(everyone, vulkan_ggml, device, gpu_layers=4, vram=tight)
    with pytest.raises(BudgetError, match=r"--vram 999\.0G: .* free"):
        divided(everyone, vulkan_ggml, device, vram=999 << 30)
    with pytest.raises(InputError, match="prerouter runs on the processor alone"):
        divided(everyone, vulkan_ggml, device, prerouter=everyone)
    wrong: dict[str, Any] = {"gpu_layers": -1, "cpu_moe_layers": "two", "vram": 0, "device": ""}
    for name in wrong:
        with pytest.raises(InputError, match=name):
            opened(everyone, **{name: wrong[name]})


def test_without_a_device_that_name_says_so(everyone: Path) -> None:
    with pytest.raises(InputError, match=r"brings no device beside the processor.*--ggml"):
        opened(everyone, device="Vulkan0")
    with opened(everyone) as engine:
        assert engine.device is None and engine.notes == []
    with opened(everyone, device="cpu", vram=MiB, cpu_moe_layers=1) as engine:
        assert engine.notes == ["--vram and --cpu-moe-layers left unused: everything is computed on the processor"]


def test_a_device_that_fails_half_way_is_left_with_nothing(
    everyone: Path, vulkan_ggml: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites: list[DeviceSite] = []

    def full(site: DeviceSite, parts: Any, n_pairs: int) -> str | None:
        sites.append(site)
        raise GgmlError("no room for pairs")

    monkeypatch.setattr(DeviceSite, "reserve_pairs", full)
    with pytest.raises(GgmlError, match="no room for pairs"):
        divided(everyone, vulkan_ggml, device)
    assert len(sites) == 4  # each layer less was tried
    for site in sites:
        with pytest.raises(GgmlError, match="closed"):
            _ = site.backend.ptr


def test_scratch_memory_that_could_not_grow_is_not_used_again(
    everyone: Path, vulkan_ggml: Path, device: str, it: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    with divided(everyone, vulkan_ggml, device) as engine:
        expected = run(engine, it)
        site = engine._share.site
        assert site is not None
        before = site.allocator.generation
        with monkeypatch.context() as patch:
            patch.setattr(engine.library, "ggml_gallocr_reserve", lambda *_: False)
            with pytest.raises(GgmlError, match="out of memory for compute buffers"):
                site.allocator.reserve(site.segments.head(0, 1, place=False)[1])
        assert site.allocator.generation == before + 1 and site.allocator.n_bytes == 0
        site.segments.reserve(site.sizes.n_tokens, site.sizes.n_ctx, site.sizes.streams)
        site.segments.close()
        assert np.median(apart(run(engine, it), expected)) < NEAR


def test_copies_there_go_in_pieces(vulkan_ggml: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.ggml.device.PIECE_BYTES", 24)
    library = load_library(vulkan_ggml)
    (found,) = (one for one in devices(library) if one.name == device)
    with Context(library, 2) as c:
        tensor = c.tensor(GgmlType.F32, 64)
        with DeviceTensors(found, c) as memory:
            numbers = np.arange(64, dtype=np.float32)
            memory.write(tensor, numbers)
            memory.copy(tensor, 4 * 3, 4 * 40, 4 * 20)
            memory.clear(tensor, 0, 4 * 13)
            there = np.empty(64, np.float32)
            memory.read(tensor, there)
    expected = numbers.copy()
    expected[40:60], expected[:13] = numbers[3:23], 0
    assert np.array_equal(there, expected)


def test_the_command_line(everyone: Path, vulkan_ggml: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(everyone), "--raw", "-p", "the river", "-n", "4", "--json", "--ggml", str(vulkan_ggml)]
    assert main([*words, "--device", device, "--vram", "64M", "--gpu-layers", "3", "--cpu-moe-layers", "3"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert result["mode"]["device"]["layers"] == result["device"]["layers"] == 3
    assert result["device"]["bytes"] <= result["device"]["budget_bytes"] == 64 * MiB
    assert result["ledger"]["decode"]["device_hits"] > 0
    assert f"{device}: 3 of 4 layers" in err
    assert main([*words, "--device", "Nobody0"]) == 2
    assert "Nobody0" in capsys.readouterr().err
    assert main(["doctor", "--ggml", str(vulkan_ggml), "--json"]) == 0
    [listed] = [one for one in json.loads(capsys.readouterr().out.splitlines()[-1])["devices"] if one["name"] == device]
    assert listed["memory_bytes"] >= listed["memory_free_bytes"] > 0
    assert min(listed[f"{name}_bytes_per_s"] for name in ("memory", "up", "down")) > 0


def test_a_plan_divides_and_predicts(
    everyone: Path, vulkan_ggml: Path, device: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(measure, "SETTLE_S", 0.0)
    words = ["plan", str(everyone), "--ctx", "64", "--threads", "1", "--ggml", str(vulkan_ggml), "--device", device]
    words += ["--profile", str(tmp_path / "profile.json")]
    assert main([*words, "--ram", "3G", "--vram", "3M,64M", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["device"]
    assert found["name"] == device and [row["vram_bytes"] for row in found["splits"]] == [3 * MiB, 64 * MiB]
    few, all_of_it = found["splits"]
    assert few["device"] is None or few["device"]["bytes"] <= 3 * MiB
    assert all_of_it["device"]["moe_layers"] == 3 and all_of_it["device"]["slots"] == 12
    assert all_of_it["decode"]["tok_per_s"] > 0 and all_of_it["decode"]["device_demands"] == 12
    assert all_of_it["prefill"]["tok_per_s"] > 0 and all_of_it["prefill"]["device_demands"] == 12
    assert [one["tokens"] for one in found["costs"]["prompts"]] == sorted({32, 64})
    with divided(everyone, vulkan_ggml, device) as engine:
        made = engine.device["slots_bytes"]  # type: ignore[index]
    assert all_of_it["device"]["slots_bytes"] == pytest.approx(made, abs=4096), "as they come to be"
    assert all_of_it["ram"]["dense"] < few["ram"]["dense"] or few["device"] is not None
    show_splits(found)  # as without --json
    out = capsys.readouterr().out
    assert "divided over" in out and "prefill tok/s" in out and "▓ weights" in out and "free " in out
    shared = ["--ggml", str(vulkan_ggml), "--profile", str(tmp_path / "profile.json"), "--ctx", "64", "--threads", "1"]
    assert main(["bench", str(everyone), *shared, "--device", device, "--gen", "2", "--repeat", "1"]) == 2
    assert "predicts the processor alone" in capsys.readouterr().err


def test_tuning_tries_how_many_layers_use_the_slots(
    everyone: Path, vulkan_ggml: Path, device: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["tune", str(everyone), "--ggml", str(vulkan_ggml), "--device", device, "--gen", "4", "--ram", "6G"]
    assert main([*words, "--minutes", "0.15", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["start"]["cpu_moe_layers"] == 0 and result["runs"] >= 1
    assert all(one["knob"] == "cpu_moe_layers" for one in result["tried"][:1])
    assert main([*words, "--device", "Nobody0"]) == 2


# --- pure


def test_what_is_kept_for_a_device_is_not_taken_for_the_processors(vulkan_ggml: Path, device: str) -> None:
    """Tuned settings and outcomes of evaluations; `auto` means what it comes to."""
    asked = {name: EngineConfig(device=name, ggml=vulkan_ggml) for name in ("auto", "cpu", device)}
    machines = {name: machine_with(one) for name, one in asked.items()}
    assert machines["auto"] == machines[device] == f"{machines['cpu']}, with {device_for(asked[device])}"
    assert machine_with(EngineConfig()) == machines["cpu"] and (device_for(asked["auto"]) or "").startswith(device)
    kept = {name: _settings(one) for name, one in asked.items()}
    assert kept["auto"] == kept[device] != kept["cpu"] and "vram" not in kept["cpu"]
    assert _settings(EngineConfig(ggml=vulkan_ggml, vram=MiB)) != kept["auto"]


def test_break_even() -> None:
    # a copy of 10 ms; a pair more costs the processor 1 ms and the device 0.1
    assert trials.break_even(0.010, (0.001, 0.032), (0.001, 0.0041), 32) == 13
    assert trials.break_even(0.010, (0.001, 0.002), (0.001, 0.003), 32) == trials.NEVER
    assert trials.break_even(0.001, (0.005, 0.032), (0.001, 0.002), 32) == 1
    for copy in random.Random(0).choices(range(1, 100), k=50):
        n = trials.break_even(copy, (1, 32), (1, 4.1), 32)
        cost = lambda n, slope: 1 + slope * (n - 1)  # noqa: E731
        assert copy + cost(n, 0.1) <= cost(n, 1) + 1e-9 and copy + cost(n - 1, 0.1) > cost(n - 1, 1) - 1e-9
