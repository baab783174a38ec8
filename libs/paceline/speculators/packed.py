"""Holds several documents in one training row, with the visibility of each position.

A document is (part of) one sequence. Position t pairs the states captured at a token with the next
token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK = 64
"""Least number of positions in an attention block: smaller blocks cost more calls than they save
products.
"""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """T positions of one policy head; W captured numbers per token, of which the last H are the
    last hidden state.
    """

    states: Tensor
    """fp32 [T, W]: as captured at token t; their order is that of `layers`."""
    next_states: Tensor
    """fp32 [T, H]: the last hidden state of the next token: its lm_head gives the target's
    distribution of token t + 2.
    """
    next_tokens: Tensor
    """int64 [T]: token t + 1."""
    draft_tokens: Tensor
    """int64 [T]: token t + 2, compared with the first draft."""
    positions: Tensor
    """int64 [T]: t within its document, from 0 on."""
    documents: Tensor
    """int64 [T]: number of the document."""
    valid: Tensor
    """bool [T]: a drafting target: the policy drew token t + 2."""
    lm_head_hash: str
    layers: str = "last"
    """Content of `states`, see CaptureSpec.layers."""

    def __len__(self) -> int:
        return len(self.next_tokens)

    def pinned(self) -> PackedRow:
        """The same row in page-locked memory."""
        held = ((one.name, getattr(self, one.name)) for one in fields(self))
        pinned: dict[str, Any] = {n: t.pin_memory() for n, t in held if isinstance(t, Tensor)}
        return replace(self, **pinned)

    def padded(self, spare: int) -> PackedRow:
        """The same row followed by a document of `spare` positions without targets."""
        behind: dict[str, Tensor] = {
            "positions": torch.arange(spare),
            "documents": torch.full((spare,), int(self.documents[-1]) + 1),
        }
        held = ((one.name, getattr(self, one.name)) for one in fields(self))
        padded: dict[str, Any] = {
            name: torch.cat((t, behind.get(name, t.new_zeros(spare, *t.shape[1:]))))
            for name, t in held
            if isinstance(t, Tensor)
        }
        return replace(self, **padded)

    def ahead(self, steps: int) -> tuple[Tensor, Tensor]:
        """The position `steps` tokens later: indices [T] (its own if there is none) and bool [T] if
        there is one.
        """
        count, here = len(self), torch.arange(len(self), device=self.next_tokens.device)
        there = (here + steps).clamp(max=count - 1)
        inside = (self.documents[there] == self.documents) & (here + steps < count)
        return torch.where(inside, there, here), inside

    def mask(self) -> Tensor:
        """bool [T, T], True if query t may see key s: s is t or earlier in its document."""
        return (self.documents[:, None] == self.documents).tril()


def packed_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """scaled_dot_product_attention; on a CPU without the products between documents that do not see
    each other.

    queries [B, heads, T, D]; keys, values [B, kv_heads, T, D]; mask bool [B, 1, T, T], for queries
    that see themselves and earlier positions only. Returns [B, heads, T, D].
    """
    # An accelerator computes the whole square faster than many small products.
    split = len(mask) == 1 and queries.device.type == "cpu"
    edges = _edges(mask[0, 0]) if split else [0, mask.shape[-1]]
    parts = [
        functional.scaled_dot_product_attention(
            queries[:, :, a:b],
            keys[:, :, a:b],
            values[:, :, a:b],
            attn_mask=mask[:, :, a:b, a:b],
            enable_gqa=True,
        )
        for a, b in pairwise(edges)
    ]
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def _edges(mask: Tensor) -> list[int]:
    """0, then positions about _BLOCK apart that no later position of mask [T, T] looks back across,
    and T.
    """
    first = mask.to(torch.uint8).argmax(dim=1)
    behind = first.flip(0).cummin(0).values.flip(0)  # earliest position read from t on
    edges = [0]
    for place in (behind == torch.arange(len(mask))).nonzero()[:, 0].tolist():
        if place - edges[-1] >= _BLOCK:
            edges.append(place)
    return [*edges, len(mask)]
