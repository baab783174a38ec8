"""The block of nodes that one round forwards, and the rule that verifies it.

Pure functions arrange chains, trees and rows of unequal size in one block.

At every node, draw x from the target with the request's own noise for that position,
and follow the child equal to x. The first x without an equal child is emitted and ends the round.
So every emitted token is the draw of decoding without drafts, for any drafts, even those drawn with
the same noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models import decoder, sampling
from paceline.services.rollout_gateway.engines.requests import draws
from paceline.speculators.base import Drafts

DENSE = 0.8
"""Share of existing nodes from which a block is forwarded whole; omitting nodes costs two copies
per layer.
"""


@dataclass(frozen=True, slots=True)
class Nodes:
    """B rows of Q nodes: node 0 is the last token, the root; all other nodes are drafts, parents
    before children.
    """

    tokens: Tensor
    """int64 [B, Q]; -1 for no node."""
    parents: Tensor | None = None
    """int64 [B, Q]; 0 for the root itself. None: each node is the child of the previous node."""
    depths: Tensor | None = None
    """int64 [B, Q]: edges from the root; None: equal to the node's index."""
    kept: Tensor | None = None
    """int64 [N]: indices of the forwarded nodes in the flattened block; None: all nodes."""

    @property
    def width(self) -> int:
        """Q"""
        return self.tokens.shape[1]

    @property
    def drafted(self) -> Tensor:
        """int64 [B]: number of drafts per row."""
        return (self.tokens[:, 1:] >= 0).sum(dim=1)

    @property
    def levels(self) -> Tensor:
        """int64 [B]: number of draft levels per row."""
        if self.depths is None:
            return self.drafted
        return torch.where(self.tokens >= 0, self.depths, 0).amax(dim=1)

    @property
    def every_depth(self) -> Tensor:
        """int64 [B, Q]: edges from the root."""
        if self.depths is not None:
            return self.depths
        return torch.arange(self.width, device=self.tokens.device).expand_as(self.tokens)

    @property
    def every_parent(self) -> Tensor:
        """int64 [B, Q]; the root is its own parent."""
        if self.parents is not None:
            return self.parents
        return (self.every_depth - 1).clamp(min=0)

    def compute(self, whole: Tensor) -> Tensor:
        """Selects the values of forwarded nodes, [N, ...], from values [B, Q] or [B, Q, ...] of all
        nodes.
        """
        flat = whole.flatten(0, 1)
        return flat if self.kept is None else flat.index_select(0, self.kept)

    def spread(self, computed: Tensor) -> Tensor:
        """Expands values [N, ...] of the forwarded nodes to [B, Q, ...], 0 elsewhere."""
        shape = (*self.tokens.shape, *computed.shape[1:])
        if self.kept is None:
            return computed.view(shape)
        whole = computed.new_zeros(self.tokens.numel(), *computed.shape[1:])
        return whole.index_copy_(0, self.kept, computed).view(shape)

    def positions(self, roots: Tensor) -> Tensor:
        """int64 [B, Q]: sequence position of each node, for roots at positions int64 [B]."""
        return roots[:, None] + self.every_depth

    def layout(self, roots: Tensor, length: int) -> decoder.Layout:
        """Cache positions and visibility of the nodes, for roots at positions int64 [B]."""
        if self.parents is None:
            return decoder.Layout(kept=self.kept)
        stored = roots[:, None] + torch.arange(self.width, device=roots.device)
        visible = decoder.tree_visible(roots, ancestors(self.parents, self.deepest), length)
        return decoder.Layout(stored, visible, self.kept)

    @property
    def deepest(self) -> int:
        """Edges from the root to the deepest node."""
        return self.width - 1 if self.depths is None else int(self.depths.max())


def arrange(last: Tensor, drafts: Drafts) -> Nodes:
    """Puts the last tokens, int64 [B, 1], above their drafts, with the cheaper layout for the
    forward.
    """
    tokens = torch.cat((last, drafts.tokens), dim=1)
    kept = None
    present = tokens >= 0
    if int(present.sum()) < DENSE * tokens.numel():
        kept = present.flatten().nonzero()[:, 0]
    if drafts.parents is None:
        return Nodes(tokens, kept=kept)
    parents = torch.cat((torch.zeros_like(last), drafts.parents), dim=1)
    return Nodes(tokens, parents, sampling.node_depths(parents, parents), kept)


def ancestors(parents: Tensor, deepest: int) -> Tensor:
    """bool [B, Q, Q]: true if the second node is the first node or its ancestor."""
    batch, width = parents.shape
    seen = torch.eye(width, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    above = parents
    for _ in range(deepest):
        seen.scatter_(2, above[:, :, None], True)
        above = parents.gather(1, above)
    return seen


def merge_drafts(rows: int, parts: Sequence[tuple[Sequence[int], Drafts]]) -> Drafts | None:
    """Drafts of all rows from the drafts [members, N] of each part; None without parts."""
    if not parts:
        return None
    if len(parts) == 1 and len(parts[0][0]) == rows:
        return parts[0][1]
    width = max(drafts.tokens.shape[1] for _, drafts in parts)
    first = parts[0][1].tokens
    tokens = torch.full((rows, width), -1, dtype=torch.int64, device=first.device)
    scores = torch.ones(rows, width, device=first.device)
    chain = torch.arange(width, device=first.device)
    parents = chain.repeat(rows, 1)
    for members, drafts in parts:
        count = drafts.tokens.shape[1]
        tokens[members, :count], scores[members, :count] = drafts.tokens, drafts.scores
        parents[members, :count] = chain[:count] if drafts.parents is None else drafts.parents

    chains = all(drafts.parents is None for _, drafts in parts)
    return Drafts(tokens, scores, None if chains else parents)


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
    params: sampling.DrawParams,
    adjusted: Tensor | None = None,
) -> Verdict:
    """Draw at every node and follow the drafts.

    logits [N, V] of the forwarded nodes, each computed with its ancestors as context; positions
    int64 [B, Q]: absolute position of the token drawn at each node; params: N rows; adjusted [N,
    V]: logits for the draw instead, see `draw`.
    """
    drawn = sampling.draw(logits, nodes.compute(positions), params, adjusted)
    tokens, logprobs, gaps = map(nodes.spread, (drawn.tokens, drawn.logprobs, drawn.gaps))
    if nodes.parents is None:
        return Verdict(tokens, accepted_drafts(tokens, nodes.tokens[:, 1:]), logprobs, gaps, None)
    path, accepted = draws.follow(tokens, nodes.tokens, nodes.parents)
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
