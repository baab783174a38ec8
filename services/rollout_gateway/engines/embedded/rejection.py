"""Speculative sampling: drafts drawn from the drafter's distribution q, and the acceptance rule.

The rule (Leviathan et al. 2023, arXiv 2211.17192): accept draft x with probability min(1, p(x) /
q(x)). On rejection, draw from norm(relu(p - q)). After the last draft, draw from p. Drafts form
chains. p and q are the distributions after the request's temperature and masks.

Coins and draws are functions of (seed, absolute position), each kind in its own stream of
paceline.models.sampling. A position is decided in only one round, so a round that drafts it again
in vain may reuse its numbers. Unlike in verify.py, the tokens of a seed depend on the drafts; their
distribution does not.

The decision to keep a draft must not depend on its token, or the output is not p. So all pruning
precedes the draw.

Drafts of an n-gram are not drawn: its q has all its mass on the draft.
"""

import torch
from torch import Tensor

from paceline.models.sampling import (
    DrawParams,
    NoiseStream,
    behavior_logprobs,
    gumbel_noise,
    mask_scores,
    uniform_of,
)
from paceline.services.rollout_gateway.engines.embedded.verify import Nodes, Verdict


class ChainSampler:
    """The DraftSampler (speculators/base.py) of some rows of a round."""

    def __init__(self, params: DrawParams, lengths: Tensor) -> None:
        self._params = params
        self._lengths = lengths
        self.probs: list[Tensor] = []
        """float64 [B, V] per level: q of its drafts."""

    def __call__(self, logits: Tensor, level: int) -> Tensor:
        """Draws int64 [B] from q at the level; the most likely tokens at temperature 0."""
        params = self._params
        scores = _scores(logits, params)
        noise = gumbel_noise(
            params.seeds, self._lengths + level, logits.shape[-1], NoiseStream.DRAFT
        )
        noise.masked_fill_((params.temperatures <= 0)[:, None], 0.0)
        self.probs.append(_probabilities(scores, params))
        return noise.add_(scores).argmax(dim=-1)


def verify_drawn(
    logits: Tensor,
    nodes: Nodes,
    positions: Tensor,
    params: DrawParams,
    probs: Tensor,
    adjusted: Tensor | None = None,
) -> Verdict:
    """As `verify`, but by rejection; all nodes are forwarded and form a chain.

    logits, adjusted [B Q, V]; positions int64 [B, Q]; params: B Q rows; probs float64 [B, Q, V]: q
    of each node's child, zero without a child. At temperature 0 this is the rule of verify.py:
    follow the argmax. Gaps are infinite: a seed's tokens may depend on the drafts, so near-ties
    explain no difference.
    """
    shape = (*nodes.tokens.shape, logits.shape[-1])
    wanted = logits if adjusted is None else adjusted
    target = _probabilities(_scores(wanted, params), params).view(shape)
    drafts = nodes.tokens[:, 1:]
    child = drafts.clamp(min=0)[:, :, None]
    seeds = params.seeds.view(nodes.tokens.shape)
    coins = uniform_of(
        seeds[:, :-1].flatten(), positions[:, :-1].flatten(), child.flatten(), NoiseStream.COIN
    ).view(drafts.shape)
    chance, share = (part[:, :-1].gather(2, child)[:, :, 0] for part in (target, probs))
    follow = (drafts >= 0) & (coins * share < chance)
    accepted = follow.long().cumprod(dim=1).sum(dim=1)

    rows = torch.arange(len(accepted), device=logits.device)
    p, q = target[rows, accepted], probs[rows, accepted]
    rejected = torch.nn.functional.pad(drafts, (0, 1), value=-1)[rows, accepted] >= 0
    p = torch.where(rejected[:, None], residual(p, q), p)
    noise = gumbel_noise(seeds[:, 0], positions[rows, accepted], shape[-1])
    last = noise.add_(p.log()).argmax(dim=-1)
    steps = torch.arange(nodes.width, device=logits.device)
    tokens = nodes.tokens.roll(-1, dims=1).masked_fill(steps > accepted[:, None], -1)
    tokens = tokens.scatter(1, accepted[:, None], last[:, None])
    logprobs = behavior_logprobs(logits, params.temperatures).view(shape)
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


def _scores(logits: Tensor, params: DrawParams) -> Tensor:
    """Log-probs [N, V] in float64, masked as in `draw`."""
    scores = behavior_logprobs(logits, params.temperatures).double()
    return mask_scores(scores, params) if params.any_masked else scores


def _probabilities(scores: Tensor, params: DrawParams) -> Tensor:
    """Probabilities float64 [N, V] of masked scores; all on the argmax at temperature 0."""
    probs = scores.softmax(dim=-1)
    if not params.any_greedy:
        return probs
    certain = torch.zeros_like(probs).scatter_(1, scores.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where((params.temperatures <= 0)[:, None], certain, probs)
