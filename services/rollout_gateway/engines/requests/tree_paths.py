"""Finds the accepted path of a verified draft tree, for every engine, without waiting for the
device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def follow(drawn: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """From the root, follow the child node that equals the draw at its parent.

    Returns the path [B, Q], with the root repeated behind its end, and the number of drafts on it
    [B]. drawn, tokens, parents int64 [B, Q]: the draw at each node, the node's own token, its
    parent. Node 0 is the root, parents precede their children, and siblings differ. A node with a
    parent below 0 is outside its tree.
    """
    above = parents.clamp(min=0)
    reached = (tokens == drawn.gather(1, above)) & (parents >= 0)
    reached[:, 0] = True
    reached = reachable(reached, above)
    # Siblings differ, so the reached nodes are one path in ascending order. A node's rank is
    # therefore its depth.
    ranks = reached.long().cumsum(dim=1) - 1
    path = torch.zeros_like(tokens)
    path.scatter_add_(
        1, ranks, torch.where(reached, torch.arange(tokens.shape[1], device=tokens.device), 0)
    )
    return path, reached.sum(dim=1) - 1


def reachable(allowed: Tensor, parents: Tensor) -> Tensor:
    """bool [B, Q]: nodes that are allowed together with all their ancestors.

    parents int64 [B, Q]; the root is its own parent.
    """
    # Each turn doubles the number of ancestors already checked.
    for _ in range(max(parents.shape[1] - 1, 1).bit_length()):
        allowed = allowed & allowed.gather(1, parents)
        parents = parents.gather(1, parents)
    return allowed
