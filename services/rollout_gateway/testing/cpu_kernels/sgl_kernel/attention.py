"""Attention of new tokens over a KV cache addressed by slots. Owns the arithmetic; the cache
belongs to SGLang.

Letters: B requests, T new tokens of all requests together, Q new tokens of one request, L keys of
one request (padded to the longest of a piece), H query heads, N key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import InvalidInput

# Requests are computed together while their padded scores stay under this many per head.
_SCORES_AT_ONCE = 1 << 20


def decode_attention_cpu(
    query: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache_slots: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scaling: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One new token per row: stores its key and value, then writes output [B, H, D]; seq_lens [B]
    count it.

    query [B, H, D]; key and value [B, N, D], or None when stored already; buffers [slots, N, D];
    cache_slots [B]; req_to_token [table rows, positions]; attn_logits is scratch of the compiled
    kernel and stays untouched.
    """
    _check_covered(
        key_buffer, key_scale, value_scale, logit_cap, is_cross_attention, sliding_window, sinks
    )
    if key is not None and value is not None:
        key_buffer[cache_slots] = key.to(key_buffer.dtype)
        value_buffer[cache_slots] = value.to(value_buffer.dtype)
    ones = torch.ones_like(seq_lens)
    for piece in _pieces(ones, seq_lens):
        lens = seq_lens[piece]
        slots = _slots(req_to_token, req_pool_indices[piece], lens)
        visible = torch.arange(slots.shape[1]) < lens.unsqueeze(1)
        output[piece] = _attend(
            query[piece].unsqueeze(1),
            key_buffer[slots],
            value_buffer[slots],
            visible.unsqueeze(1),
            scaling,
        ).squeeze(1)


