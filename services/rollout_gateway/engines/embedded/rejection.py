"""Speculative sampling: drafts drawn from the drafter's distribution q, and the acceptance rule.

Chain (Leviathan et al. 2023, arXiv 2211.17192): accept draft x with probability min(1, p(x) /
q(x)). On rejection, draw from norm(relu(p - q)). After the last draft, draw from p. Siblings are
drawn without replacement and tried in the order drawn. This is recursive rejection sampling
(SpecInfer, Miao et al. 2024, arXiv 2305.09781). After each rejection, p becomes norm(relu(p - q)),
and q loses that sibling and is renormalised. p and q are the distributions after the request's
temperature and masks.

Coins and draws are functions of (seed, absolute position), each kind in its own stream of
paceline.models.sampling. A position is decided in only one round, so a round that drafts it again
in vain may reuse its numbers. Unlike in verify.py, the tokens of a seed depend on the drafts; their
distribution does not.

The decision to keep a draft must not depend on its token, or the output is not p. So all pruning
precedes the draw.

Drafts of an n-gram are not drawn: its q has all its mass on the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import InvalidInput
from paceline.models.sampling import (
    DrawParams,
    NoiseStream,
    behavior_logprobs,
    gumbel_noise,
    mask_scores,
    uniform_of,
)
from paceline.services.rollout_gateway.engines.embedded.verify import Nodes, Verdict
from paceline.speculators.base import Drafts


@dataclass(frozen=True, slots=True)
class SampledDrafts:
    """Children of N nodes, C each."""

    tokens: Tensor
    """int64 [N, C] in the order drawn; -1 if the masks leave fewer than C tokens."""
    probs: Tensor
    """float64 [N, V]: q, the distribution of the first child."""


def sample_drafts(
    draft_logits: Tensor, positions: Tensor, params: DrawParams, count: int
) -> SampledDrafts:
    """Children drawn from q without replacement: the top `count` of log q + Gumbel noise, in that
    order.

    That order is the same as in single draws (Gumbel-top-k: Kool et al. 2019, arXiv 1903.06059). At
    temperature 0, the most likely tokens are taken. Prune before this call, by `count` or by
    omitting the call: dropping a draft later biases the output. draft_logits [N, V]; positions
    int64 [N] of the children; params: N rows. Raises InvalidInput if count is not 1 .. V.
    """
    vocab = draft_logits.shape[-1]
    if not 1 <= count <= vocab:
        raise InvalidInput("count of drafts is out of range", seen=count, allowed=f"1 to {vocab}")
    scores = _scores(behavior_logprobs(draft_logits, params.temperatures), params)
    noise = gumbel_noise(params.seeds, positions, vocab, NoiseStream.DRAFT)
    top = (
        noise.masked_fill_((params.temperatures <= 0)[:, None], 0.0)
        .add_(scores)
        .topk(count, dim=-1)
    )
    return SampledDrafts(
        top.indices.masked_fill(top.values.isneginf(), -1), _normalised(scores, params)
    )


@dataclass(frozen=True, slots=True)
class SampledVerdict:
    """Outcome of one round of sampled drafts; row b emits the first accepted[b] + 1 of Q columns.

    It has no gaps: a near-tie marks a possible difference between tokens of one seed, and this rule
    always allows such a difference.
    """

    tokens: Tensor
    """int64 [B, Q]: accepted drafts, then the draw that ends the round, then -1."""
    accepted: Tensor
    """int64 [B]: drafts accepted, 0 .. Q - 1."""
    path: Tensor
    """int64 [B, Q]: node with the logits of each token, the root first; the root is repeated after
    the last token.
    """
    logprobs: Tensor
    """float32 [B, Q]: log_softmax(logits / temperature) of the tokens, 0 after the last token."""


def verify_sampled(
    logits: Tensor,
    draft_tokens: Tensor,
    parents: Tensor | None,
    draft_probs: Tensor,
    positions: Tensor,
    params: DrawParams,
    adjusted: Tensor | None = None,
) -> SampledVerdict:
    """Walk from the root, accepting or rejecting children, and draw the token that ends the round.

    logits [B, Q, V]: the target's logits at each node. draft_tokens int64 [B, Q]. parents int64 [B,
    Q]: the root's parent is the root, and siblings are in the order drawn; None: a chain.
    draft_probs float64 [B, Q, V]: q of each node's children, zero without a draw. positions int64
    [B, Q]: absolute position of the token drawn at each node, which is the position of its
    children. params: B Q rows. adjusted [B, Q, V]: logits for p instead, see `draw`. At temperature
    0 this is the rule of verify.py: follow the argmax.
    """
    batch, nodes, vocab = logits.shape
    logprobs = behavior_logprobs(logits.reshape(-1, vocab), params.temperatures)
    wanted = (
        logprobs
        if adjusted is None
        else behavior_logprobs(adjusted.reshape(-1, vocab), params.temperatures)
    )
    target = _normalised(_scores(wanted, params), params).view(batch, nodes, vocab)
    if parents is None:
        parents = torch.arange(-1, nodes - 1, device=logits.device).clamp(min=0).expand(batch, -1)
    at = positions.gather(1, parents).view(-1)
    coins = uniform_of(params.seeds, at, draft_tokens.clamp(min=0).view(-1), NoiseStream.COIN).view(
        batch, nodes
    )
    p, accepted, path = _walk(target, draft_tokens, parents, draft_probs, coins)
    here = path.gather(1, accepted[:, None])
    seeds = params.seeds.view(batch, nodes)[:, 0]
    noise = gumbel_noise(seeds, positions.gather(1, here)[:, 0], vocab)
    last = noise.add_(p.log()).argmax(dim=-1)
    return _verdict(last, accepted, path, draft_tokens, logprobs.view(batch, nodes, vocab))


def _walk(
    target: Tensor, draft_tokens: Tensor, parents: Tensor, draft_probs: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Remaining p at the last node of each row [B, V], accepted drafts [B], path [B, Q].

    target, draft_probs [B, Q, V]; all other inputs [B, Q]; coins in (0, 1).
    """
    batch, nodes = draft_tokens.shape
    rows = torch.arange(batch, device=target.device)
    accepted = torch.zeros(batch, dtype=torch.int64, device=target.device)
    path = torch.zeros(batch, nodes + 1, dtype=torch.int64, device=target.device)
    here = path[:, 0]
    p, q = target[:, 0], draft_probs[:, 0]
    # Parents precede their children, so one pass over the nodes meets every child of a row's
    # current node.
    for node in range(1, nodes):
        draft = draft_tokens[:, node].clamp(min=0)
        tried = (parents[:, node] == here) & (draft_tokens[:, node] >= 0)
        follow = tried & (coins[:, node] * q[rows, draft] < p[rows, draft])
        left, followed = (tried & ~follow)[:, None], follow[:, None]
        p, q = torch.where(left, residual(p, q), p), torch.where(left, without(q, draft), q)
        p = torch.where(followed, target[:, node], p)
        q = torch.where(followed, draft_probs[:, node], q)
        here = torch.where(follow, node, here)
        accepted = accepted + follow
        # the last column receives nodes that are not followed
        path[rows, torch.where(follow, accepted, nodes)] = node

    return p, accepted, path[:, :nodes]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(relu(p - q)) [B, V]. If nothing is left, the result is p: only rounding causes this, as
    p = q is never rejected.
    """
    rest = (p - q).clamp_(min=0.0)
    mass = rest.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def without(q: Tensor, tokens: Tensor) -> Tensor:
    """q [B, V] without one token per row (int64 [B]), renormalised; zero if nothing is left."""
    rest = q.scatter(1, tokens[:, None], 0.0)
    mass = rest.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, 0.0)


def _scores(logprobs: Tensor, params: DrawParams) -> Tensor:
    """Log-probs [N, V] in float64, masked as in `draw`."""
    scores = logprobs.double()
    return mask_scores(scores, params) if params.any_masked else scores


def _normalised(scores: Tensor, params: DrawParams) -> Tensor:
    """Probabilities float64 [N, V] of masked scores; all on the argmax at temperature 0."""
    probs = scores.softmax(dim=-1)
    if not params.any_greedy:
        return probs
    certain = torch.zeros_like(probs).scatter_(1, scores.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where((params.temperatures <= 0)[:, None], certain, probs)


def _verdict(
    last: Tensor, accepted: Tensor, path: Tensor, draft_tokens: Tensor, logprobs: Tensor
) -> SampledVerdict:
    """last int64 [B]: the draw that ends the round; path int64 [B, Q]; logprobs [B, Q, V] of all
    nodes.
    """
    steps = torch.arange(path.shape[1], device=path.device)
    tokens = draft_tokens.gather(1, path.roll(-1, dims=1))
    tokens = tokens.masked_fill(steps > accepted[:, None], -1).scatter(
        1, accepted[:, None], last[:, None]
    )
    said = logprobs[torch.arange(len(path), device=path.device)[:, None], path, tokens.clamp(min=0)]
    return SampledVerdict(tokens, accepted, path, said.masked_fill(tokens < 0, 0.0))


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
