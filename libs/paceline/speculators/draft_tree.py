"""Grows a draft tree for any speculator with a distribution per node.

This is EAGLE-2's dynamic tree (Li et al. 2024, arXiv 2406.16858). On each level, the `topk` nodes
most likely to be reached are expanded by `topk` children each; the most likely of all nodes are
kept. A node's score is the product of the drafter's probabilities along its path, so the ancestors
of a kept node are also kept. The drafter alone chooses nodes, without draws: following them by the
target's own draws is exact (engines/embedded/verify.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.speculators.base import Drafts, DraftShape

_DEPTH_TIE = 1e-5
"""Subtracted from a log score per level, so that a parent precedes children of equal score."""


@dataclass(frozen=True, slots=True)
class Beam:
    """The expanded nodes of a level."""

    level: int
    """1: children of the root."""
    tokens: Tensor
    """int64 [B, k]"""
    sources: Tensor
    """int64 [B, k]: index of each parent in the beam of the previous level; 0 on level 1."""


def grow_tree(first: Tensor, expand: Callable[[Beam], Tensor], shape: DraftShape) -> Drafts:
    """The drafter's most likely tree of `shape`.

    first [B, V]: log-probs of the root's children; expand: log-probs [B, k, V] of the children of a
    beam's nodes. Stops when no row has a node above shape.floor. Returns at most shape.drafts nodes
    a row.
    """
    batch, topk = first.shape[0], min(shape.topk, first.shape[-1])
    top = first.topk(topk, dim=-1)
    beam = Beam(1, top.indices, torch.zeros_like(top.indices))
    scores = top.values
    ids = torch.arange(1, topk + 1, device=first.device).expand(batch, topk)
    offset = topk
    levels = [(top.indices, scores, torch.zeros_like(top.indices))]
    for level in range(2, shape.steps + 1):
        if shape.floor > 0 and bool(scores.max() < math.log(shape.floor)):
            break
        top = expand(beam).topk(topk, dim=-1)
        children = (scores[:, :, None] + top.values - _DEPTH_TIE).flatten(1)
        tokens = top.indices.flatten(1)
        levels.append((tokens, children, ids[:, :, None].expand(batch, topk, topk).flatten(1)))
        best = children.topk(topk, dim=-1)
        beam = Beam(level, tokens.gather(1, best.indices), best.indices // topk)
        scores, ids, offset = best.values, best.indices + offset + 1, offset + topk * topk

    tokens, scores, parents = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    return _most_likely(tokens, scores, parents, shape.drafts)


def _most_likely(tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int) -> Drafts:
    """The best `nodes` of all candidates [B, C], in their order; parents are ids, 0 the root, i + 1
    candidate i.
    """
    chosen = scores.topk(min(nodes, scores.shape[1]), dim=1).indices.sort(dim=1).values
    renamed = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.int64, device=scores.device)
    names = torch.arange(1, chosen.shape[1] + 1, device=scores.device).expand_as(chosen)
    renamed.scatter_(1, chosen + 1, names)
    return Drafts(
        tokens.gather(1, chosen),
        scores.gather(1, chosen).exp().clamp_(max=1.0),
        renamed.gather(1, parents.gather(1, chosen)),
    )
