"""Verification of a chain: pure functions from logits, drafts, seeds and positions to what is emitted.

Rule (DESIGN 2.2): at every node draw x from the target with the request's own noise for that position; follow the draft
while it equals x; the first x that differs is emitted and ends the round; if all drafts were followed, the draw after
the last one is emitted too. So every emitted token is the draw that decoding without drafts makes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.sampling import DrawParams, draw


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one round; Q = drafts + 1."""

    tokens: Tensor
    """int64 [B, Q]: the draw at every node; row b emits the first accepted[b] + 1."""
    accepted: Tensor
    """int64 [B]: drafts followed, 0 .. Q - 1."""
    logprobs: Tensor
    """float32 [B, Q]: behavior log-probs of the draws."""
    gaps: Tensor
    """float64 [B, Q]: perturbed top-two gaps."""


def verify(
    logits: Tensor, drafts: Tensor, positions: Tensor, params: DrawParams, adjusted: Tensor | None = None
) -> Verdict:
    """Draw at every node and follow the drafts.

    logits [B, Q, V]: those of node q were computed with the drafts before it as context; drafts int64 [B, Q - 1], -1
    where there is none; positions int64 [B, Q]: absolute position of the token drawn at each node; params: B Q rows;
    adjusted [B, Q, V]: what is drawn from instead, see `draw`.
    """
    batch, nodes, vocab = logits.shape
    flat = adjusted.reshape(batch * nodes, vocab) if adjusted is not None else None
    drawn = draw(logits.reshape(batch * nodes, vocab), positions.reshape(-1), params, flat)
    tokens = drawn.tokens.view(batch, nodes)
    return Verdict(
        tokens, accepted_drafts(tokens, drafts), drawn.logprobs.view(batch, nodes), drawn.gaps.view(batch, nodes)
    )


def accepted_drafts(drawn: Tensor, drafts: Tensor) -> Tensor:
    """Leading drafts equal to the draws at their nodes: drawn [B, Q], drafts [B, Q - 1] -> int64 [B]."""
    if drafts.shape[1] == 0:
        return torch.zeros(len(drawn), dtype=torch.int64, device=drawn.device)
    return (drawn[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)
