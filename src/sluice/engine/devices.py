"""Chooses a device, tries it against the processor before it is trusted, and times both. It divides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from sluice.config import EngineConfig, format_size
from sluice.engine.device_site import DeviceSite
from sluice.engine.division import layers_of, wanted
from sluice.engine.pairs import PAIR_LIMIT, PairGraphs
from sluice.engine.segments import BatchShape, Columns, SegmentGraphs
from sluice.engine.weights import DenseWeights
from sluice.engine.workspace import Workspace
from sluice.errors import BudgetError, GgmlError, InputError
from sluice.ggml import Backend, Device, GraphAllocator, Library, devices
from sluice.ggml.device import AUTOMATIC
from sluice.gguf import TensorInfo
from sluice.io.files import ModelFiles
from sluice.models.blocks import Family
from sluice.models.kv_cache import KV_PADDING, KVCache
from sluice.models.recurrent import RecurrentState
from sluice.store import ExpertStore
from sluice.types import ExpertKey

VRAM_SHARE = 0.8  # of what is free: the rest is for drivers, screens and ggml's own buffers
FARTHEST = 0.1  # relative L2 between a device's layer and the processor's: rounding is a tenth of that, a wrong one 1
TRIALS = 3
NEVER = 1 << 30  # pairs: more than a step has
MANY = 32  # pairs, for the slope of what a pair more costs


def choose(library: Library, name: str) -> Device | None:
    """The device of that name, None for "cpu"; for "auto" a graphics processor, where ggml brings one that was tried.

    Raises InputError for a name that isn't there.
    """
    if name == "cpu":
        return None
    found = devices(library)
    if name == "auto":
        fit = (device for device in found if device.kind == "gpu" and device.name.startswith(AUTOMATIC))
        return next(fit, None)
    for device in found:
        if device.name.lower() == name.lower():
            return device
    there = ", ".join(device.name for device in found) or "no device beside the processor"
    raise InputError(
        f"--device {name}: the ggml in {library.path} brings {there}: name one of auto, cpu or these, or give another "
        "--ggml"
    )


def device_of(library: Library, config: EngineConfig) -> Device | None:
    """The device that an engine of `config` would use, if it has room and runs the model. Raises InputError."""
    return None if config.gpu_layers == 0 else choose(library, config.device)


def memory_for(device: Device, vram: int | None) -> int:
    """Bytes of the device's memory that may be used: `vram`, or a share of what is free. Raises BudgetError."""
    free, _ = device.memory()
    if vram is None:
        if not free:
            raise BudgetError(f"{device.name} doesn't tell how much of its memory is free: give --vram")
        return int(free * VRAM_SHARE)
    if free and vram > free:
        raise BudgetError(f"--vram {format_size(vram)}: {device.name} has {format_size(free)} free: give that or less")
    return vram


