"""Attention of new tokens over a KV cache addressed by slots. Owns the arithmetic; the cache
belongs to SGLang.

Letters: B requests, T new tokens of all requests together, Q new tokens of one request, L keys of
one request, H query heads, N key-value heads, D head size. Requests are computed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import InvalidInput


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
    for row, length in enumerate(seq_lens.tolist()):
        slots = req_to_token[req_pool_indices[row], :length].long()
        everything = torch.ones(1, length, dtype=torch.bool)
        keys, values = key_buffer[slots], value_buffer[slots]
        output[row] = _attend(query[row : row + 1], keys, values, everything, scaling)[0]


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
    tree_mask marks the keys that a query sees, flat, request after request: query x query (all
    earlier tokens visible) or query x all keys.
    """
    _check_covered(
        key_buffer, key_scale, value_scale, logit_cap, is_cross_attention, sliding_window, sinks
    )
    news, totals = extend_seq_lens.tolist(), seq_lens.tolist()
    masks = None if tree_mask is None else _split_mask(tree_mask, news, totals)
    for request, (new, total) in enumerate(zip(news, totals, strict=True)):
        if not new:
            continue
        start = int(extend_start_loc[request])
        rows = slice(start, start + new)
        slots = req_to_token[req_pool_indices[request], :total].long()
        keys, values = key_buffer[slots], value_buffer[slots]
        if key is not None and value is not None:
            keys[total - new :], values[total - new :] = key[rows], value[rows]
        visible = torch.ones(new, total, dtype=torch.bool)
        if is_causal:
            visible = visible.tril(total - new)
        if masks is not None:
            visible[:, total - masks[request].shape[1] :] = masks[request]
        output[rows] = _attend(query[rows], keys, values, visible, scaling)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float
) -> Tensor:
    """softmax(q k^T * scaling) v over visible keys [Q, H, D]; keys and values [L, N, D], visible
    [Q, L]. H / N query heads share a key-value head.
    """
    query, key, value = (
        part.to(queries.dtype).transpose(0, 1)[None] for part in (queries, keys, values)
    )
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scaling, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


def _split_mask(mask: Tensor, news: Sequence[int], totals: Sequence[int]) -> list[Tensor]:
    """One [Q, Q] or [Q, L] mask per request; the mask's size determines its form."""
    sizes = []
    for widths in (news, totals):
        parts = [new * width for new, width in zip(news, widths, strict=True)]
        if sum(parts) == mask.numel():
            split = mask.bool().split(parts)
            return [part.view(new, -1) for part, new in zip(split, news, strict=True)]
        sizes.append(sum(parts))
    raise InvalidInput("the tree mask fits neither form", seen=mask.numel(), allowed=sizes)


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
