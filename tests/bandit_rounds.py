"""Situations and outcomes for tests of bandits: batches whose rows differ in nothing but their
request.
"""

from __future__ import annotations

from paceline.services.rollout_gateway.bandits.base import RoundOutcome, RowFacts, Situation


def batch_of(
    size: int, *, generated: int = 0, limit: int = 1000, draining: bool = False, first: int = 0
) -> Situation:
    """A batch of requests first, first + 1, ..."""
    rows = [RowFacts(first + row, generated, limit) for row in range(size)]
    return Situation(rows, generated + 10, draining)


def round_of(
    arm: str, batch: int, tokens: int, seconds: float, *, explored: bool = False
) -> RoundOutcome:
    """A round whose tokens are spread over the rows as evenly as they can be."""
    share, rest = divmod(tokens, batch)
    return RoundOutcome(
        arm, batch_of(batch), [share + (row < rest) for row in range(batch)], seconds, explored
    )
