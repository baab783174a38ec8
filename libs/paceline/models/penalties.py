"""Adjusts logits by repetition, frequency and presence penalty, and by a logit bias.

The functions are pure. For a logit l of a token v in the prompt or the response, with c(v) its
count in the response alone:
  1. repetition r (Keskar et al. 2019, CTRL, section 4.1; sign rule of transformers):
     l / r where l > 0, else l * r,                for tokens of prompt and response
  2. frequency f and presence p (OpenAI API reference):
     l - f * c(v) - p * [c(v) > 0],                for tokens of the response
  3. bias b (OpenAI API reference):
     l + b(v)
All adjustments precede the temperature, hence also top_k, top_p and min_p. Reported log-probs use
the raw logits (models/sampling.py). A neutral value (r = 1, f = p = 0) preserves every bit of a
float32 logit.

Under speculation, the response at a draft node is the emitted tokens and the drafts on the path to
the node. So each node has its own counts. Its adjusted logits equal the adjusted logits of decoding
without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PenaltyParams:
    """Strengths of B rows, float32 [B] each."""

    repetition: Tensor
    """r > 0; 1 = off"""
    frequency: Tensor
    """f; 0 = off"""
    presence: Tensor
    """p; 0 = off"""

    @classmethod
    def of(
        cls,
        repetition: Sequence[float],
        frequency: Sequence[float],
        presence: Sequence[float],
        device: torch.device | None = None,
    ) -> PenaltyParams:
        """Rows from plain numbers."""
        return cls(
            *(
                torch.tensor(one, dtype=torch.float32, device=device)
                for one in (repetition, frequency, presence)
            )
        )


def node_counts(base: Tensor, token_ids: Tensor, parents: Tensor | None = None) -> Tensor:
    """Counts of the response's tokens at every node of a draft chain or tree.

    `base` [B, V]: counts at the root, including the root's own token. `token_ids` int64 [B, Q]:
    column 0 is the root; -1 for an absent node. `parents` int64 [B, Q]: column of each node's
    parent, smaller than its own. It is -1 for the root and for an absent node. None means a chain:
    the parent of node i is i - 1.

    Returns base's dtype [B, Q, V]. An absent node has the counts of its parent, or of the root.
    """
    batch, nodes = token_ids.shape
    if parents is None:
        parents = torch.arange(-1, nodes - 1, device=base.device).expand(batch, nodes)
    added = ((token_ids >= 0) & (parents >= 0)).to(base.dtype)
    parents, token_ids = parents.clamp(min=0), token_ids.clamp(min=0)
    counts = base[:, None].repeat(1, nodes, 1)
    rows = torch.arange(batch, device=base.device)
    for node in range(1, nodes):
        counts[:, node] = counts[rows, parents[:, node]]
        counts[rows, node, token_ids[:, node]] += added[:, node]
    return counts


def node_depths(token_ids: Tensor, parents: Tensor | None = None) -> Tensor:
    """Drafts on the path to every node of a chain or tree, int64 [B, Q]; 0 at the root.

    token_ids, parents: as node_counts takes them; where there is no node the number means nothing.
    """
    batch, nodes = token_ids.shape
    depths = torch.arange(nodes, device=token_ids.device).repeat(batch, 1)
    if parents is None:
        return depths
    rows = torch.arange(batch, device=token_ids.device)
    for node in range(1, nodes):
        depths[:, node] = depths[rows, parents[:, node].clamp(min=0)] + 1
    return depths


def penalised(
    logits: Tensor, prompt_holds: Tensor, counts: Tensor, params: PenaltyParams
) -> Tensor:
    """Steps 1 and 2 of the module docstring.

    logits [B, Q, V]; prompt_holds bool [B, V]; counts [B, Q, V] of the response's tokens. Returns
    float32 [B, Q, V].
    """
    repetition, frequency, presence = (
        one[:, None, None] for one in (params.repetition, params.frequency, params.presence)
    )
    logits, said = logits.float(), counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(said | prompt_holds[:, None], repeated, logits)
    return logits - frequency * counts - presence * said


def add_bias_(logits: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Step 3 of the module docstring, in place.

    logits [Q, V] of one request; token_ids int64 [K], all different; values [K].
    """
    logits[:, token_ids] += values
