"""Joins the ranks of one trainer: process group, FSDP2 shards, broadcasts and gathers."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from policy_trainer.batches.batch import MicroBatch, TrainBatch
from policy_trainer.learn.model import PolicyModel


def join_ranks(device: str, deadline_s: float) -> DeviceMesh:
    """Enters the process group that the environment describes (torchrun's contract): gloo on CPU,
    nccl on CUDA, where gloo carries what lies on the CPU.

    `deadline_s` bounds every collective, the wait for a batch included.
    """
    kind = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=deadline_s),
    )
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("data",))


def shard(model: PolicyModel, mesh: DeviceMesh, *, reshard_after_forward: bool) -> PolicyModel:
    """Shards each decoder layer and then the rest over the mesh, in place (FSDP2, arXiv
    2304.11277).
    """
    model.to(mesh.device_type)
    for layer in model.layers():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return model


def broadcast_batch(batch: TrainBatch | None, mesh: DeviceMesh) -> TrainBatch | None:
    """Rank 0's batch on every rank, on the CPU; None (rank 0 has none to give) is broadcast as
    well.
    """
    device = torch.device(mesh.device_type)
    sizes = torch.tensor(
        [-1, -1] if batch is None else [len(batch.lengths), len(batch.token_ids)], device=device
    )
    dist.broadcast(sizes, src=0)
    sequences, tokens = (int(n) for n in sizes.tolist())
    if sequences < 0:
        return None
    if batch is None:
        batch = _empty_batch(sequences, tokens)
    fields = {}
    for field in dataclasses.fields(TrainBatch):
        tensor = getattr(batch, field.name).to(device)
        dist.broadcast(tensor, src=0)
        fields[field.name] = tensor.cpu()
    return TrainBatch(**fields)


def broadcast_numbers(numbers: Sequence[int], mesh: DeviceMesh) -> list[int]:
    """Rank 0's numbers on every rank; what the others give is ignored."""
    count = torch.tensor([len(numbers)], device=mesh.device_type)
    dist.broadcast(count, src=0)
    values = torch.zeros(int(count.item()), dtype=torch.int64, device=mesh.device_type)
    if dist.get_rank() == 0:
        values = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
    if len(values):
        dist.broadcast(values, src=0)
    return [int(value) for value in values.tolist()]


def _empty_batch(sequences: int, tokens: int) -> TrainBatch:
    return TrainBatch(
        lengths=torch.zeros(sequences, dtype=torch.int64),
        advantages=torch.zeros(sequences),
        temperatures=torch.zeros(sequences),
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        loss_mask=torch.zeros(tokens, dtype=torch.bool),
        behavior_logprobs=torch.zeros(tokens),
    )


def to_device(micro: MicroBatch, mesh: DeviceMesh) -> MicroBatch:
    """The micro-batch on the rank's device."""
    if mesh.device_type == "cpu":
        return micro
    return MicroBatch(
        **{
            f.name: getattr(micro, f.name).to(mesh.device_type)
            for f in dataclasses.fields(MicroBatch)
        }
    )


def gather_full(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors on the CPU of rank 0; the other ranks join the gathers and get an empty
    dict.
    """
    full: dict[str, Tensor] = {}
    for name, tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            full[name] = whole.detach().to("cpu", copy=True).contiguous()
    return full
