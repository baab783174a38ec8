"""Declares what an algorithm gets and gives.

Shape letters: B trajectories of a batch, N trained tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Trained tokens of one micro-batch, flat."""

    policy_logprobs: Float[Tensor, " N"]  # under the weights being trained, with gradient
    proximal_logprobs: Float[Tensor, " N"]  # under the weights at the start of the step
    # under the weights that drew the token, as the engine reported them
    behavior_logprobs: Float[Tensor, " N"]
    advantages: Float[Tensor, " N"]  # of the token's trajectory


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Sums over the tokens of a micro-batch; the caller divides by the tokens of the global
    batch.
    """

    loss_sum: Float[Tensor, ""]
    clipped: Float[Tensor, ""]  # tokens whose ratio was clipped


class Algorithm(Protocol):
    """What a policy-gradient variant decides: the advantages of a batch and the loss of its
    tokens.
    """

    def advantages(
        self, rewards: Float[Tensor, " B"], groups: Int[Tensor, " B"], weights: Float[Tensor, " B"]
    ) -> Float[Tensor, " B"]:
        """Advantage of each trajectory; exactly 0 where it carries no gradient.

        `weights`: its part of its session.
        """
        ...

    def loss(self, tokens: TokenBatch) -> TokenLoss:
        """Summed loss of the tokens."""
        ...
