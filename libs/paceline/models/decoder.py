"""The engine's forward of a decoder-only model over a static KV cache: the arithmetic, without
loading or scheduling.

One function serves prefill and verification: a block of Q tokens for each of B cache slots, every
row at its own positions. Only some tokens of a block may be computed, and a row's tokens may form a
tree (`Layout`). Query, key and value projections are one matrix, gate and up another. Query and key
heads are stored with interleaved halves (models/loading.py), which changes no product of a query
with a key.
"""

from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models import products, quantised
from paceline.models.cache import StaticCache
from paceline.models.config import ModelConfig

Matrix: TypeAlias = Tensor | quantised.QuantisedMatrix
"""Weights [N, K] of a projection from K features to N."""
AnyMatrix: TypeAlias = Matrix | quantised.PackedMatrix


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; D = head_dim, F = intermediate size, Nq and Nkv heads."""

    input_norm: Tensor | None
    """[H]; None: the layer's input is not normalised."""
    qkv: AnyMatrix
    """[(Nq + 2 Nkv) D, H], or as wide as a drafter's projection; query and key heads are
    interleaved
    """
    qkv_bias: Tensor | None
    """[(Nq + 2 Nkv) D]"""
    qk_norm: Tensor | None
    """[Nq + Nkv, D]; interleaved"""
    output: AnyMatrix
    """[H, Nq D]"""
    output_bias: Tensor | None
    """[H]"""
    post_norm: Tensor
    """[H]"""
    gate_up: AnyMatrix
    """[2 F, H]"""
    down: AnyMatrix
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
class Layout:
    """Differences of a block from B runs of Q adjacent tokens."""

    stored: Tensor | None = None
    """int64 [B, Q]: cache position of each token; None: its own position."""
    visible: Tensor | None = None
    """bool [B, Q, length]: cache positions that each token sees; None: all up to its own."""
    kept: Tensor | None = None
    """int64 [N]: computed tokens of the flattened block, ascending; None: all."""


RECTANGLE = Layout()
"""B runs of Q tokens, all computed."""


@dataclass(frozen=True, slots=True)
class Block:
    """Places of a block of B rows with Q tokens each; N tokens are computed, B Q unless the layout
    has fewer.
    """

    rows: slice | Tensor
    """Cache slots of the rows: a slice, or int64 [B]."""
    batch: int
    tokens: int
    """Q"""
    index: Tensor
    """int64 [N]: slot * capacity + cache position of each token."""
    cells: Tensor
    """int64 [N * 2 * kv_heads]: cache cells that the block writes."""
    rotation: Tensor
    """complex64 [N, 1, D / 2]"""
    mask: Tensor | None
    """float [B, 1, Q * group, length]: 0 where a query may look, else -inf.

    None: everything is visible.
    """
    seen: int
    """Cached positions that every query sees; 0 for a layout of its own, and on a GPU."""
    length: int
    """Cached positions that attention reads."""
    keys: tuple[Tensor, ...]
    """Per layer [B, kv_heads, length, D] views of the cache; empty if rows is no slice."""
    values: tuple[Tensor, ...]
    kept: Tensor | None = None
    """int64 [N]: see Layout; None: N = B Q."""
    padding: Tensor | None = None
    """int64 [B Q]: for each token of the block its row among the N computed, 0 if it is not
    computed.
    """


def tree_visible(bases: Tensor, window: Tensor, length: int) -> Tensor:
    """Visibility for tokens after position `bases`: bool [B, Q, length].

    bases int64 [B]: all earlier positions are visible. window bool [B, Q, W]: visibility of the W
    cache positions from bases on.
    """
    batch, tokens, width = window.shape
    seen = torch.zeros(batch, tokens, length, dtype=torch.bool, device=window.device)
    columns = bases[:, None] + torch.arange(width, device=window.device)
    seen.scatter_(2, columns[:, None].expand(batch, tokens, width), window)
    return seen | (torch.arange(length, device=window.device) < bases[:, None])[:, None]


