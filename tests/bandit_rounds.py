"""Builds situations and outcomes for tests of bandits."""

from __future__ import annotations

from paceline.services.rollout_gateway.bandits.base import RoundOutcome, Situation


def batch_of(size: int) -> Situation:
    """A batch of `size` requests of 10 tokens."""
    return Situation(size, 10)


def round_of(
    arm: str, batch: int, tokens: int, seconds: float, *, explored: bool = False
) -> RoundOutcome:
    """A round with its tokens spread over the rows as evenly as possible."""
    share, rest = divmod(tokens, batch)
    return RoundOutcome(
        arm, batch_of(batch), [share + (row < rest) for row in range(batch)], seconds, explored
    )
