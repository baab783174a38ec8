"""Bookkeeping around the KV cache: the slot table `req_to_token`, accepted tokens, moves of KV
rows.

`req_to_token` [table rows, positions] gives the slot of each position of each request. Ranges of
positions run from `start` up to, not including, `end`, one per request; flat lists hold them
request after request.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    slots: Tensor,
    pool_len: int,
) -> None:
    """Writes newly allocated slots (flat) into the table at positions start .. end of each
    request.
    """
    rows, columns = _ranges(req_pool_indices, start, end)
    req_to_token[rows, columns] = slots[: len(rows)].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    slots: Tensor,
    pool_len: int,
) -> None:
    """Reads the table at positions start .. end of each request into slots (flat; a longer tail
    stays as it is).
    """
    rows, columns = _ranges(req_pool_indices, start, end)
    slots[: len(rows)] = req_to_token[rows, columns].to(slots.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Reads the topk * num_steps slots that follow each request's tokens into slots [B * topk *
    num_steps].
    """
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps, slots, pool_len
    )


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """bonus_tokens [B]: the last of each request's accept_lens tokens in accept_tokens [B,
    accept_stride] or flat.
    """
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, slots: Tensor, accepted_slots: Tensor
) -> None:
    """Slots of accepted nodes (accept_index, -1: none), moved together at the front of
    accepted_slots.
    """
    flat = accept_index.flatten()
    accepted = slots.flatten()[flat[flat >= 0].long()]
    accepted_slots[: len(accepted)] = accepted.to(accepted_slots.dtype)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, target_slots: Tensor, source_slots: Tensor
) -> None:
    """Moves rows of every buffer from source to target slots, as if all were read before any is
    written.

    data_ptrs: addresses of the buffers, each [slots, row]; strides: bytes per row. The addresses
    are trusted.
    """
    moved = target_slots != source_slots
    target, source = target_slots[moved].long(), source_slots[moved].long()
    if not len(target):
        return
    rows = int(torch.maximum(target.max(), source.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        buffer[target] = buffer[source]


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None,
) -> None:
    """Shifts each request's tokens left by one, in place, and puts its new token last (or at
    select_index).
    """
    new = topk_index.flatten()
    for request, (start, length) in enumerate(
        zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    ):
        if length == 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        last = start + length - 1 if select_index is None else int(select_index[request])
        input_ids[last] = new[request].to(input_ids.dtype)


def _ranges(req_pool_indices: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Table row and column of every position of every request's range, flat."""
    lens = (end - start).long()
    owner = torch.repeat_interleave(torch.arange(len(lens)), lens)
    columns = start.long()[owner] + torch.arange(len(owner)) - (lens.cumsum(0) - lens)[owner]
    return req_pool_indices.long()[owner], columns
