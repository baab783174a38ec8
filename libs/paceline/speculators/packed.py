"""Holds several documents in one training row, with the visibility of each position.

Terms: a document is (part of) one sequence. A branch is a chain of drafts that the target verified
and rejected, attached to a position of its document. Position t pairs the states captured at a
token with the next token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
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
    """int64 [T]: token t + 2, compared with the first draft; -1 in a branch, where the target drew
    none.
    """
    positions: Tensor
    """int64 [T]: t within its document, from 0 on."""
    parents: Tensor
    """int64 [T]: the previous position in its document or branch; -1 for the first of a
    document.
    """
    documents: Tensor
    """int64 [T]: number of the document."""
    valid: Tensor
    """bool [T]: a drafting target: the policy drew token t + 2, or could have drawn it after a
    rejected draft.
    """
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
        count = len(self)
        here = torch.arange(spare)
        behind: dict[str, Tensor] = {
            "draft_tokens": torch.full((spare,), -1),
            "positions": here,
            "parents": torch.where(here > 0, count + here - 1, -1),
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

        Position t + 1 follows t when it is t's child with the token that t must draft. In a branch,
        where the target drew no token, any child directly after its parent follows.
        """
        count, device = len(self), self.next_tokens.device
        here = torch.arange(count, device=device)
        follows = torch.zeros(count, dtype=torch.int64, device=device)
        drawn = self.draft_tokens[:-1]
        follows[1:] = (self.parents[1:] == here[:-1]) & (
            (drawn == self.next_tokens[1:]) | (drawn < 0)
        )
        runs = (1 - follows).cumsum(0)
        there = (here + steps).clamp(max=count - 1)
        inside = (runs[there] == runs) & (here + steps < count)
        return torch.where(inside, there, here), inside

    def mask(self) -> Tensor:
        """bool [T, T], True if query t may see key s: s is t or one of its ancestors."""
        return ancestor_mask(self.parents)


def ancestor_mask(parents: Tensor) -> Tensor:
    """bool [T, T] from parents int64 [T]: True at (t, s) when s is t or an ancestor of t; parents
    precede their children.

    It works on runs, in which each position is the parent of the next. All positions of a run see
    the same positions of every other run: its first positions up to a limit.
    """
    count, device = len(parents), parents.device
    here = torch.arange(count, device=device)
    starts = parents != here - 1
    starts[:1] = True
    runs = starts.long().cumsum(0) - 1
    limits = torch.as_tensor(_limits(parents[starts].tolist(), runs.tolist()), device=device)
    seen = here <= limits[:, runs]  # [R, T]
    return seen[runs] & (here[:, None] >= here)


def _limits(parents: list[int], runs: list[int]) -> npt.NDArray[np.int64]:
    """[R, R]: the last position of run k visible to run r, -1 for none, from the parents of R runs'
    first positions.
    """
    limits = np.full((len(parents), len(parents)), -1)
    for run, parent in enumerate(parents):
        if parent >= 0:
            limits[run] = limits[runs[parent]]
            limits[run, runs[parent]] = parent
        limits[run, run] = len(runs)
    return limits


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
