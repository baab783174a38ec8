"""Verification of chains and trees: pure functions of logits, drafts, seeds and positions.

Rule: at every node, draw x from the target with the request's own noise for that position, and
follow the child equal to x. The first x without an equal child is emitted and ends the round. So
every emitted token is the draw of decoding without drafts, for any drafts that do not depend on the
draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.sampling import DrawParams, draw
from paceline.services.rollout_gateway.engines.embedded.nodes import Nodes
from paceline.services.rollout_gateway.engines.requests.tree_paths import follow


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one round. P: nodes on the longest possible path, including the root."""

    tokens: Tensor
    """int64 [B, P]: the draw at every node of the path; row b emits the first accepted[b] + 1."""
    accepted: Tensor
    """int64 [B]: drafts followed, 0 .. P - 1."""
    logprobs: Tensor
    """float32 [B, P]: behavior log-probs of the draws."""
    gaps: Tensor
    """float64 [B, P]: perturbed top-two gaps."""
    path: Tensor | None
    """int64 [B, P]: node at each step of the path, the root repeated after its end.

    None: node p at step p.
    """


def verify(
    logits: Tensor,
    nodes: Nodes,
    positions: Tensor,
    params: DrawParams,
    adjusted: Tensor | None = None,
) -> Verdict:
    """Draw at every node and follow the drafts.

    logits [N, V] of the forwarded nodes, each computed with its ancestors as context; positions
    int64 [B, Q]: absolute position of the token drawn at each node; params: N rows; adjusted [N,
    V]: logits for the draw instead, see `draw`.
    """
    drawn = draw(logits, nodes.compute(positions), params, adjusted)
    tokens, logprobs, gaps = (
        nodes.spread(part) for part in (drawn.tokens, drawn.logprobs, drawn.gaps)
    )
    if nodes.parents is None:
        return Verdict(tokens, accepted_drafts(tokens, nodes.tokens[:, 1:]), logprobs, gaps, None)
    path, accepted = follow(tokens, nodes.tokens, nodes.parents)
    path = path[:, : int(accepted.max()) + 1]
    tokens, logprobs, gaps = (part.gather(1, path) for part in (tokens, logprobs, gaps))
    return Verdict(tokens, accepted, logprobs, gaps, path)


def accepted_drafts(drawn: Tensor, drafts: Tensor) -> Tensor:
    """Number of leading drafts equal to the draws at their nodes, int64 [B]: drawn [B, Q], drafts
    [B, Q - 1].
    """
    if drafts.shape[1] == 0:
        return torch.zeros(len(drawn), dtype=torch.int64, device=drawn.device)
    return (drawn[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)
