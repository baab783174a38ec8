"""The engine's forward of a decoder-only model over a static KV cache. Owns the arithmetic, not loading or scheduling.

One function serves prefill and verification: a block of Q tokens for each of B cache slots, every row at its own
positions. Query, key and value projections are one matrix, gate and up another; query and key heads are stored with
interleaved halves (models/rope.py), which changes no product of a query with a key.

A cache row holds what one token leaves behind: its keys of all KV heads, then its values, as the fused projection
emits them, so one copy per layer stores both: [layers, slots, capacity, 2 * kv_heads * head_dim].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; D = head_dim, F = intermediate size, Nq and Nkv heads."""

    input_norm: Tensor | None
    """[H]; None: the layer reads its input as it is."""
    qkv: Tensor
    """[(Nq + 2 Nkv) D, H]; query and key heads interleaved"""
    qkv_bias: Tensor | None
    """[(Nq + 2 Nkv) D]"""
    qk_norm: Tensor | None
    """[Nq + Nkv, D]; interleaved"""
    output: Tensor
    """[H, Nq D]"""
    output_bias: Tensor | None
    """[H]"""
    post_norm: Tensor
    """[H]"""
    gate_up: Tensor
    """[2 F, H]"""
    down: Tensor
    """[H, F]"""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model as served."""

    config: ModelConfig
    embed: Tensor
    """[V, H]"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    """[H]"""
    head: Tensor
    """[V, H]; the same tensor as embed when tied"""
    rotation: Tensor
    """complex64 [positions, D / 2]"""
    head_hash: str = ""
    """Hash of the head's bytes as they were loaded."""


@dataclass(frozen=True, slots=True)
class Block:
    """Where a block of B rows with Q tokens each stands; N = B Q."""

    rows: slice | Tensor
    """Cache slots of the rows: a slice, or int64 [B]."""
    batch: int
    tokens: int
    """Q"""
    index: Tensor
    """int64 [N]: flat cache row (slot * capacity + position) that each token writes."""
    rotation: Tensor
    """complex64 [N, 1, D / 2]"""
    mask: Tensor | None
    """float [B, 1, Q * group, length]: 0 where a query may look, else -inf. None: everything is visible."""
    length: int
    """Cached positions that attention reads."""


def cache_rows(slots: Sequence[int]) -> slice | Tensor:
    """Slots as a slice when they follow each other, so that the cache is read without a copy; else int64 [B]."""
    first = slots[0]
    if all(slot == first + offset for offset, slot in enumerate(slots)):
        return slice(first, first + len(slots))
    return torch.tensor(slots)


def make_block(
    config: ModelConfig,
    rotation: Tensor,
    cache: Tensor,
    rows: slice | Tensor,
    positions: Tensor,
    length: int,
    *,
    masked: bool = False,
) -> Block:
    """Plan of one forward.

    cache [..., slots, capacity, width]; positions int64 [B, Q]; length = largest position + 1, given by the caller so
    that nothing waits for the device; masked forces a mask where none is needed.
    """
    batch, tokens = positions.shape
    capacity = cache.shape[-2]
    slots = torch.arange(rows.start, rows.stop, device=positions.device) if isinstance(rows, slice) else rows
    mask = None
    if masked or batch > 1 or tokens > 1:
        visible = torch.arange(length, device=positions.device) <= positions[:, :, None]
        bias = torch.zeros(visible.shape, dtype=cache.dtype, device=positions.device)
        bias.masked_fill_(~visible, float("-inf"))
        bias = bias.repeat_interleave(config.group, dim=1) if config.group > 1 else bias
        mask = bias[:, None]
    flat = positions.reshape(-1)
    return Block(
        rows=rows,
        batch=batch,
        tokens=tokens,
        index=(slots[:, None] * capacity + positions).reshape(-1),
        rotation=rotation.index_select(0, flat)[:, None],
        mask=mask,
        length=length,
    )