def make_block(
    config: ModelConfig,
    rotation: Tensor,
    cache: StaticCache,
    rows: slice | Tensor,
    positions: Tensor,
    length: int,
    layout: Layout = RECTANGLE,
    *,
    masked: bool = False,
) -> Block:
    """Plan of one forward.

    positions int64 [B, Q]: positions for the rotation. length: largest cache position + 1, from the
    caller, so that nothing waits for the device. masked: forces a mask even if none is needed.
    """
    batch, tokens = positions.shape
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()
    if isinstance(rows, slice):
        slots = torch.arange(rows.start, rows.stop, device=positions.device)
        keys, values = cache.views(rows, length)
    else:
        slots = rows

    mask, seen = None, 0
    if masked or batch > 1 or tokens > 1:
        visible = layout.visible
        if visible is None:
            seen = int(positions.min()) + 1 if positions.device.type == "cpu" else 0
            visible = torch.arange(length, device=positions.device) <= positions[:, :, None]
        bias = torch.zeros(visible.shape, dtype=cache.data.dtype, device=visible.device)
        bias.masked_fill_(~visible, float("-inf"))
        mask = bias.repeat_interleave(config.group, dim=1)[:, None]

    stored = positions if layout.stored is None else layout.stored
    index, cells = slots[:, None] * cache.capacity + stored, cache.cells(slots, stored)
    kept, padding = layout.kept, None
    if kept is not None:
        padding = torch.zeros(batch * tokens, dtype=torch.int64, device=positions.device)
        padding[kept] = torch.arange(len(kept), device=positions.device)
    return Block(
        rows=rows,
        batch=batch,
        tokens=tokens,
        index=_computed(index.view(-1), kept),
        cells=_computed(cells.view(batch * tokens, -1), kept).view(-1),
        rotation=rotation.index_select(0, _computed(positions.reshape(-1), kept))[:, None],
        mask=mask,
        seen=seen,
        length=length,
        keys=keys,
        values=values,
        kept=kept,
        padding=padding,
    )


def _computed(rows: Tensor, kept: Tensor | None) -> Tensor:
    return rows if kept is None else rows.index_select(0, kept)


def layer_forward(
    config: ModelConfig,
    layer: LayerWeights,
    x: Tensor,
    cache: StaticCache,
    index: int,
    block: Block,
) -> Tensor:
    """Layer number `index` of the cache. x [N, H]; the block's cells are written. Returns [N, H].

    Rows of x after the block's rows are also computed and have no meaning: see spare_rows.
    """
    eps = config.rms_norm_eps
    qkv = project_inputs(layer, x, eps)
    count = len(block.rotation)
    queries = store(config, layer, qkv[:count], cache, index, block.rotation, block.cells)
    attended = attend(config, queries, cache, index, block)
    if spare := len(qkv) - count:
        attended = functional.pad(attended, (0, 0, 0, spare))
    return finish_layer(layer, x, attended, eps)


def project_inputs(layer: LayerWeights, x: Tensor, eps: float) -> Tensor:
    """Queries, keys and values [N, (Nq + 2 Nkv) D] of a layer's x [N, H]."""
    inputs = x if layer.input_norm is None else _rms_norm(x, layer.input_norm, eps)
    return project(inputs, layer.qkv, layer.qkv_bias)


def store(
    config: ModelConfig,
    layer: LayerWeights,
    qkv: Tensor,
    cache: StaticCache,
    index: int,
    rotation: Tensor,
    cells: Tensor,
) -> Tensor:
    """Puts keys and values into the cache and returns the queries [N, Nq, D], a view.

    qkv [N, (Nq + 2 Nkv) D] is rotated in place; rotation, cells: see Block.
    """
    heads, dim = config.num_heads + config.num_kv_heads, config.head_dim
    qk = qkv[:, : heads * dim].view(-1, heads, dim)
    rotate_heads(qk, layer.qk_norm, rotation, config.rms_norm_eps)
    cache.write(index, cells, qkv[:, config.num_heads * dim :])
    return qk[:, : config.num_heads]


def finish_layer(layer: LayerWeights, x: Tensor, attended: Tensor, eps: float) -> Tensor:
    """The part of a layer after attention: its output projection and the MLP. x [N, H], attended
    [N, Nq D] -> [N, H].
    """
    x = add_projected(x, attended, layer.output)
    if layer.output_bias is not None:
        x = x + layer.output_bias
    normed = _rms_norm(x, layer.post_norm, eps)
    gate, up = project(normed, layer.gate_up).chunk(2, dim=-1)
    return add_projected(x, functional.silu(gate).mul_(up), layer.down)


