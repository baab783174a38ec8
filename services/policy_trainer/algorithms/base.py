"""Declares what an algorithm gets and gives.

Shape letters: B trajectories of a batch, T trained tokens of it, M those of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Needs:
    """What an algorithm must have computed before its first update of a step."""

    proximal: bool = False  # log-probs at the start of the step; one update has them anyway
    reference: bool = False  # those of the policy that training began with
    values: bool = False  # of a critic, which is then trained beside the policy; see ValueAlgorithm


@dataclass(frozen=True, slots=True)
class SessionBatch:
    """Whole sessions, a trajectory for each of their branches."""

    rewards: Float[Tensor, " B"]
    groups: Int[Tensor, " B"]  # counted from 0
    weights: Float[Tensor, " B"]  # one over the branches of the session
    owners: Int[Tensor, " T"]  # trajectory of each trained token, ascending
    penalties: Float[Tensor, " T"]  # taken from a token's reward: of the divergence, else 0
    values: Float[Tensor, " T"]  # of the critic before the token is drawn, else 0

    @property
    def scores(self) -> Float[Tensor, " B"]:
        """What each trajectory earned: its reward less the penalties of its tokens."""
        return self.rewards - torch.zeros_like(self.rewards).index_add_(
            0, self.owners, self.penalties
        )


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Trained tokens of one micro-batch, flat; sequences lie in it whole."""

    # Log-probs of the tokens under the weights
    policy_logprobs: Float[Tensor, " M"]  # that are being trained, with gradient
    proximal_logprobs: Float[Tensor, " M"]  # at the start of the step
    behavior_logprobs: Float[Tensor, " M"]  # that drew them, as the engine reported them
    reference_logprobs: Float[Tensor, " M"]  # that training began with; 0 where nobody needs them
    advantages: Float[Tensor, " M"]
    values: Float[Tensor, " M"]  # of the critic at the start of the step; 0 without one
    sequences: Int[Tensor, " M"]  # number of the trajectory, from 0 within the micro-batch
    positions: Int[Tensor, " M"]  # of the token in its trajectory
    lags: Int[Tensor, " M"]  # policy versions between the weights that drew it and the step's start


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Losses before they are weighed, and what a report should know of them."""

    losses: Float[Tensor, " M"]
    clipped: Bool[Tensor, " M"]  # where a bound takes the gradient away, or bounds it
    metrics: Mapping[str, Float[Tensor, " M"]] = field(default_factory=dict)  # means are reported


class Algorithm(Protocol):
    """What a policy-gradient variant decides, as pure functions. How losses are weighed and added
    up is not its matter: see corrections.py and aggregation.py.
    """

    def needs(self) -> Needs:
        """What must be computed before the first update."""
        ...

    def advantages(self, batch: SessionBatch) -> Float[Tensor, " T"]:
        """Advantage of each trained token; exactly 0 where it carries no gradient."""
        ...

    def loss(self, tokens: TokenBatch) -> TokenLoss:
        """Loss of each token."""
        ...


class ValueAlgorithm(Algorithm, Protocol):
    """One whose advantages come of a critic's values."""

    def estimates(self, batch: SessionBatch) -> Float[Tensor, " T"]:
        """Advantages before they are normalised: with the value of its token each is the return
        that the critic learns.
        """
        ...
