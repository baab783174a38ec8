"""Holds several documents in one training row, with the visibility of each position.

A document is (part of) one sequence. Position t pairs the states captured at a token with the next
token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models import products

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
    top_tokens: Tensor | None = None
    """int32 [T, k]: the policy's most likely tokens t + 2, most likely first; None: not computed
    yet (`taught`).
    """
    top_logp: Tensor | None = None
    """fp32 [T, k]: their log-probs."""

    def __len__(self) -> int:
        return len(self.next_tokens)

    def changed(self, change: Callable[[str, Tensor], Tensor]) -> PackedRow:
        """The row with the result of `change` for the name and value of each tensor."""
        held = ((one.name, getattr(self, one.name)) for one in fields(self))
        new: dict[str, Any] = {name: change(name, t) for name, t in held if isinstance(t, Tensor)}
        return replace(self, **new)

    def taught(self, head: Tensor) -> PackedRow:
        """The row with its targets by the policy's lm_head [V, H]: itself if it has them."""
        if self.top_tokens is not None:
            return self
        tokens, logp = likeliest(self.next_states, head)
        return replace(self, top_tokens=tokens, top_logp=logp)

    def padded(self, spare: int) -> PackedRow:
        """The same row followed by a document of `spare` positions without targets."""
        behind: dict[str, Tensor] = {
            "positions": torch.arange(spare),
            "documents": torch.full((spare,), int(self.documents[-1]) + 1),
        }
        return self.changed(
            lambda name, t: torch.cat((t, behind.get(name, t.new_zeros(spare, *t.shape[1:]))))
        )

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


TOP = 64
"""Likeliest tokens of a target; the mass of all others is one number."""
_TOGETHER = 8 << 20
"""Logits in memory at once."""


@torch.no_grad()
def likeliest(states: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """The TOP most likely tokens, int32 [N, k], and their log-probs, fp32 [N, k], of the policy's
    last hidden states [N, H] under its lm_head [V, H]; k is V for smaller vocabularies.
    """
    count = min(TOP, len(head))
    rows = max(products.FEWEST_ROWS, _TOGETHER // len(head) // products.STEP * products.STEP)
    parts = [_likeliest(part, head, count) for part in states.split(rows)]
    tokens, logp = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logp)


def _likeliest(states: Tensor, head: Tensor, count: int) -> tuple[Tensor, Tensor]:
    logits = products.linear_padded(states.to(head.dtype), head).float()
    top = logits.topk(count, dim=-1)
    return top.indices.int(), top.values - logits.logsumexp(-1, keepdim=True)


def packed_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """scaled_dot_product_attention; on a CPU without the products between documents that do not see
    each other.

    queries [B, heads, T, D]; keys, values [B, kv_heads, T, D]; mask bool [B, 1, T, T], for queries
    that see themselves and earlier positions only. Returns [B, heads, T, D].
    """
    parts = [
        functional.scaled_dot_product_attention(
            queries[:, :, a:b],
            keys[:, :, a:b],
            values[:, :, a:b],
            attn_mask=mask[:, :, a:b, a:b],
            enable_gqa=True,
        )
        for a, b in pairwise(edges(mask))
    ]
    return torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]


def edges(mask: Tensor) -> list[int]:
    """0, then on a CPU, for one row, positions about _BLOCK apart that no later position of mask
    [B, 1, T, T] looks back across, and T.
    """
    # An accelerator computes the whole square faster than many small products.
    if len(mask) > 1 or mask.device.type != "cpu":
        return [0, mask.shape[-1]]
    return _edges(mask[0, 0])


def _edges(mask: Tensor) -> list[int]:
    first = mask.to(torch.uint8).argmax(dim=1)
    behind = first.flip(0).cummin(0).values.flip(0)  # earliest position read from t on
    edges = [0]
    for place in (behind == torch.arange(len(mask))).nonzero()[:, 0].tolist():
        if place - edges[-1] >= _BLOCK:
            edges.append(place)
    return [*edges, len(mask)]


TOGETHER = 32
"""Blocks that are attended at once, so that each product is over few of a row's documents. Without
gradients it also bounds the scores in memory: TOGETHER B for each head and row of the context.
"""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks that are attended at once, and the part of the context that any of them sees."""

    blocks: slice
    rows: slice
    hidden: Tensor
    """bool [n, 1, 1, t]: rows that a block does not see."""


def stretches(seen: Tensor) -> list[Stretch]:
    """Groups of up to TOGETHER blocks, at least one group. seen bool [N, T]: rows of the context
    that each block sees, at least one row.
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

    queries [N, heads, B, D]; own keys and values [N, kv_heads, B, D]; those of the context
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
    # The query heads of a KV head, of all blocks, are rows of one product with the context.
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
