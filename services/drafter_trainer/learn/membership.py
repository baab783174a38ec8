"""Forms the process groups of the ranks that train under a lease, and sends each rank its row."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import ConfigError
from paceline.speculators.packed import PackedRow


@dataclass(frozen=True, slots=True)
class Members:
    """Ranks 0 .. n - 1 of the trainer, which train together.

    Groups and mesh are None on all other ranks.
    """

    devices: tuple[str, ...]
    """[n] device of each rank, "cpu" or "cuda:<slot>"."""
    group: dist.ProcessGroup | None
    """Group for their collectives."""
    writing: dist.ProcessGroup | None
    """A second group of the same ranks, for the thread that writes checkpoints during training."""
    mesh: DeviceMesh | None
    """The same ranks as FSDP2's mesh."""
    cpu_mesh: DeviceMesh | None
    """The same mesh for shards on the CPU."""

    @property
    def size(self) -> int:
        """Number of members, n."""
        return len(self.devices)

    @property
    def takes_part(self) -> bool:
        """Whether this rank is a member."""
        return dist.get_rank() < self.size

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return torch.device(self.devices[dist.get_rank()] if self.takes_part else "cpu")

    def meet(self) -> None:
        """Returns when all members have called it."""
        if self.takes_part:
            dist.all_reduce(torch.zeros(()), group=self.group)

    def agree(self, *numbers: int) -> list[int]:
        """Rank 0's numbers on all members; from the other members only the count of numbers
        matters.
        """
        values = torch.tensor(numbers)
        dist.broadcast(values, 0, group=self.group)
        return [int(value) for value in values.tolist()]


def on_cpu(size: int) -> Members:
    """The first `size` ranks, computing on their cores. Collective over all ranks."""
    return _members(("cpu",) * size)


class Membership:
    """Follows the leases: each set of slots has its process group, which is kept for the next such
    lease.

    Every rank calls `join` for every lease in the same order, since groups are formed together.
    Groups are kept because torch caches sharding by rank numbers, including the first group of
    these ranks. That group must still exist when the same ranks meet again.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.members = on_cpu(dist.get_world_size())
        self._known = {self.members.devices: self.members}

    def join(self, slots: Sequence[int]) -> Members:
        """The ranks that train on these slots, rank i on the i-th slot; surplus ranks stay out.

        Raises ConfigError for a slot that is no CUDA device here.
        """
        devices = self._places(slots[: dist.get_world_size()])
        if devices not in self._known:
            self._known[devices] = _members(devices)
        self.members = self._known[devices]
        return self.members

    def is_current(self, slots: Sequence[int]) -> bool:
        """Whether `join` would change nothing."""
        return self._places(slots[: dist.get_world_size()]) == self.members.devices

    def _places(self, slots: Sequence[int]) -> tuple[str, ...]:
        if self._device == "cpu":
            return ("cpu",) * len(slots)
        last, count = max(slots), torch.cuda.device_count()
        if last >= count:
            raise ConfigError("a leased slot is no GPU", seen=last, allowed=f"below {count}")
        return tuple(f"cuda:{slot}" for slot in slots)


def _members(devices: tuple[str, ...]) -> Members:
    ranks = list(range(len(devices)))
    whole = len(ranks) == dist.get_world_size()
    group = dist.group.WORLD if whole and devices[0] == "cpu" else dist.new_group(ranks)
    writing = dist.new_group(ranks, backend="gloo")
    if dist.get_rank() not in ranks:
        return Members(devices, None, None, None, None)
    assert group is not None
    kind = torch.device(devices[0]).type
    cpu_mesh = DeviceMesh.from_group(group, "cpu")
    if kind == "cpu":
        return Members(devices, group, writing, cpu_mesh, cpu_mesh)
    torch.cuda.set_device(devices[dist.get_rank()])
    return Members(devices, group, writing, DeviceMesh.from_group(group, kind), cpu_mesh)


_WORDS = ("stop", "wait", "snapshot", "again", "save", "join", "row")


def announce(word: str, members: Members) -> None:
    """Rank 0 announces the next action to the members.

    "stop": the activation is over; "wait": another word follows later; "snapshot": a snapshot;
    "again": training continues from other weights; "save": a checkpoint; "join": other members, by
    the next command.
    """
    members.agree(_WORDS.index(word))


def hand_out(rows: Sequence[PackedRow], members: Members) -> PackedRow:
    """Rank 0 sends row r to rank r and returns its own. There is one row per member, all with one
    head.
    """
    announce("row", members)
    for rank, row in enumerate(rows[1:], start=1):
        held = {field.name: getattr(row, field.name) for field in fields(row)}
        held = {k: v for k, v in held.items() if v is not None}
        texts = {k: torch.tensor([*v.encode()]) for k, v in held.items() if isinstance(v, str)}
        data = save(held | texts)
        dist.send(torch.tensor(len(data)), rank)
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)
    return rows[0]


def receive(members: Members) -> PackedRow | str:
    """On other members: the next row, or one of the announced words."""
    (index,) = members.agree(0)
    if _WORDS[index] != "row":
        return _WORDS[index]
    size = torch.tensor(0)
    dist.recv(size, 0)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, 0)
    found: dict[str, Any] = load(data.numpy().tobytes())
    texts = {name: bytes(found[name].tolist()).decode() for name in ("lm_head_hash", "layers")}
    return PackedRow(**found | texts)
