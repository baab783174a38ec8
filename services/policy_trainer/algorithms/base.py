"""The input and output of an algorithm.

Shape letters: B trajectories of a batch, T trained tokens of a batch, M trained tokens of a
micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Needs:
    """Values that must be computed before an algorithm's first update of a step."""

    proximal: bool = False  # log-probs at the step's start; one update has them anyway
    reference: bool = False  # log-probs of the start policy
    values: bool = False  # of a critic, trained beside the policy; see ValueAlgorithm


@dataclass(frozen=True, slots=True)
class SessionBatch:
    """Whole sessions, with one trajectory for each branch."""

    rewards: Float[Tensor, " B"]
    groups: Int[Tensor, " B"]  # counted from 0
    weights: Float[Tensor, " B"]  # one over the number of branches of the session
    owners: Int[Tensor, " T"]  # trajectory of each trained token, ascending
    penalties: Float[Tensor, " T"]  # subtracted from a token's reward: the divergence, else 0
    values: Float[Tensor, " T"]  # of the critic before the token is drawn, else 0

    @property
    def scores(self) -> Float[Tensor, " B"]:
        """Each trajectory's reward minus the penalties of its tokens."""
        return self.rewards - torch.zeros_like(self.rewards).index_add_(
            0, self.owners, self.penalties
        )


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Trained tokens of one micro-batch, flat; each sequence is contiguous."""

    # Log-probs of the tokens under the weights
    policy_logprobs: Float[Tensor, " M"]  # that are being trained, with gradient
    proximal_logprobs: Float[Tensor, " M"]  # at the start of the step
    behavior_logprobs: Float[Tensor, " M"]  # that drew them, as the engine reported
    reference_logprobs: Float[Tensor, " M"]  # of the start policy; 0 if not needed
    advantages: Float[Tensor, " M"]
    values: Float[Tensor, " M"]  # of the critic at the start of the step; 0 without a critic
    sequences: Int[Tensor, " M"]  # number of the trajectory, from 0 within the micro-batch
    positions: Int[Tensor, " M"]  # of the token in its trajectory
    lags: Int[Tensor, " M"]  # policy versions from the drawing weights to the step's start


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Losses before weighting, and figures for the report."""

    losses: Float[Tensor, " M"]
    clipped: Bool[Tensor, " M"]  # tokens with a gradient removed or bounded by the clip
    metrics: Mapping[str, Float[Tensor, " M"]] = field(default_factory=dict)  # reported as means


class Algorithm(Protocol):
    """A policy-gradient variant, as pure functions. Weighting and summation of losses are in
    losses.py.
    """

    def needs(self) -> Needs:
        """Values that must be computed before the first update."""
        ...

    def advantages(self, batch: SessionBatch) -> Float[Tensor, " T"]:
        """Advantage of each trained token; exactly 0 for a token without gradient."""
        ...

    def loss(self, tokens: TokenBatch) -> TokenLoss:
        """Loss of each token."""
        ...


class ValueAlgorithm(Algorithm, Protocol):
    """An algorithm with advantages from a critic's values."""

    def estimates(self, batch: SessionBatch) -> Float[Tensor, " T"]:
        """Advantages before normalisation. Advantage plus value of a token is the return that the
        critic learns.
        """
        ...
