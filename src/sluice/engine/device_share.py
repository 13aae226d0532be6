"""What an engine has on a device beside the processor: opened within a budget, tried, timed, and put into its steps.

An engine without a device has an empty share, and steps as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from sluice.config import EngineConfig
from sluice.engine.device_site import DeviceSite, Sizes, open_site
from sluice.engine.devices import NEVER, Trial, device_of, memory_for
from sluice.engine.division import layers_of, of_experts, wanted
from sluice.engine.pairs import PairGraphs
from sluice.engine.split import SplitStepper
from sluice.engine.step import Stepper
from sluice.engine.workspace import Workspace
from sluice.ggml import Backend, DeviceBackend, Library
from sluice.gguf import GgufFile, TensorInfo
from sluice.io.files import ModelFiles
from sluice.memory import rss_bytes
from sluice.models.blocks import Family
from sluice.models.spec import ModelSpec
from sluice.store import ExpertStore
from sluice.vram import Kind, slot_bytes


class DeviceShare:
    """The share; a context manager. `site` is None where the processor does everything, `notes` says why, if asked.

    `process_bytes` is what the device's driver takes of the host's memory, `host_segments` what is left to the host.
    """

    def __init__(self, spec: ModelSpec, config: EngineConfig, family_type: type[Family], dense: Sequence[TensorInfo]):
        self._spec = spec
        self._config = config
        self._family_type = family_type
        self._dense = dense
        self._stack = ExitStack()
        self.notes: list[str] = []
        self.site: DeviceSite | None = None
        self.process_bytes = 0
        self._parts: dict[Kind, list[int]] = {}
        self._vram = 0
        self._upload_from = 0

    @classmethod
    def open(
        cls, file: GgufFile, library: Library, config: EngineConfig, family_type: type[Family], spec: ModelSpec,
        dense: Sequence[TensorInfo], host: Workspace, sizes: Sizes, n_pairs: int,
    ) -> DeviceShare:  # fmt: skip
        """The share that `config` asks for. Raises InputError, BudgetError or GgmlError."""
        share = cls(spec, config, family_type, dense)
        before = rss_bytes()
        device = device_of(library, config)
        share.process_bytes = max(0, rss_bytes() - before)
        if device is None:
            if unused := [flag for flag, given in _placing(config).items() if given]:
                share.notes.append(f"{' and '.join(unused)} left unused: everything is computed on the processor")
            return share
        if config.prerouter is not None or config.routes is not None or config.lora:
            share.notes.append(f"{device.name} is left out: predicted routes and adapters run on the processor alone")
            return share
        share._vram = memory_for(device, config.vram)
        with DeviceBackend(device):  # starts the driver, whose memory is not the share's
            share.process_bytes = max(0, rss_bytes() - before)
        before = rss_bytes()
        opened = open_site(
            device, file, family_type, spec, dense, host, sizes, gpu_layers=config.gpu_layers,
            cpu_moe_layers=config.cpu_moe_layers, vram=share._vram, n_pairs=n_pairs, note=share.notes,
        )  # fmt: skip
        if opened is None:
            return share
        share.site, share._parts = opened
        share._stack.enter_context(share.site)
        grown = rss_bytes() - before
        # memory that a device shares with the host is counted as the device's
        share.process_bytes += max(0, grown - (share.site.n_bytes if grown >= share.site.n_bytes else 0))
        return share

    def __enter__(self) -> DeviceShare:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def host_segments(self) -> frozenset[int]:
        everything = frozenset(range(len(self._spec.moe_layers) + 1))
        return everything if self.site is None else everything - self.site.segment_numbers

    def host_tensors(self, dense: Sequence[TensorInfo]) -> list[TensorInfo]:
        """Those of the resident tensors that the host needs."""
        if self.site is None:
            return list(dense)
        own = {info.name: info for info in (*wanted(dense, self._spec, self.host_segments), *of_experts(dense))}
        return list(own.values())

    def look_ahead(self, prefetching: bool) -> None:
        """Reads are issued ahead, or not."""
        if self.site is not None:
            self.site.segments.lookahead = prefetching

    def load(
        self,
        files: ModelFiles,
        store: ExpertStore,
        host: Workspace,
        pairs: PairGraphs,
        backend: Backend,
        *,
        policy: str,
    ) -> None:
        """Make the slots, read the weights, compare device and processor. Raises GgmlError or ReadError."""
        site = self.site
        if site is None:
            return
        site.make_pool(store, self._parts, self._vram - site.n_bytes, policy)
        site.load(files)
        trial = Trial(site, host, store, pairs, backend)
        trial.check(self._family_type, self._dense, files)
        given = self._config.upload_from
        self._upload_from = trial.upload_from() if given is None else given

    def stepper(self, *parts: Any, **options: Any) -> Stepper:
        if self.site is None:
            return Stepper(*parts, **options)
        return SplitStepper(*parts, **options, site=self.site, upload_from=self._upload_from)

    def copy_kept(self, source: int, target: int, n: int) -> None:
        """As Engine.copy_kept."""
        if self.site is not None:
            self.site.wait()
            self.site.cache.copy(source, target, n)
            if self._spec.recurrent:
                self.site.states.copy(source, target)

    @property
    def mode(self) -> dict[str, Any]:
        """What of this changes the output."""
        site = self.site
        if site is None:
            return {}
        layers = layers_of(self._spec, site.segment_numbers)
        about = {"name": site.device.name, "description": site.device.description, "layers": len(layers)}
        return {"device": {**about, "upload_from": None if self._upload_from >= NEVER else self._upload_from}}

    @property
    def groups(self) -> list[tuple[list[int], int]]:
        """Layers whose experts share slots there, and how many slots those are, or would be."""
        site = self.site
        if site is None:
            return []
        if site.pool is not None:
            return [(list(group.layers), group.level.n_slots) for group in site.pool.groups]
        return [(self._parts[kind], n) for kind, n in self._planned(site).items() if n]

    def _planned(self, site: DeviceSite) -> dict[Kind, int]:
        """How many slots of each kind there would be."""
        return site.slots_in(self._parts, self._vram - site.n_bytes)

    @property
    def _slots_bytes(self) -> int:
        """What the slots take there, or would take."""
        site = self.site
        if site is None:
            return 0
        if site.pool is not None:
            return site.pool.n_bytes
        return sum(n * slot_bytes(site.device, kind) for kind, n in self._planned(site).items())

    @property
    def facts(self) -> dict[str, Any] | None:
        site = self.site
        if site is None:
            return None
        return {
            "name": site.device.name,
            "budget_bytes": self._vram,
            "bytes": site.n_bytes,
            "weights_bytes": site.weights.n_bytes,
            "kv_bytes": site.cache.n_bytes,
            "slots_bytes": self._slots_bytes,
            "layers": len(layers_of(self._spec, site.segment_numbers)),
            "moe_layers": len(site.moe_layers),
            "slots": sum(n for _, n in self.groups),
            "groups": self.groups,
        }


def _placing(config: EngineConfig) -> dict[str, bool]:
    """The options that say what goes to a device, and whether they were given."""
    return {
        "--vram": config.vram is not None,
        "--gpu-layers": bool(config.gpu_layers),
        "--cpu-moe-layers": bool(config.cpu_moe_layers),
    }