def layer_forward(config: ModelConfig, layer: LayerWeights, x: Tensor, cache: Tensor, block: Block) -> Tensor:
    """One layer. x [N, H]; cache [slots, capacity, width] of this layer, written at the block. Returns [N, H]."""
    normed = x if layer.input_norm is None else _rms_norm(x, layer.input_norm, config.rms_norm_eps)
    qkv = functional.linear(normed, layer.qkv, layer.qkv_bias)
    attended = _attend(config, _rotated(config, layer, qkv, block.rotation), qkv, cache, block)
    x = torch.addmm(x, attended, layer.output.t())
    if layer.output_bias is not None:
        x = x + layer.output_bias
    normed = _rms_norm(x, layer.post_norm, config.rms_norm_eps)
    gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
    return torch.addmm(x, functional.silu(gate).mul_(up), layer.down.t())


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape[-1:], weight, eps)


def _rotated(config: ModelConfig, layer: LayerWeights, qkv: Tensor, rotation: Tensor) -> Tensor:
    """Queries [N, Nq, D] after norm and rotation; keys are rotated in place inside qkv where the dtype allows it."""
    heads = config.num_heads + config.num_kv_heads
    width = heads * config.head_dim
    qk = qkv[:, :width].unflatten(1, (heads, config.head_dim))
    if layer.qk_norm is None and qk.dtype == torch.float32:
        torch.view_as_complex(qk.unflatten(2, (-1, 2))).mul_(rotation)
        return qk[:, : config.num_heads]
    turned = qk
    if layer.qk_norm is not None:
        turned = functional.rms_norm(qk, (config.head_dim,), None, config.rms_norm_eps) * layer.qk_norm
    pairs = torch.view_as_complex(turned.float().unflatten(2, (-1, 2)).contiguous())
    qk.copy_(torch.view_as_real(pairs * rotation).flatten(2))
    return qk[:, : config.num_heads]


def _attend(config: ModelConfig, queries: Tensor, qkv: Tensor, cache: Tensor, block: Block) -> Tensor:
    """Stores the block's keys and values, then attends over the cache. Returns [N, Nq D]."""
    batch, tokens, kv, group, dim = block.batch, block.tokens, config.num_kv_heads, config.group, config.head_dim
    cache.view(-1, cache.shape[-1]).index_copy_(0, block.index, qkv[:, config.num_heads * dim :])
    seen = cache[block.rows, : block.length].unflatten(2, (2, kv, dim))
    keys, values = seen[:, :, 0].transpose(1, 2), seen[:, :, 1].transpose(1, 2)
    # The query heads of one KV head stand as extra queries: no copy of keys or values per query head.
    grouped = queries.unflatten(0, (batch, tokens)).unflatten(2, (kv, group))
    grouped = grouped.permute(0, 2, 1, 3, 4).reshape(batch, kv, tokens * group, dim)
    out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=block.mask)
    out = out.view(batch, kv, tokens, group, dim).permute(0, 2, 1, 3, 4)
    return out.reshape(batch * tokens, config.num_heads * dim)


def forward_hidden(weights: DecoderWeights, cache: Tensor, token_ids: Tensor, block: Block) -> Tensor:
    """Last hidden states after the final norm, the input of the head.

    token_ids int64 [B, Q] at the block's positions; cache [layers, slots, capacity, width], written in place.
    Returns [B, Q, H].
    """
    config = weights.config
    x = functional.embedding(token_ids.reshape(-1), weights.embed)
    for index, layer in enumerate(weights.layers):
        x = layer_forward(config, layer, x, cache[index], block)
    x = _rms_norm(x, weights.norm, config.rms_norm_eps)
    return x.view(block.batch, block.tokens, config.hidden_size)


def head_logits(weights: DecoderWeights, hidden: Tensor) -> Tensor:
    """Logits [..., V] of hidden states [..., H]."""
    return functional.linear(hidden, weights.head)
