"""The block of nodes that one round forwards, and the two rules that verify it.

Pure functions arrange chains, trees and rows of unequal size in one block.

Same draws: at every node, draw x from the target with the request's own noise for that position,
and follow the child equal to x. The first x without an equal child is emitted and ends the round.
So every emitted token is the draw of decoding without drafts, for any drafts, even those drawn with
the same noise.

Rejection (Leviathan et al. 2023, arXiv 2211.17192): drafts form chains and are drawn from the
drafter's distribution q. Accept draft x with probability min(1, p(x) / q(x)). On rejection, draw
from norm(relu(p - q)). After the last draft, draw from p. p and q are the distributions after the
request's temperature and masks. An n-gram's drafts are not drawn: its q has all its mass on the
draft.

Coins and draws of rejection are functions of (seed, absolute position), each kind in its own stream
of paceline.models.sampling. A position is decided in only one round, so a round that drafts it
again in vain may reuse its numbers. The tokens of a seed then depend on the drafts; their
distribution does not. The decision to keep a draft must not depend on its token, or the output is
not p. So all pruning precedes the draw.
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


def arrange(last: Tensor, drafts: Drafts, *, whole: bool = False) -> Nodes:
    """Puts the last tokens, int64 [B, 1], above their drafts, with the cheaper layout for the
    forward.

    whole: also forward absent nodes.
    """
    tokens = torch.cat((last, drafts.tokens), dim=1)
    kept = None
    present = tokens >= 0
    if not whole and int(present.sum()) < DENSE * tokens.numel():
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


class ChainSampler:
    """The DraftSampler (speculators/base.py) of some rows of a round."""

    def __init__(self, params: sampling.DrawParams, lengths: Tensor) -> None:
        self._params = params
        self._lengths = lengths
        self.probs: list[Tensor] = []
        """float64 [B, V] per level: q of its drafts."""

    def __call__(self, logits: Tensor, level: int) -> Tensor:
        """Draws int64 [B] from q at the level; the most likely tokens at temperature 0."""
        params = self._params
        scores = _scores(logits, params)
        at, stream = self._lengths + level, sampling.NoiseStream.DRAFT
        noise = sampling.gumbel_noise(params.seeds, at, logits.shape[-1], stream)
        noise.masked_fill_((params.temperatures <= 0)[:, None], 0.0)
        self.probs.append(_probabilities(scores, params))
        return noise.add_(scores).argmax(dim=-1)


def verify_drawn(
    logits: Tensor,
    nodes: Nodes,
    positions: Tensor,
    params: sampling.DrawParams,
    probs: Tensor,
    adjusted: Tensor | None = None,
) -> Verdict:
    """As `verify`, but by rejection; all nodes are forwarded and form a chain.

    logits, adjusted [B Q, V]; positions int64 [B, Q]; params: B Q rows; probs float64 [B, Q, V]: q
    of each node's child, zero without a child. At temperature 0 this is the rule of `verify`:
    follow the argmax. Gaps are infinite: a seed's tokens may depend on the drafts, so near-ties
    explain no difference.
    """
    shape = (*nodes.tokens.shape, logits.shape[-1])
    wanted = logits if adjusted is None else adjusted
    target = _probabilities(_scores(wanted, params), params).view(shape)
    drafts = nodes.tokens[:, 1:]
    child = drafts.clamp(min=0)[:, :, None]
    seeds = params.seeds.view(nodes.tokens.shape)
    places = seeds[:, :-1].flatten(), positions[:, :-1].flatten(), child.flatten()
    coins = sampling.uniform_of(*places, sampling.NoiseStream.COIN).view(drafts.shape)
    chance, share = (part[:, :-1].gather(2, child)[:, :, 0] for part in (target, probs))
    follow = (drafts >= 0) & (coins * share < chance)
    accepted = follow.long().cumprod(dim=1).sum(dim=1)

    rows = torch.arange(len(accepted), device=logits.device)
    p, q = target[rows, accepted], probs[rows, accepted]
    rejected = torch.nn.functional.pad(drafts, (0, 1), value=-1)[rows, accepted] >= 0
    p = torch.where(rejected[:, None], residual(p, q), p)
    noise = sampling.gumbel_noise(seeds[:, 0], positions[rows, accepted], shape[-1])
    last = noise.add_(p.log()).argmax(dim=-1)
    steps = torch.arange(nodes.width, device=logits.device)
    tokens = nodes.tokens.roll(-1, dims=1).masked_fill(steps > accepted[:, None], -1)
    tokens = tokens.scatter(1, accepted[:, None], last[:, None])
    logprobs = sampling.behavior_logprobs(logits, params.temperatures).view(shape)
    drawn = logprobs.gather(2, tokens.clamp(min=0)[:, :, None])[:, :, 0]
    gaps = torch.full(tokens.shape, torch.inf, dtype=torch.float64, device=logits.device)
    return Verdict(tokens, accepted, drawn.masked_fill(tokens < 0, 0.0), gaps, None)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(relu(p - q)) [B, V]. If nothing is left, the result is p: only rounding causes this, as
    p = q is never rejected.
    """
    rest = (p - q).clamp_(min=0.0)
    mass = rest.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def _scores(logits: Tensor, params: sampling.DrawParams) -> Tensor:
    """Log-probs [N, V] in float64, masked as in `draw`."""
    scores = sampling.behavior_logprobs(logits, params.temperatures).double()
    return sampling.mask_scores(scores, params)


def _probabilities(scores: Tensor, params: sampling.DrawParams) -> Tensor:
    """Probabilities float64 [N, V] of masked scores; all on the argmax at temperature 0."""
    probs = scores.softmax(dim=-1)
    if not params.any_greedy:
        return probs
    certain = torch.zeros_like(probs).scatter_(1, scores.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where((params.temperatures <= 0)[:, None], certain, probs)
