"""Rounds with drafts drawn from the drafter: keeps q while drafting and applies the rule of
rejection.py to a block.

Drafts of an n-gram are not drawn: its q has all its mass on the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.sampling import DrawParams
from paceline.services.rollout_gateway.engines.embedded.nodes import Nodes
from paceline.services.rollout_gateway.engines.embedded.rejection import (
    sample_drafts,
    verify_sampled,
)
from paceline.services.rollout_gateway.engines.embedded.verify import Verdict
from paceline.speculators.base import Drafts


class ChainSampler:
    """The DraftSampler (speculators/base.py) of some rows of a round."""

    def __init__(self, params: DrawParams, lengths: Tensor) -> None:
        self._params = params
        self._lengths = lengths
        self.probs: list[Tensor] = []
        """float64 [B, V] per level: q of its drafts."""

    def __call__(self, logits: Tensor, level: int) -> Tensor:
        """Draws int64 [B] at the level."""
        drawn = sample_drafts(logits, self._lengths + level, self._params, 1)
        self.probs.append(drawn.probs)
        return drawn.tokens[:, 0]


def draft_probs(
    nodes: Nodes, parts: Sequence[tuple[Sequence[int], Drafts, ChainSampler | None]], vocab: int
) -> Tensor:
    """q [B, Q, V] of every node's child, from (rows, drafts, sampler) of each part; zero without a
    child.
    """
    probs = torch.zeros(*nodes.tokens.shape, vocab, dtype=torch.float64, device=nodes.tokens.device)
    for members, drafts, sampler in parts:
        count = drafts.tokens.shape[1]
        if sampler is not None and sampler.probs:
            probs[members, :count] = torch.stack(sampler.probs[:count], dim=1)
        else:
            present = (drafts.tokens >= 0)[:, :, None]
            probs[members, :count] = (
                functional.one_hot(drafts.tokens.clamp(min=0), vocab).double() * present
            )
    return probs


def verify_drawn(
    logits: Tensor,
    nodes: Nodes,
    positions: Tensor,
    params: DrawParams,
    probs: Tensor,
    adjusted: Tensor | None = None,
) -> Verdict:
    """As `verify`, but by rejection; all nodes are forwarded and form a chain.

    logits, adjusted [B Q, V]; positions int64 [B, Q]; params: B Q rows; probs float64 [B, Q, V],
    see draft_probs. Gaps are infinite: a seed's tokens may depend on the drafts, so near-ties
    explain no difference.
    """
    shape = (*nodes.tokens.shape, logits.shape[-1])
    whole = None if adjusted is None else adjusted.view(shape)
    found = verify_sampled(logits.view(shape), nodes.tokens, None, probs, positions, params, whole)
    gaps = torch.full(nodes.tokens.shape, torch.inf, dtype=torch.float64, device=logits.device)
    return Verdict(found.tokens, found.accepted, found.logprobs, gaps, None)
