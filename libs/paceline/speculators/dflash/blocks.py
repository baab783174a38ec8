"""Attention of blocks over a shared context, as pure tensor functions.

Every block of a packed row sees the context rows up to its anchor, and all of its own positions. So
the context's keys and values are computed once for all blocks. No block sees another block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOGETHER = 32
"""Number of blocks attended at once, so that each product covers few of a row's documents. Without
gradients it also bounds the scores in memory: TOGETHER B for each head and context row.
"""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks that are attended at once, and the range of context rows that they see."""

    blocks: slice
    rows: slice
    hidden: Tensor
    """bool [n, 1, 1, t]: rows that a block does not see."""


def stretches(seen: Tensor) -> list[Stretch]:
    """Splits the blocks into at least one stretch; seen bool [N, T]: context rows that each block
    sees, at least one per block.
    """
    found = []
    for begin in range(0, max(len(seen), 1), TOGETHER):
        part = seen[begin : begin + TOGETHER]
        there = part.any(0).nonzero()[:, 0].tolist()
        rows = slice(there[0], there[-1] + 1) if there else slice(0, 0)
        found.append(Stretch(slice(begin, begin + len(part)), rows, ~part[:, None, None, rows]))
    return found


def block_attention(
    queries: Tensor,
    own: tuple[Tensor, Tensor],
    context: tuple[Tensor, Tensor],
    parts: list[Stretch],
) -> Tensor:
    """softmax over the context rows that a block sees and over all of its own positions.

    queries [N, heads, B, D]; own keys and values [N, kv_heads, B, D]; context keys and values
    [kv_heads, T, D]. Returns [N, heads, B, D].
    """
    keys, values = context
    outs = [
        _attend(
            queries[one.blocks],
            (own[0][one.blocks], own[1][one.blocks]),
            (keys[:, one.rows], values[:, one.rows]),
            one.hidden,
        )
        for one in parts
    ]
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def _attend(
    queries: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], hidden: Tensor
) -> Tensor:
    count, heads, tokens, dim = queries.shape
    kv, rows = context[0].shape[:2]
    each = heads // kv * tokens
    # All blocks' query heads of one KV head are rows of one product with the context.
    grouped = (queries / dim**0.5).view(count, kv, each, dim)
    beside = grouped.transpose(0, 1).reshape(kv, count * each, dim)
    before = (beside @ context[0].transpose(1, 2)).view(kv, count, each, rows).transpose(0, 1)
    scores = torch.cat(
        (before.masked_fill(hidden, float("-inf")), grouped @ own[0].transpose(2, 3)), dim=-1
    )
    weights = torch.softmax(scores, dim=-1)
    seen = weights[..., :rows].transpose(0, 1).reshape(kv, count * each, rows) @ context[1]
    out = seen.view(kv, count, each, dim).transpose(0, 1) + weights[..., rows:] @ own[1]
    return out.reshape(count, heads, tokens, dim)
