"""Bandits that choose the arm of each decode round, behind one protocol (base.py)."""

from collections.abc import Callable, Sequence

from paceline.plugins import find_variant
from paceline.services.rollout_gateway.bandits import kinds
from paceline.services.rollout_gateway.bandits.base import Bandit, BanditSettings
from paceline.services.rollout_gateway.bandits.watchdog import AcceptanceWatchdog

BANDITS: dict[str, Callable[[BanditSettings, Sequence[str], int], Bandit]] = {
    "epsilon_greedy": kinds.EpsilonGreedy,
    "ucb": kinds.UCB1,
    "beg": kinds.BucketedEpsilonGreedy,
}


def build_bandit(settings: BanditSettings, arms: Sequence[str], seed: int) -> Bandit:
    """Builds the bandit that the settings name, from the table or by import path.

    The watchdog wraps it unless `watchdog_rounds` is 0. Raises ConfigError.
    """
    bandit = find_variant(settings.kind, BANDITS, "bandit")(settings, arms, seed)
    return AcceptanceWatchdog(bandit, settings, arms) if settings.watchdog_rounds else bandit
