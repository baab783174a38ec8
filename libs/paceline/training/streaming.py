"""Moves sharded tensors between ranks in pieces, so a rank holds at most one piece beside its own
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.training.process import from_all_ranks
from paceline.training.shards import rows_of

PIECE_BYTES = 64 << 20
"""Most bytes per transfer, except for a single longer row."""


@torch.no_grad()
def convert(rows: Tensor, into: Tensor) -> None:
    """Copies rows from any device into CPU memory, which may have another dtype."""
    step = _rows_of_piece(rows, into.dtype)
    for start in range(0, len(rows), step):
        piece = slice(start, start + step)
        into[piece].copy_(rows[piece].to(into.dtype))


def bytes_in_order(own: memoryview) -> Iterator[memoryview]:
    """On rank 0 the bytes of all ranks, by rank, each piece valid until the next one; empty on the
    other ranks, which must iterate too. Collective.
    """
    rank = dist.get_rank()
    for owner, nbytes in enumerate(from_all_ranks(len(own))):
        for start in range(0, nbytes, PIECE_BYTES):
            if owner == rank == 0:
                yield own[start : start + PIECE_BYTES]
            elif rank == owner:
                dist.send(torch.frombuffer(own[start : start + PIECE_BYTES], dtype=torch.uint8), 0)
            elif rank == 0:
                piece = torch.empty(min(PIECE_BYTES, nbytes - start), dtype=torch.uint8)
                dist.recv(piece, owner)
                yield piece.numpy().data


@torch.no_grad()
def scatter_rows(
    whole: Tensor | None,
    dtype: torch.dtype,
    tensor: Tensor,
    take: Callable[[Tensor, Tensor], None],
) -> None:
    """Calls `take` with this rank's rows of a sharded tensor, live, and the same rows of rank 0's
    `whole`. `whole` is on the CPU with `dtype`, and None on the other ranks. Collective over the
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
    """(owning rank, rows in the whole tensor, rows in that rank's shard) of each piece."""
    (placement,) = tensor.placements
    assert placement.is_shard(0), f"only rows are sharded here, not {placement}"
    ranks, rows = tensor.device_mesh.size(), tensor.shape[0]
    step = _rows_of_piece(tensor, dtype)
    for owner in range(ranks):
        held = rows_of(rows, ranks, owner)
        for start in range(held.start, held.stop, step):
            stop = min(start + step, held.stop)
            yield owner, slice(start, stop), slice(start - held.start, stop - held.start)


def _rows_of_piece(tensor: Tensor, dtype: torch.dtype) -> int:
    return max(1, PIECE_BYTES * len(tensor) // max(1, tensor.numel() * dtype.itemsize))
