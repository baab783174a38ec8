"""Joins the ranks of a trainer, and exchanges values between them as JSON and safetensors. A pickle
would let a stranger on the socket run code.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from paceline.training import STORE_VARIABLE

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

COLLECTIVE_S = 1800.0
"""Deadline of collectives between ranks that other deadlines watch. The end of a process breaks its
connections at once, a stopped process is killed, and a parent kills ranks that do not leave
their slots: this deadline ends only ranks that wait for each other in a circle.
"""
T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")


def join_ranks(device: str, deadline_s: float, *, threads: int, seed: int) -> None:
    """Enters the process group of the environment (RANK, WORLD_SIZE and the file of
    STORE_VARIABLE): gloo, plus nccl for tensors on CUDA.

    `deadline_s` bounds every collective, including waits of ranks for each other. `threads`:
    compute threads. `seed`: of torch's default generator.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    deadline, size = timedelta(seconds=deadline_s), int(os.environ["WORLD_SIZE"])
    # A file, because torch's TCP store listens on every interface without a token.
    store = dist.FileStore(os.environ[STORE_VARIABLE], size)  # type: ignore[attr-defined]  # public
    store.set_timeout(deadline)
    dist.init_process_group(
        backend, store=store, rank=int(os.environ["RANK"]), world_size=size, timeout=deadline
    )


def from_rank_zero(value: T) -> T:
    """Rank 0's value (JSON types) on every rank; values of the other ranks are ignored."""
    found: T = json.loads(_bytes_of_rank_zero(json.dumps(value).encode()))
    return found


def from_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value (JSON types), by rank; `group` consists of the first ranks."""
    own = json.dumps(value).encode()
    ranks = range(dist.get_world_size(group))
    sizes = [torch.empty(1, dtype=torch.int64) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    most = max(map(int, sizes))
    gathered = [torch.empty(most, dtype=torch.uint8) for _ in ranks]
    padded = np.frombuffer(own.ljust(most), dtype=np.uint8).copy()
    dist.all_gather(gathered, torch.from_numpy(padded), group=group)
    return [json.loads(one.numpy().tobytes()) for one in gathered]  # JSON ignores trailing spaces


def tensors_from_rank_zero(kind: type[D], value: D | None) -> D | None:
    """Rank 0's dataclass of tensors, or None, on every rank, on the CPU."""
    own = b""
    if value is not None:
        own = save({field.name: getattr(value, field.name) for field in fields(kind)})
    data = _bytes_of_rank_zero(own)
    return kind(**load(data)) if data else None


def _bytes_of_rank_zero(own: bytes) -> bytes:
    """Rank 0's bytes; bytes of the other ranks are ignored."""
    size = torch.tensor(len(own))
    dist.broadcast(size, 0)
    data = torch.empty(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        data = torch.from_numpy(np.frombuffer(own, dtype=np.uint8).copy())
    if len(data):
        dist.broadcast(data, 0)
    return data.numpy().tobytes()


def on_device(value: D, device: torch.device | str) -> D:
    """A dataclass with its tensors on the device."""
    held = ((field.name, getattr(value, field.name)) for field in fields(value))
    moved: dict[str, Any] = {name: one.to(device) for name, one in held if isinstance(one, Tensor)}
    return replace(value, **moved)
