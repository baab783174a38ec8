"""Moves rows of sharded tensors between their ranks and rank 0, a piece at a time, so that no rank
holds more than one piece above its own shards.

Whole tensors are there on rank 0 alone, in memory that the caller gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.training.shards import rows_of

PIECE_BYTES = 64 << 20
"""Most bytes that travel at once, but for a single row that is longer."""


@torch.no_grad()
def gather_rows(tensor: Tensor, dtype: torch.dtype, into: Tensor | None) -> None:
    """Writes a tensor that is sharded by rows into rank 0's `into`, which is whole, on the CPU and
    of `dtype`; None on the other ranks. A collective of the tensor's mesh.
    """
    assert isinstance(tensor, DTensor), "only what is sharded has rows elsewhere"
    group, local = tensor.device_mesh.get_group(), tensor.to_local()
    rank = dist.get_rank(group)
    for owner, there, here in _pieces(tensor, dtype):
        if rank == owner:
            piece = local[here].to(dtype).contiguous()
        elif rank == 0:
            shape = (there.stop - there.start, *tensor.shape[1:])
            piece = torch.empty(shape, dtype=dtype, device=local.device)
            dist.recv(piece, group=group, group_src=owner)
        else:
            continue
        if into is not None:
            into[there].copy_(piece)
        else:
            dist.send(piece, group=group, group_dst=0)


@torch.no_grad()
def scatter_rows(
    whole: Tensor | None,
    dtype: torch.dtype,
    tensor: Tensor,
    take: Callable[[Tensor, Tensor], None],
) -> None:
    """Gives `take` this rank's rows of a sharded tensor, live, and beside them those of rank 0's
    `whole`, which is on the CPU and of `dtype`; None on the other ranks. A collective of the
    tensor's mesh.
    """
    assert isinstance(tensor, DTensor), "only what is sharded has rows elsewhere"
    group, local = tensor.device_mesh.get_group(), tensor.to_local()
    rank = dist.get_rank(group)
    for owner, there, here in _pieces(tensor, dtype):
        if whole is not None:
            piece = whole[there].to(local.device).contiguous()
            if owner != rank:
                dist.send(piece, group=group, group_dst=owner)
        elif rank == owner:
            piece = torch.empty_like(local[here], dtype=dtype)
            dist.recv(piece, group=group, group_src=0)
        if rank == owner:
            take(local[here], piece)


def _pieces(tensor: DTensor, dtype: torch.dtype) -> Iterator[tuple[int, slice, slice]]:
    """(rank that holds it, rows in the whole tensor, rows in that rank's shard) of each piece."""
    (placement,) = tensor.placements
    assert placement.is_shard(0), f"only rows are sharded here, not {placement}"
    ranks, rows = tensor.device_mesh.size(), tensor.shape[0]
    step = max(1, PIECE_BYTES * rows // max(1, tensor.numel() * dtype.itemsize))
    for owner in range(ranks):
        held = rows_of(rows, ranks, owner)
        for start in range(held.start, held.stop, step):
            stop = min(start + step, held.stop)
            yield owner, slice(start, stop), slice(start - held.start, stop - held.start)
