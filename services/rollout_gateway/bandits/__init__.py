"""Choosers of the arm of a round, behind one protocol (base.py)."""

from collections.abc import Callable, Sequence

from paceline.errors import ConfigError
from rollout_gateway.bandits.base import Bandit, BanditSettings, Choice
from rollout_gateway.bandits.epsilon_greedy import EpsilonGreedy

BANDITS: dict[str, Callable[[BanditSettings, Sequence[str], int], Bandit]] = {
    "epsilon_greedy": EpsilonGreedy,
}


def build_bandit(settings: BanditSettings, arms: Sequence[str], seed: int) -> Bandit:
    """The bandit that settings name. Raises ConfigError."""
    if settings.kind not in BANDITS:
        raise ConfigError("unknown bandit", seen=settings.kind, allowed=sorted(BANDITS))
    return BANDITS[settings.kind](settings, arms, seed)


__all__ = ["BANDITS", "Bandit", "BanditSettings", "Choice", "build_bandit"]
