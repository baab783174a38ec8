"""Which rejected drafts of a round leave as hidden rows, and where they hang. Pure functions on the
round's tensors.

A draft is rejected when it was verified with tokens of the sequence before it, or with such tokens
and other rejected drafts, and the sequence went on otherwise. Its state comes from the round's one
forward; nothing is computed for it. Owns the choice and its bound; not the writing of rows and not
what `parents` means to readers (engines/worker/ring.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.services.rollout_gateway.engines.embedded.nodes import Nodes
from paceline.services.rollout_gateway.engines.embedded.verify import Verdict
from paceline.services.rollout_gateway.engines.requests.tree_paths import reachable

REJECTED_PER_ROUND = 4
"""Rows of rejected drafts per request and round at most; first levels first: a draft stands with
its parents.
"""


@dataclass(frozen=True, slots=True)
class RejectedDrafts:
    """R drafts, row by row of the round, in each by level: parents before their children."""

    rows: Tensor
    """int64 [R]: row of the round."""
    nodes: Tensor
    """int64 [R]: node of that row."""
    parents: Tensor
    """int64 [R]: the stamp of engines/worker/ring.py, 1 or more."""
    left_out: int
    """Rejected drafts beyond the bound."""


def rejected_drafts(
    nodes: Nodes, verdict: Verdict, taken: Tensor, most: int = REJECTED_PER_ROUND
) -> RejectedDrafts:
    """The rejected drafts of every row.

    taken int64 [B]: tokens each row has taken of the round, 0 for rows that are not asked for.
    Where a stop ended the request, drafts under later nodes of the accepted path are left aside:
    nothing was emitted that they could follow.
    """
    rejected = _rejected(nodes, verdict, taken)
    order = nodes.every_depth.argsort(dim=1, stable=True)
    by_level = rejected.gather(1, order)
    ranks = by_level.cumsum(dim=1) - 1
    kept = by_level & (ranks < most)
    rows, places = kept.nonzero(as_tuple=True)
    chosen = order[rows, places]
    rank_of_node = torch.zeros_like(ranks).scatter_(1, order, ranks)
    above = nodes.every_parent[rows, chosen]
    back = rank_of_node[rows, chosen] - rank_of_node[rows, above]
    parents = 1 + torch.where(rejected[rows, above], back, 0)
    return RejectedDrafts(rows, chosen, parents, int(rejected.sum()) - len(rows))


def _rejected(nodes: Nodes, verdict: Verdict, taken: Tensor) -> Tensor:
    """bool [B, Q]"""
    if verdict.path is None:
        followed = torch.arange(nodes.width, device=taken.device) <= verdict.accepted[:, None]
    else:
        # Behind its end the path repeats the root, which is on it.
        followed = torch.zeros_like(nodes.tokens, dtype=torch.bool).scatter_(1, verdict.path, True)
    reached = torch.where(followed, nodes.every_depth < taken[:, None], nodes.tokens >= 0)
    return reachable(reached, nodes.every_parent) & ~followed