class Trial:
    """Compares and times what a device and the processor make of the same numbers, on an engine's parts.

    Done before the first step: it leaves rubbish in the workspace and in the first rows of the KV cache.
    """

    def __init__(
        self, site: DeviceSite, host: Workspace, store: ExpertStore, pairs: PairGraphs, backend: Backend
    ) -> None:  # fmt: skip
        self.site = site
        self.host = host
        self.store = store
        self.pairs = pairs
        self.backend = backend
        self.spec = site.spec
        self._rng = np.random.default_rng(0)

    def check(self, family_type: type[Family], dense: Sequence[TensorInfo], files: ModelFiles) -> None:
        """Raise GgmlError if the device's first layer, or an expert of it, is not the processor's within rounding."""
        segments = [i for i in sorted(self.site.segment_numbers) if i < len(self.spec.moe_layers)]
        if segments:
            i = next((i for i in segments if i), segments[0])
            self._refuse(self._segment(i, family_type, dense, files), f"layer {self.spec.moe_layers[i]}")
        if self.site.pairs:
            layer = min(self.site.pairs)
            self._refuse(self._expert(layer), f"an expert of layer {layer}")

    def _refuse(self, apart: float, what: str) -> None:
        if not apart <= FARTHEST:  # NaN too
            raise GgmlError(
                f"{self.site.device.name} computes {what} wrongly (it is {apart:.2g} away from the processor's, "
                f"relatively): use --device cpu, or another driver or --ggml"
            )

    def _segment(self, i: int, family_type: type[Family], dense: Sequence[TensorInfo], files: ModelFiles) -> float:
        """How far the device's segment `i` is from the processor's, with weights of its own, on two random tokens."""
        spec, host, site, library = self.spec, self.host, self.site, self.site.device.library
        n = min(2, host.n_tokens)
        shape = BatchShape((Columns(0, n, KV_PADDING),), n)
        layers = layers_of(spec, {i})
        with (
            DenseWeights(library, wanted(dense, spec, {i})) as weights,
            KVCache(library, spec, site.sizes.kv_types, KV_PADDING, 1, layers=layers) as cache,
            RecurrentState(library, spec, 1, layers=layers) as states,
            GraphAllocator(self.backend) as allocator,
            SegmentGraphs(
                family_type(spec, weights.tensors), host, cache, states, allocator, lookahead=False, only={i}
            ) as graphs,
        ):  # fmt: skip
            weights.load(files)
            graphs.reserve(n, KV_PADDING, 1)
            inputs = self._random_inputs(n)
            results = []
            for run, put, get in (
                (lambda: site.compute(site.segments.of(shape)[i]), site.put, site.get),
                (lambda: self.backend.compute(graphs.of(shape)[i]), _nothing, _nothing),
            ):
                for name, array in inputs.items():
                    host.arrays[name].reshape(-1)[: array.size] = array.reshape(-1)
                    put(name, -(-array.size // math.prod(host.arrays[name].shape[1:])))
                run()
                for name in ("residual", "normed"):
                    get(name, n)
                results.append([host.arrays[name][:n].copy() for name in ("residual", "normed")])
            if spec.recurrent:
                site.states.clear(0)
        return max(_apart(there, here) for there, here in zip(*results, strict=True))

    def _random_inputs(self, n: int) -> dict[str, np.ndarray]:
        spec, rng = self.spec, self._rng
        mask = np.full((n, KV_PADDING), -np.inf, np.float16)
        for row in range(n):
            mask[row, : row + 1] = 0
        shapes = {"residual": (n, spec.n_embd), "pairs": (n * spec.top_k, spec.n_embd), "shared": (n, spec.n_embd)}
        inputs: dict[str, np.ndarray] = {
            name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items() if name in self.host.names
        }
        count = np.arange(n)
        return inputs | {
            "tokens": count.astype(np.int32), "positions": count.astype(np.int32), "rows": count.astype(np.int64),
            "outputs": count.astype(np.int32), "mask": mask,
            **({"near_mask": mask} if "near_mask" in self.host.names else {}),
            "scores": rng.uniform(0.1, 1, (n, spec.n_expert)).astype(np.float32),
            "routed": np.tile(np.arange(spec.top_k, dtype=np.int32), (n, 1)),
        }  # fmt: skip

    def _expert(self, layer: int) -> float:
        """How far the device's product with an expert of `layer` is from the processor's: one in RAM, if there is one.

        Otherwise the first is read, and forgotten again.
        """
        site, host, resident = self.site, self.host, self.store.cache.resident
        keys = [ExpertKey(layer, expert) for expert in range(self.spec.n_expert)]
        there = next((key for key in keys if resident(key)), None)
        key = keys[0] if there is None else there
        pool, group, n = site.pool, site.group(layer), min(2, host.n_tokens)
        assert pool is not None and group is not None
        acquired = self.store.acquire([key], 0)
        while not self.store.cache.resident(key):
            self.store.arrived(block=True)
        rise = group.level.rise(key, 0, passing=True)
        assert rise is not None, "nothing is pinned before the first step"
        pool.lift(rise, acquired.slots[0])
        group.level.arrived(rise.read)
        host.arrays["normed"][:n] = self._rng.standard_normal((n, self.spec.n_embd), np.float32)
        bank, slot = group.at(rise.read.slot)
        self._pair_inputs(n, acquired.slots[0])
        self.backend.compute(self.pairs.kept(layer, n))
        here = host.arrays["pairs"][:n].copy()
        self._pair_inputs(n, slot, there=True)
        site.put("normed", n)
        site.compute(site.pairs[layer][bank].kept(layer, n))
        site.get("pairs", n)
        self.store.release([key])
        if there is None:
            self.store.cache.discard(key)
        group.level.release([key])
        group.level.forget(key)
        return _apart(host.arrays["pairs"][:n], here)

    def _pair_inputs(self, n: int, slot: int, *, there: bool = False) -> None:
        arrays = self.host.arrays
        arrays["pair_rows"][:n] = np.arange(n)
        arrays["pair_tokens"][:n] = np.arange(n) % self.host.n_tokens
        arrays["pair_slots"][:n] = slot
        names = ["pair_rows", "pair_tokens", "pair_slots"]
        if "pair_experts" in arrays:
            arrays["pair_experts"][:n] = 0
            names.append("pair_experts")
        for name in names if there else ():
            self.site.put(name, n)

    def upload_from(self) -> int:
        """How many of a step's pairs an expert in RAM must be wanted for, so that copying it up first is sooner.

        More than there ever are where that is never so.
        """
        if not self.site.pairs or self.site.pool is None:
            return NEVER
        layer, many = min(self.site.pairs), min(MANY, len(self.host.arrays["pair_tokens"]), PAIR_LIMIT)
        pool, graphs = self.site.pool, self.site.pairs[layer][0]
        self.host.arrays["normed"][:] = 0
        here, there = [], []
        for n in (1, many):
            self._pair_inputs(n, 0, there=True)
            here.append(_least(lambda n=n: self.backend.compute(self.pairs.kept(layer, n))))
            there.append(_least(lambda n=n: self.site.compute(graphs.kept(layer, n))))
        copy = _least(lambda: pool.copy_bytes(layer))
        return break_even(copy, here, there, many)


def break_even(copy_s: float, here_s: Sequence[float], there_s: Sequence[float], many: int) -> int:
    """The fewest pairs for which `copy_s` and the device's time are less than the processor's.

    Both times grow in a straight line, given at 1 and at `many` pairs.
    """
    slope_here, slope_there = ((times[1] - times[0]) / max(1, many - 1) for times in (here_s, there_s))
    behind = copy_s + there_s[0] - here_s[0]  # at one pair
    if behind < 0:
        return 1
    gain = slope_here - slope_there
    return NEVER if gain <= 0 else min(NEVER, 1 + math.ceil(behind / gain))


def _nothing(name: str, n: int) -> None:
    """Where host and device are the same there is nothing to copy."""


def _least(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs, after one that nobody times."""
    work()
    times = []
    for _ in range(TRIALS):
        began = perf_counter()
        work()
        times.append(perf_counter() - began)
    return min(times)


def _apart(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 distance."""
    with np.errstate(all="ignore"):
        return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
