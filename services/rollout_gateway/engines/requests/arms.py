"""Checks the arms that requests force, and describes a batch to the bandit."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.bandits.base import Situation
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence


def check_arm(name: str, arms: Collection[str]) -> None:
    """Raises InvalidInput for an arm outside `arms`; the empty name is accepted."""
    if name and name not in arms:
        raise InvalidInput("unknown arm", seen=name, allowed=", ".join(arms))


def situation_of(rows: Sequence[RunningSequence | None]) -> Situation:
    """The batch in the bandit's form. None represents a warm-up request of SGLang's own."""
    context = max((one.length for one in rows if one is not None), default=1)
    return Situation(len(rows), context)
