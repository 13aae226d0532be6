"""Slots for experts in a device's memory: plain tensors, filled from the pool in RAM. It decides nothing.

Devices don't take strided views of one block, as the pool in RAM has them: each matrix of each shape and type is a
tensor of its own, [n_in, n_out, n_slots]. As a tensor's size is bounded, they come in banks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.experts.policies import Policy
from sluice.experts.tiers import Rise, UpperLevel, come_down, settle
from sluice.ggml import Context, Device, DeviceTensors, GgmlType, Tensor
from sluice.gguf import ExpertPart
from sluice.store import ExpertStore

MATRICES = 3  # gate, up, down
Kind = tuple[tuple[GgmlType, int, int], ...]  # type, n_in and n_out of each matrix


def kinds(parts: Mapping[int, Sequence[ExpertPart]], layers: Sequence[int]) -> dict[Kind, list[int]]:
    """`layers` by what their experts' matrices are: layers of a kind share slots."""
    found: dict[Kind, list[int]] = defaultdict(list)
    for layer in layers:
        found[tuple((part.type, part.n_in, part.n_out) for part in parts[layer])].append(layer)
    return dict(found)


class Bank:
    """`n_slots` slots of one kind as three tensors of a context."""

    def __init__(self, context: Context, kind: Kind, n_slots: int) -> None:
        self.n_slots = n_slots
        self.tensors = [context.tensor(type, n_in, n_out, n_slots) for type, n_in, n_out in kind]

    def matrices(self, c: Context, layer: int, first: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slots [first, first + n) as gate, up and down matrices: [n_in, n_out, n] each."""
        gate, up, down = (
            c.view(t, (t.shape[0], t.shape[1], n), t.strides[1:3], first * t.strides[2]) for t in self.tensors
        )
        return gate, up, down


@dataclass
class Group:
    """The slots of all layers of a kind: `banks` of `per_bank` slots, but for the last, and who is in them."""

    layers: Sequence[int]
    per_bank: int
    banks: list[Bank]
    level: UpperLevel

    def at(self, slot: int) -> tuple[int, int]:
        """A slot's bank, and its number there."""
        return divmod(slot, self.per_bank)


class DevicePool:
    """All slots of a device; a context manager. `n_slots` by kind, as `fitted` divides them."""

    def __init__(
        self, device: Device, slots: Mapping[Kind, int], layers: Mapping[Kind, Sequence[int]], store: ExpertStore,
        policy: Mapping[Kind, Policy],
    ) -> None:  # fmt: skip
        self.store = store
        self.groups: list[Group] = []
        library = device.library
        plans = {kind: (n, bank_slots(device, kind)) for kind, n in slots.items() if n}
        n_banks = sum(-(-n // per) for n, per in plans.values())
        self._context = Context(library, MATRICES * max(1, n_banks))
        for kind, (n, per) in plans.items():
            banks = [Bank(self._context, kind, min(per, n - at)) for at in range(0, n, per)]
            self.groups.append(Group(layers[kind], per, banks, UpperLevel(n, policy[kind])))
        self._memory = DeviceTensors(device, self._context, weights=True) if plans else None
        self.n_bytes = self._memory.n_bytes if self._memory else 0
        self._group_of = {layer: group for group in self.groups for layer in group.layers}
        self._bounce = bytearray(store.layout.stride)

    def __enter__(self) -> DevicePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def group(self, layer: int) -> Group | None:
        """The slots that experts of `layer` may lie in; None if there are none."""
        return self._group_of.get(layer)

    def lift(self, rise: Rise, source: int) -> None:
        """Copy an expert up from the slot `source` of the pool in RAM."""
        key, slot = rise.read.key, rise.read.slot
        for tensor, at, view in self._parts(key.layer, slot, self.store.slot_view(source)):
            self._tensors.write(tensor, view, at)

    def copy_bytes(self, layer: int) -> None:
        """Copy what is in the first slot down and up again: how fast, is for who calls to see."""
        for tensor, at, view in self._parts(layer, 0, self.take_down(layer, 0)):
            self._tensors.write(tensor, view, at)

    def take_down(self, layer: int, slot: int) -> memoryview:
        """The bytes that an expert of `layer` in a slot up here has in a slot down there; valid until the next call."""
        below = memoryview(self._bounce)
        for tensor, at, view in self._parts(layer, slot, below):
            self._tensors.read(tensor, view, at)
        return below

    def _parts(self, layer: int, slot: int, below: memoryview) -> list[tuple[Tensor, int, memoryview]]:
        """Each matrix of a slot: its tensor, where in that it begins, and its bytes in a slot of the pool in RAM."""
        group = self._group_of[layer]
        bank, index = group.at(slot)
        places = self.store.layout.places[layer]
        return [
            (tensor, index * tensor.strides[2], below[place.offset : place.offset + tensor.strides[2]])
            for tensor, place in zip(group.banks[bank].tensors, places, strict=True)
        ]

    @property
    def _tensors(self) -> DeviceTensors:
        assert self._memory is not None, "a pool without slots is not asked"
        return self._memory

    def swap(self, rise: Rise, source: int) -> bool:
        """Copy an expert up for good, and who goes down to where `settle` says: whether anyone was kept."""
        level, store = self._group_of[rise.read.key.layer].level, self.store
        kept = b"" if rise.down is None else bytes(self.take_down(rise.down.layer, rise.read.slot))
        self.lift(rise, source)
        return store.filled(settle(level, store.cache, rise), kept)

    def pass_through(self, rise: Rise, source: int) -> bool:
        """Copy an expert up for one step, and who goes down to a free slot: whether anyone was kept."""
        level, store, down = self._group_of[rise.read.key.layer].level, self.store, rise.down
        read = come_down(store.cache, down)
        if read is not None and down is not None:
            store.filled(read, bytes(self.take_down(down.layer, rise.read.slot)))
        self.lift(rise, source)
        level.arrived(rise.read)
        return read is not None

    def clear(self) -> None:
        """Free all slots, between steps."""
        for group in self.groups:
            for key in list(group.level.cache.keys_resident()):
                group.level.forget(key)

    def close(self) -> None:
        self._context.close()
        if self._memory is not None:
            self._memory.close()


def slot_bytes(device: Device, kind: Kind) -> int:
    """Bytes of one slot."""
    with Context(device.library, MATRICES) as c:
        return sum(c.tensor(type, n_in, n_out).n_bytes for type, n_in, n_out in kind)


def bank_slots(device: Device, kind: Kind) -> int:
    """Slots that a bank may have, as one tensor holds a matrix of each."""
    with Context(device.library, MATRICES) as c:
        largest = max(c.tensor(type, n_in, n_out).n_bytes for type, n_in, n_out in kind)
    return max(1, device.max_tensor_bytes // largest)


def fitted(
    room: int, sizes: Mapping[Kind, int], layers: Mapping[Kind, Sequence[int]], n_expert: int
) -> dict[Kind, int]:
    """Slots of each kind that `room` bytes hold: in proportion to its layers, and at most all of their experts."""
    total = sum(sizes[kind] * len(of) for kind, of in layers.items())
    found: dict[Kind, int] = {}
    for kind, of in layers.items():
        share = room * sizes[kind] * len(of) // total if total else 0
        found[kind] = max(0, min(share // sizes[kind], len(of) * n_expert))
    return found