def project(x: Tensor, weight: AnyMatrix, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias: [M, N] of x [M, K]."""
    if not isinstance(weight, Tensor):
        product = weight.product(x)
        return product if bias is None else product.add_(bias)
    return products.linear(x, weight, bias)


def add_projected(residual: Tensor, x: Tensor, weight: AnyMatrix) -> Tensor:
    """residual + x W^T: [M, N] of residual [M, N] and x [M, K]."""
    if not isinstance(weight, Tensor):
        return weight.product(x).add_(residual)
    return products.added(residual, x, weight)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape[-1:], weight, eps)


def rotate_heads(heads: Tensor, norm: Tensor | None, rotation: Tensor, eps: float) -> None:
    """Normalises heads [..., D], interleaved, by norm [..., D] if given, and rotates them by
    rotation [..., D / 2], in place.
    """
    dim = heads.shape[-1]
    if norm is None and heads.dtype == torch.float32:
        torch.view_as_complex(heads.unflatten(-1, (dim // 2, 2))).mul_(rotation)
        return
    turned = heads if norm is None else functional.rms_norm(heads, (dim,), None, eps) * norm
    pairs = torch.view_as_complex(turned.float().unflatten(-1, (-1, 2)).contiguous())
    heads.copy_(torch.view_as_real(pairs.mul_(rotation)).flatten(-2))


def attend(
    config: ModelConfig, queries: Tensor, cache: StaticCache, index: int, block: Block
) -> Tensor:
    """Attention of queries [N, Nq, D] over the cache, the block's own rows included: [N, Nq D]."""
    batch, tokens = block.batch, block.tokens
    kv, group, dim = config.num_kv_heads, config.group, config.head_dim
    if block.keys:
        keys, values = block.keys[index], block.values[index]
    else:
        assert isinstance(block.rows, Tensor)
        keys, values = cache.gather(index, block.rows, block.length)

    if block.padding is not None:
        queries = queries.index_select(0, block.padding)
    # The query heads of one KV head are extra queries, so keys and values are not copied per query
    # head.
    grouped = queries.view(batch, tokens, kv, group, dim).transpose(1, 2)
    grouped = grouped.reshape(batch, kv, tokens * group, dim)
    if _suits_products(grouped, block):
        out = _attend_by_products(grouped, keys, values, block)
    else:
        out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=block.mask)
    out = out.view(batch, kv, tokens, group, dim).transpose(1, 2)
    return _computed(out.reshape(batch * tokens, kv * group * dim), block.kept)


_SCORED_ROWS = 256
"""Queries of a head whose scores are in memory at once."""
FEWEST_SCORES = 1 << 17
"""Scores of a head above which products attend faster than torch's fused attention."""


def _suits_products(grouped: Tensor, block: Block) -> bool:
    rows = grouped.shape[2]
    many = rows >= products.MOST_ROWS and rows * block.length >= FEWEST_SCORES
    ours = products.ONEDNN and block.seen > 0 and not torch.is_grad_enabled()
    return ours and many and rows % products.STEP == 0


def _attend_by_products(grouped: Tensor, keys: Tensor, values: Tensor, block: Block) -> Tensor:
    """Attention of queries [B, kv_heads, M, D] over keys and values [B, kv_heads, length, D] as two
    float32 products a head, in half of the time of torch's fused form. Returns [B, kv_heads, M, D].
    """
    assert block.mask is not None
    out = torch.empty_like(grouped)
    scaled = grouped.float() * grouped.shape[-1] ** -0.5
    for row, head in product(*map(range, grouped.shape[:2])):
        seen, bias = keys[row, head].float(), block.mask[row, 0, :, block.seen :]
        values_of = values[row, head].float().t()
        for some in range(0, grouped.shape[2], _SCORED_ROWS):
            part = slice(some, some + _SCORED_ROWS)
            scores = products.linear(scaled[row, head, part], seen)
            scores[:, block.seen :] += bias[part]
            out[row, head, part] = products.linear(scores.softmax(-1), values_of)
    return out


def forward_hidden(
    weights: DecoderWeights,
    cache: StaticCache,
    token_ids: Tensor,
    block: Block,
    inner: tuple[int, ...] = (),
    *,
    cache_only: bool = False,
) -> Tensor:
    """Hidden states: inputs of the layers `inner`, before any norm, then the last state after the
    final norm.

    token_ids int64 [N] or [B, Q] at the block's positions; the cache is written in place. inner:
    ascending, below the number of layers. Returns [N, (len(inner) + 1) H]; without inner states
    nothing is copied. cache_only: writes the cache alone and returns no row.
    """
    config = weights.config
    x = functional.embedding(token_ids.reshape(-1), weights.embed)
    count = len(x)
    if spare := products.spare_rows(x):
        x = functional.pad(x, (0, 0, 0, spare))
    states: list[Tensor] = []
    for index, layer in enumerate(weights.layers):
        if cache_only and layer is weights.layers[-1]:
            qkv = project_inputs(layer, x, config.rms_norm_eps)[:count]
            store(config, layer, qkv, cache, index, block.rotation, block.cells)
            return x[:0]
        if index in inner:
            states.append(x[:count])
        x = layer_forward(config, layer, x, cache, index, block)
    last = _rms_norm(x[:count], weights.norm, config.rms_norm_eps)
    return torch.cat((*states, last), dim=-1) if states else last


def head_logits(weights: DecoderWeights, hidden: Tensor) -> Tensor:
    """Logits [..., V] of hidden states [..., W]; the head reads the last H numbers."""
    return products.linear(hidden[..., -weights.config.hidden_size :], weights.head)
