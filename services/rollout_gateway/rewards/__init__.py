"""Declares the interface of reward rules."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.services.rollout_gateway.environments import Episode


class Unscored(Exception):
    """A rule raises this instead of returning None when log and metrics should show the reason.

    `reason` is a metric label, so use few distinct values.
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class RuleScore:
    """A reward and its parts."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """Score of each rule of a mixture, before its weight; empty for a single rule."""


class RewardRule:
    """Scores an episode: a pure function of it, or a call of a service that is."""

    async def prepare(self) -> None:
        """Check the rule's requirements before a run.

        Raises ConfigError for a setting that can never work, Unavailable, DeadlineExceeded.
        """

    async def score(self, episode: Episode) -> float | RuleScore | None:
        """One scalar, or None when the rule cannot score: the sample ends unscored, which differs
        from reward 0.

        Raises PacelineError when a service of the rule is unavailable; the sample then ends as
        failed (infra). May raise Unscored, which RewardRules logs, counts and turns into None.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Close the rule's resources."""
