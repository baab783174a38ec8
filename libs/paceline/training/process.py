"""Joins the ranks of a trainer, and carries what they share from one to the others."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.training import STORE_VARIABLE

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")


def join_ranks(device: str, deadline_s: float, *, threads: int, seed: int) -> None:
    """Enters the process group that the environment describes (RANK, WORLD_SIZE and the file of
    STORE_VARIABLE): gloo, and nccl beside it for what lies on CUDA.

    `deadline_s` bounds every collective, waits of ranks for each other included. `threads` compute;
    `seed` is that of torch's default generator.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    deadline, size = timedelta(seconds=deadline_s), int(os.environ["WORLD_SIZE"])
    # A file, because torch's TCP store listens on every interface and asks nobody for a token.
    store = dist.FileStore(os.environ[STORE_VARIABLE], size)  # type: ignore[attr-defined]  # public
    store.set_timeout(deadline)
    dist.init_process_group(
        backend, store=store, rank=int(os.environ["RANK"]), world_size=size, timeout=deadline
    )


def from_rank_zero(value: T) -> T:
    """Rank 0's value on every rank, tensors on the CPU; what the others give is ignored."""
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def on_device(value: D, device: torch.device | str) -> D:
    """A dataclass with its tensors on the device."""
    held = ((field.name, getattr(value, field.name)) for field in fields(value))
    moved: dict[str, Any] = {name: one.to(device) for name, one in held if isinstance(one, Tensor)}
    return replace(value, **moved)
