"""How an arm may stand to another, at best, in a batch-size group that has not tried it.

Tokens of a round do not depend on the size of the batch: what an arm's drafts were worth in one
group they are worth in the others, and of two chains of one drafter the longer one has the words
of the shorter. Seconds stand to each other as in the table measured at the engine's start,
whatever the machine's pace. Owns no rule of choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from paceline.arm_names import OFF, read_arm
from paceline.services.rollout_gateway.bandits.base import CostSample, Situation
from paceline.services.rollout_gateway.bandits.primed_costs import PrimedCosts


class Prospects:
    """Knows seconds; is told tokens, which a bandit remembers."""

    def __init__(self, arms: Sequence[str]) -> None:
        self._costs = PrimedCosts(arms)
        self._arms = {name: index for index, name in enumerate(arms)}
        self._shapes = {name: read_arm(name) for name in arms}

    def prime(self, costs: Sequence[CostSample]) -> None:
        """Seconds that rounds took at the engine's start."""
        self._costs.prime(costs)

    def rates(self, situation: Situation, lengths: Mapping[str, float]) -> dict[str, float] | None:
        """Tokens per second and row of every arm, at best and at the pace of the start; infinite
        where nothing is known of its tokens, None where nothing is known of seconds.

        lengths: mean tokens of a round per row, of the arms of which rounds are remembered.
        """
        seconds = self._costs.seconds(situation.batch_size, situation.context)
        if any(math.isnan(one) for one in seconds):
            return None
        return {
            name: self._most_tokens(name, lengths) / seconds[index]
            for name, index in self._arms.items()
        }

    def _most_tokens(self, name: str, lengths: Mapping[str, float]) -> float:
        """Of a round and row. A position is reached by those alone that the one before let through,
        so that the tokens of a chain grow with its length, and ever more slowly.
        """
        if name == OFF:
            return 1.0
        if name in lengths:
            return lengths[name]
        own, most = self._shapes[name], math.inf
        for other, length in lengths.items():
            kin = self._shapes[other]
            if not own or not kin or own.speculator != kin.speculator:
                continue
            if own.shape.topk == kin.shape.topk == 1:
                longer = max(own.shape.steps / kin.shape.steps, 1.0)
                most = min(most, 1.0 + (length - 1.0) * longer)
        return most