def extend_attention_cpu(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    output: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_extend_len: int,
    scaling: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Several new tokens per request (prefill, verification, the drafter's catching up); writes
    output [T, H, D].

    query [T, H, D]; key and value [T, N, D], or None when they are to be read from the buffers;
    seq_lens [B] count the new tokens; request b's tokens are rows extend_start_loc[b] onwards.
    tree_mask says which keys a query sees, flat, request after request: query x query (all earlier
    tokens visible) or query x all keys.
    """
    _check_covered(
        key_buffer, key_scale, value_scale, logit_cap, is_cross_attention, sliding_window, sinks
    )
    new_lens, starts = extend_seq_lens.long(), extend_start_loc.long()
    masks = None if tree_mask is None else _split_mask(tree_mask, new_lens, seq_lens)
    for piece in _pieces(new_lens, seq_lens):
        lens, news = seq_lens[piece], new_lens[piece]
        owner, offset = _flat_positions(news)
        rows, position = starts[piece][owner] + offset, (lens - news)[owner] + offset
        slots = _slots(req_to_token, req_pool_indices[piece], lens)
        keys, values = key_buffer[slots], value_buffer[slots]
        if key is not None and value is not None:
            keys[owner, position] = key[rows].to(keys.dtype)
            values[owner, position] = value[rows].to(values.dtype)
        visible = _visible(slots.shape[1], lens, news, is_causal)
        if masks is not None:
            for place, request in enumerate(piece.tolist()):
                mask = masks[request]
                end = int(lens[place])
                visible[place, : mask.shape[0], end - mask.shape[1] : end] = mask
        queries = query.new_zeros((len(piece), visible.shape[1], *query.shape[1:]))
        queries[owner, offset] = query[rows]
        output[rows] = _attend(queries, keys, values, visible, scaling)[owner, offset]


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float
) -> Tensor:
    """softmax(q k^T * scaling) v over visible keys [B, Q, H, D]; keys and values [B, L, N, D],
    visible [B, Q, L].

    The H / N query heads that share a key-value head become further rows of one attention, which
    spares a copy of keys.
    """
    batch, length, heads, size = queries.shape
    shared = heads // keys.shape[2]
    rows = queries.view(batch, length, -1, shared, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
    keys, values = keys.to(queries.dtype).transpose(1, 2), values.to(queries.dtype).transpose(1, 2)
    mask = visible.unsqueeze(1).repeat(1, 1, shared, 1)
    mixed = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    return mixed.unflatten(2, (shared, length)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _slots(req_to_token: Tensor, table_rows: Tensor, lens: Tensor) -> Tensor:
    """Slots [B, L] of every position; padding repeats the last one, so that no other request's
    values are ever read.
    """
    columns = torch.minimum(torch.arange(int(lens.max())), (lens - 1).unsqueeze(1))
    return req_to_token[table_rows.unsqueeze(1), columns].long()


def _visible(width: int, lens: Tensor, news: Tensor, is_causal: bool) -> Tensor:
    """[B, Q, L]: keys up to the query's own position, or all of the request's; padded queries see
    some.
    """
    position = (lens - news).unsqueeze(1) + torch.arange(int(news.max()))
    last = (
        torch.minimum(position, (lens - 1).unsqueeze(1))
        if is_causal
        else (lens - 1).unsqueeze(1).expand_as(position)
    )
    return torch.arange(width) <= last.unsqueeze(2)


def _flat_positions(lens: Tensor) -> tuple[Tensor, Tensor]:
    """Of T elements that belong to B owners in order: owner [T] and place within the owner [T]."""
    owner = torch.repeat_interleave(torch.arange(len(lens)), lens)
    return owner, torch.arange(len(owner)) - (lens.cumsum(0) - lens)[owner]


def _split_mask(mask: Tensor, new_lens: Tensor, seq_lens: Tensor) -> list[Tensor]:
    """One [Q, Q] or [Q, L] mask per request; the size tells which form it is."""
    news, totals = new_lens.tolist(), seq_lens.tolist()
    square, full = (
        [(q, q) for q in news],
        [(q, total) for q, total in zip(news, totals, strict=True)],
    )
    for shapes in (square, full):
        sizes = [rows * columns for rows, columns in shapes]
        if sum(sizes) == mask.numel():
            parts = mask.bool().split(sizes)
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    allowed = [sum(rows * columns for rows, columns in shapes) for shapes in (square, full)]
    raise InvalidInput("the tree mask fits neither form", seen=mask.numel(), allowed=allowed)


def _pieces(new_lens: Tensor, seq_lens: Tensor) -> Iterator[Tensor]:
    """Indices of requests to compute together: requests with no new token are left out, padding
    stays bounded.
    """
    order = torch.argsort(seq_lens, descending=True)
    order = order[new_lens[order] > 0]
    news, totals = new_lens[order].tolist(), seq_lens[order].tolist()
    first, longest = 0, 0
    for end, new in enumerate(news):
        longest = max(longest, new)
        if end > first and (end - first + 1) * longest * totals[first] > _SCORES_AT_ONCE:
            yield order[first:end]
            first, longest = end, new
    if first < len(order):
        yield order[first:]


def _check_covered(
    key_buffer: Tensor,
    key_scale: float,
    value_scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    sinks: Tensor | None,
) -> None:
    asked = {
        "KV cache dtype": (
            key_buffer.dtype,
            key_buffer.dtype in (torch.float32, torch.bfloat16, torch.float16),
        ),
        "KV scales": ((key_scale, value_scale), key_scale == 1.0 and value_scale == 1.0),
        "logit cap": (logit_cap, not logit_cap),
        "cross attention": (is_cross_attention, not is_cross_attention),
        "sliding window": (sliding_window, sliding_window <= 0),
        "attention sinks": (sinks is not None, sinks is None),
    }
    for what, (seen, covered) in asked.items():
        if not covered:
            message = f"the CPU stand-in for sgl_kernel does not cover this {what}"
            raise InvalidInput(
                message, seen=seen, allowed="plain attention over an fp32, bf16 or fp16 cache"
            )
