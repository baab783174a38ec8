"""Chooses the arm of each decode round, by bandits behind one protocol (base.py)."""

from collections.abc import Callable, Sequence

from paceline.plugins import find_variant
from paceline.services.rollout_gateway.bandits.base import Bandit, BanditSettings
from paceline.services.rollout_gateway.bandits.beg import BucketedEpsilonGreedy
from paceline.services.rollout_gateway.bandits.epsilon_greedy import EpsilonGreedy
from paceline.services.rollout_gateway.bandits.ucb import UCB1
from paceline.services.rollout_gateway.bandits.watchdog import AcceptanceWatchdog

BANDITS: dict[str, Callable[[BanditSettings, Sequence[str], int], Bandit]] = {
    "epsilon_greedy": EpsilonGreedy,
    "ucb": UCB1,
    "beg": BucketedEpsilonGreedy,
}


def build_bandit(settings: BanditSettings, arms: Sequence[str], seed: int) -> Bandit:
    """The bandit that settings name, in the table or by import path, under the watchdog unless it
    is switched off.

    Raises ConfigError.
    """
    bandit = find_variant(settings.kind, BANDITS, "bandit")(settings, arms, seed)
    return AcceptanceWatchdog(bandit, settings, arms) if settings.watchdog_rounds else bandit
