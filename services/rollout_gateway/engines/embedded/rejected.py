"""The choice of rejected drafts that are captured as hidden rows, as pure functions.

A draft is rejected if it was verified and the sequence continued with another token. Its ancestors
are tokens of the sequence, or tokens of the sequence and other rejected drafts. Its state comes
from the round's only forward, without further computation. engines/worker/ring.py defines the stamp
`parents`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.services.rollout_gateway.engines.embedded.nodes import Nodes
from paceline.services.rollout_gateway.engines.embedded.verify import Verdict
from paceline.services.rollout_gateway.engines.requests.tree_paths import reachable

REJECTED_PER_ROUND = 4
"""Maximum rows of rejected drafts per request and round. First levels are first, so every draft
follows its parents.
"""


@dataclass(frozen=True, slots=True)
class RejectedDrafts:
    """R drafts, ordered by row and then by level: parents before their children."""

    rows: Tensor
    """int64 [R]: row of the round."""
    nodes: Tensor
    """int64 [R]: node of that row."""
    parents: Tensor
    """int64 [R]: stamp as in engines/worker/ring.py, 1 or more."""
    left_out: int
    """Number of rejected drafts above the limit."""


def rejected_drafts(
    nodes: Nodes, verdict: Verdict, taken: Tensor, most: int = REJECTED_PER_ROUND
) -> RejectedDrafts:
    """The rejected drafts of every row.

    taken int64 [B]: tokens that each row accepted in the round, 0 for rows without capture. After a
    stop, drafts under later nodes of the accepted path are ignored, because no emitted token
    precedes them.
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
        # After its end, the path repeats the root, which is on the path.
        followed = torch.zeros_like(nodes.tokens, dtype=torch.bool).scatter_(1, verdict.path, True)
    reached = torch.where(followed, nodes.every_depth < taken[:, None], nodes.tokens >= 0)
    return reachable(reached, nodes.every_parent) & ~followed
