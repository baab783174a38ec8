"""The accepted path of a verified draft tree, for every engine.

A pure function that never waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def follow(drawn: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Path [B, Q], the root repeated behind its end, and drafts followed [B]: each time the child
    that is the draw.

    drawn, tokens, parents int64 [B, Q]: the draw at each node, the token it stands for, its parent.
    Node 0 is the root; parents stand before their children; siblings differ; a node whose parent is
    below 0 is no part of its tree.
    """
    above = parents.clamp(min=0)
    reached = (tokens == drawn.gather(1, above)) & (parents >= 0)
    reached[:, 0] = True
    reached = reachable(reached, above)
    # Siblings differ, so the reached nodes are one path, and they ascend: a node's rank is its
    # depth.
    ranks = reached.long().cumsum(dim=1) - 1
    path = torch.zeros_like(tokens)
    path.scatter_add_(
        1, ranks, torch.where(reached, torch.arange(tokens.shape[1], device=tokens.device), 0)
    )
    return path, reached.sum(dim=1) - 1


def reachable(allowed: Tensor, parents: Tensor) -> Tensor:
    """bool [B, Q]: nodes that are allowed, and all their ancestors with them; parents int64 [B, Q],
    the root's own is the root.
    """
    # Each turn doubles the number of ancestors that are known to be allowed.
    for _ in range(max(parents.shape[1] - 1, 1).bit_length()):
        allowed = allowed & allowed.gather(1, parents)
        parents = parents.gather(1, parents)
    return allowed
