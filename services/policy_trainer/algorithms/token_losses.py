"""Computes the losses that the Tinker API names, as pure functions of each target's log-prob.

T is the number of targets. A loss of several sequences is the sum over their targets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from paceline.errors import InvalidInput
from paceline.services.policy_trainer.algorithms.losses import bounded_ratio, clipped_surrogate

Inputs = Mapping[str, Float[Tensor, " T"]]
Options = Mapping[str, float]
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of a ratio, with their defaults."""


def cross_entropy(
    policy_logprobs: Float[Tensor, " T"], inputs: Inputs, options: Options
) -> Float[Tensor, " T"]:
    """L_t = -w_t log p_t, with the weights w."""
    return -inputs["weights"] * policy_logprobs


def importance_sampling(
    policy_logprobs: Float[Tensor, " T"], inputs: Inputs, options: Options
) -> Float[Tensor, " T"]:
    """L_t = -u_t A_t, with u_t = p_t / q_t, the sampler's log q and the advantages A."""
    return -_ratio(policy_logprobs, inputs) * inputs["advantages"]


def ppo(
    policy_logprobs: Float[Tensor, " T"], inputs: Inputs, options: Options
) -> Float[Tensor, " T"]:
    """L_t = -min(u_t A_t, clip(u_t, low, high) A_t), PPO (arXiv 1707.06347, eq. 7)."""
    low, high = (options[name] for name in CLIPS)
    ratio = _ratio(policy_logprobs, inputs)
    losses, _ = clipped_surrogate(
        ratio, inputs["advantages"], clip_low=1.0 - low, clip_high=high - 1.0
    )
    return losses


def _ratio(policy_logprobs: Float[Tensor, " T"], inputs: Inputs) -> Float[Tensor, " T"]:
    return bounded_ratio(policy_logprobs - inputs["logprobs"])


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """A loss with its inputs of each target, and its options with their defaults."""

    function: Callable[[Float[Tensor, " T"], Inputs, Options], Float[Tensor, " T"]]
    inputs: tuple[str, ...]
    options: Options

    def chosen(self, given: Options) -> Options:
        """All options, the given values first. Raises InvalidInput for an unknown option."""
        if odd := sorted(given.keys() - self.options.keys()):
            allowed = ", ".join(self.options) or "none"
            raise InvalidInput("loss_fn_config has unknown keys", seen=odd, allowed=allowed)
        return {**self.options, **given}


_DRAWN = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": NamedLoss(cross_entropy, ("weights",), {}),
    "importance_sampling": NamedLoss(importance_sampling, _DRAWN, {}),
    "ppo": NamedLoss(ppo, _DRAWN, CLIPS),
}


def token_loss(name: str) -> NamedLoss:
    """The loss of that name. Raises InvalidInput for an unknown name."""
    if name not in LOSSES:
        raise InvalidInput("loss_fn is not served", seen=name, allowed=", ".join(LOSSES))
    return LOSSES[name]
