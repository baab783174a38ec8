"""Checks the arms that are asked for, and describes a batch to the bandit."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.bandits.base import RowFacts, Situation
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence


def check_arm(name: str, arms: Collection[str]) -> None:
    """Raises InvalidInput for an arm that is not among those; empty is fine."""
    if name and name not in arms:
        raise InvalidInput("unknown arm", seen=name, allowed=", ".join(arms))


def situation_of(rows: Sequence[RunningSequence | None], *, draining: bool) -> Situation:
    """What the bandit is told of a batch.

    A request that is not ours (SGLang's own warm-up) has no facts: id -1. draining: nothing waits
    for a slot or for its prefill.
    """
    facts = [
        RowFacts(one.request.request_id, len(one.tokens), one.token_limit)
        if one is not None
        else RowFacts(-1, 0, 1)
        for one in rows
    ]
    context = max((one.length for one in rows if one is not None), default=1)
    return Situation(facts, context, draining)
