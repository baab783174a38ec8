"""The clipped surrogate, the algorithms that compare rewards within their group, and the algorithms
with one advantage per token: PPO with a critic, and REINFORCE++.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.services.policy_trainer import algorithm_settings
from paceline.services.policy_trainer.algorithms import advantages, base
from paceline.services.policy_trainer.algorithms.advantages import group_relative, leave_one_out
from paceline.services.policy_trainer.algorithms.losses import (
    bounded_ratio,
    clipped_surrogate,
    sequence_means,
)


@dataclass(frozen=True, slots=True)
class Clipped:
    """L_t = -min(u_t A_t, clip(u_t) A_t), u_t = exp(policy - proximal); see clipped_surrogate."""

    settings: algorithm_settings.AlgorithmConfig

    def needs(self) -> base.Needs:
        """Requirements of the settings: several updates need log-probs at the step's start. A
        divergence needs the reference; subtracted from the reward, it needs both.
        """
        settings = self.settings
        several = settings.mini_batches * settings.passes > 1
        kl = settings.kl.coefficient > 0
        return base.Needs(proximal=several or (kl and settings.kl.place == "reward"), reference=kl)

    def loss(self, tokens: base.TokenBatch) -> base.TokenLoss:
        """Loss of each token, with the token's own ratio."""
        ratio = bounded_ratio(tokens.policy_logprobs - tokens.proximal_logprobs)
        return self.surrogate(ratio, tokens)

    def surrogate(self, ratio: Tensor, tokens: base.TokenBatch) -> base.TokenLoss:
        """Loss of each token with the given ratio [M]."""
        losses, clipped = clipped_surrogate(
            ratio,
            tokens.advantages,
            clip_low=self.settings.clip_low,
            clip_high=self.settings.clip_high,
            dual_clip=self.settings.dual_clip,
        )
        return base.TokenLoss(losses, clipped, {"ratio": ratio.detach()})


@dataclass(frozen=True, slots=True)
class Grpo(Clipped):
    """A = (r - mean) / (std + eps) within the group, equal for all tokens of a trajectory (arXiv
    2402.03300). Dr. GRPO has A = r - mean (arXiv 2503.20783), and its settings divide the summed
    losses by a constant instead of a length. Decoupled PPO has its correction and clip in its
    settings.

    In the group's statistics a session counts once, for any number of branches. In the loss every
    generated token counts once: a token shared by several branches is masked in all branches but
    one.
    """

    settings: algorithm_settings.GroupedConfig | algorithm_settings.DrGrpoConfig

    def advantages(self, batch: base.SessionBatch) -> Float[Tensor, " T"]:
        """Advantages; 0 for groups without variance."""
        std = self.settings.normalize_std
        made = group_relative(batch.scores, batch.groups, batch.weights, normalize_std=std)
        return made[batch.owners]


@dataclass(frozen=True, slots=True)
class Dapo(Clipped):
    """Clip-higher and token mean. From the reward of a trajectory of n generated tokens it
    subtracts (arXiv 2503.14476, eq. 13)

        penalty * clip((n - (limit - buffer)) / buffer, 0, 1)
    """

    settings: algorithm_settings.DapoConfig

    def advantages(self, batch: base.SessionBatch) -> Float[Tensor, " T"]:
        """Advantages; 0 for groups without variance."""
        shaped = replace(batch, rewards=batch.rewards - self.overlong(batch))
        return group_relative(shaped.scores, batch.groups, batch.weights)[batch.owners]

    def overlong(self, batch: base.SessionBatch) -> Float[Tensor, " B"]:
        """Penalty subtracted from each reward."""
        limit, buffer = self.settings.overlong_tokens, self.settings.overlong_buffer
        if not limit:
            return torch.zeros_like(batch.rewards)
        tokens = torch.bincount(batch.owners, minlength=len(batch.rewards))
        over = (tokens - (limit - buffer)) / max(buffer, 1)
        return over.clamp(0, 1).to(batch.rewards.dtype)


@dataclass(frozen=True, slots=True)
class Gspo(Grpo):
    """Clips s_i = exp(mean over the tokens of sequence i of (policy - proximal)) instead of token
    ratios (arXiv 2507.18071, eq. 7). The gradient is each token's log-prob gradient over the
    length.
    """

    def loss(self, tokens: base.TokenBatch) -> base.TokenLoss:
        """Loss of each token, with the ratio of its sequence."""
        gaps = tokens.policy_logprobs - tokens.proximal_logprobs
        return self.surrogate(bounded_ratio(sequence_means(gaps, tokens.sequences)), tokens)


@dataclass(frozen=True, slots=True)
class Cispo(Grpo):
    """L_t = -sg(clip(u_t, 1 - clip_low, 1 + clip_high)) A_t log policy_t (MiniMax-M1, arXiv
    2506.13585, eq. 4). A token beyond the bounds keeps a gradient.
    """

    def loss(self, tokens: base.TokenBatch) -> base.TokenLoss:
        """Loss of each token."""
        ratio = bounded_ratio(tokens.policy_logprobs - tokens.proximal_logprobs).detach()
        weight = ratio.clamp(1.0 - self.settings.clip_low, 1.0 + self.settings.clip_high)
        losses = -weight * tokens.advantages * tokens.policy_logprobs
        return base.TokenLoss(losses, weight != ratio, {"ratio": ratio})


@dataclass(frozen=True, slots=True)
class Rloo(Clipped):
    """A_i = r_i - mean(r of the siblings) (arXiv 2402.14740, eq. 7), equal for all tokens of a
    trajectory.
    """

    def advantages(self, batch: base.SessionBatch) -> Float[Tensor, " T"]:
        """Advantages; 0 for groups without variance."""
        return leave_one_out(batch.scores, batch.groups, batch.weights)[batch.owners]


@dataclass(frozen=True, slots=True)
class Ppo(Clipped):
    """Generalised advantages (arXiv 1506.02438), normalised over the batch, and the clipped
    surrogate (arXiv 1707.06347). A trajectory's reward is at its last token.
    """

    settings: algorithm_settings.PpoConfig

    def needs(self) -> base.Needs:
        """Adds the critic's values."""
        return replace(super(Ppo, self).needs(), values=True)

    def advantages(self, batch: base.SessionBatch) -> Float[Tensor, " T"]:
        """Advantage of each token."""
        return advantages.normalized(self.estimates(batch))

    def estimates(self, batch: base.SessionBatch) -> Float[Tensor, " T"]:
        """Advantages before normalisation. Advantage plus value of a token is the return that the
        critic learns.
        """
        return advantages.generalized_advantages(
            advantages.at_last_tokens(batch.rewards, batch.owners) - batch.penalties,
            batch.values,
            batch.owners,
            gamma=self.settings.gamma,
            gae_lambda=self.settings.gae_lambda,
        )


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus(Clipped):
    """A_t = r - sum of the penalties from t on, normalised over all tokens of the batch (arXiv
    2501.03262, eq. 5). With the baseline, r is first compared within its group (section 3.3).
    """

    settings: algorithm_settings.ReinforceConfig

    def advantages(self, batch: base.SessionBatch) -> Float[Tensor, " T"]:
        """Advantages; 0 if all tokens of the batch would have the same."""
        rewards = batch.rewards
        if self.settings.name == "reinforce_plus_plus_baseline":
            rewards = advantages.group_relative(
                rewards, batch.groups, batch.weights, normalize_std=False
            )
        earned = advantages.at_last_tokens(rewards, batch.owners) - batch.penalties
        return advantages.normalized(advantages.returns_to_go(earned, batch.owners))
