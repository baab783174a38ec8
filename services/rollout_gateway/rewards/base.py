"""Declares what a reward rule sees and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from paceline.services.rollout_gateway.environments.base import Episode


class Unscored(Exception):
    """There is no telling, and why: a rule raises this instead of None where log and metrics should
    know.

    `reason` is a label of the metrics, so one of few.
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class RuleScore:
    """A reward and what it is made of."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """What each rule of a mixture gave, before its weight; empty for a single rule."""


class RewardRule(Protocol):
    """Scores an episode; a pure function of it, or a call of something that is."""

    async def score(self, episode: Episode) -> float | None:
        """One scalar; None when there is no telling: the sample ends unscored, which is not reward
        0.

        Raises PacelineError when what scores is away; the sample then ends as failed (infra). May
        raise Unscored, which RewardRules logs, counts and turns into None.
        """
        ...


@runtime_checkable
class Prepares(Protocol):
    """A rule that can say beforehand whether it will work."""

    async def prepare(self) -> None:
        """Load what it needs.

        Raises ConfigError for what can never work, Unavailable, DeadlineExceeded.
        """
        ...


@runtime_checkable
class Closes(Protocol):
    """A rule that has something to end."""

    async def close(self) -> None:
        """End it."""
        ...
