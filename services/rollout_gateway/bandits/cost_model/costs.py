"""How long a round of each arm takes: the table measured at start, corrected by rounds. Knows no
tokens.

    seconds(arm, batch, context) = table(arm, batch, context) x exp(factor(arm, batch-size group) +
    pace)

The pace is the machine's (pace.py); a factor holds what is the arm's own, and it alone is told to
other engines.

The table is that of primed_costs.py. An arm that was not measured has the table 1 + slope x batch,
whose slope is fitted to its rounds (pace.py) and whose level is a factor like the others. Factor
and pace together follow the log of measured over expected seconds by a clipped moving average, so
that a round that took ten times as long moves them by one clip's share; three in a row on one side
beyond the clip are no outliers, and they go there at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.arm_names import speculator_of
from paceline.services.rollout_gateway.bandits.base import CostSample
from paceline.services.rollout_gateway.bandits.cost_model.pace import (
    CLIP,
    BatchSlope,
    MachinePace,
    Measured,
)
from paceline.services.rollout_gateway.bandits.evidence import CostEvidence
from paceline.services.rollout_gateway.bandits.primed_costs import PrimedCosts

MOST_ROUNDS = 32.0  # a factor is the mean of about so many rounds
STALE_CLIP = 1.0  # the same when less than a round is known
SIZE_SHARE = 0.1  # of a new round in the mean batch size
JUMP_ROUNDS = 3  # beyond the clip on one side
PRIOR_ROUNDS = 1.0  # that an arm's other groups, and the speculator's other arms, are worth
PRIMED_ROUNDS = 2.0  # that the table is worth
FULL_ROUNDS = 8.0  # from here on an arm's other groups do not count
IDLE_SHARE = 0.1  # of the window: rounds in which what is known of an arm not used fades to 1 / e
DOUBT = 0.1  # standard deviation of log seconds that one round leaves
REFRESH_ROUNDS = 16  # after which estimates of arms that were not used are made anew


class Estimate(NamedTuple):
    """What is believed of one arm in one group."""

    factor: float  # log of its seconds over the table's, the pace apart; NaN: never seen
    scale: float  # the same, not as a logarithm
    doubt: float  # factor by which it may be faster than that


@dataclass(slots=True)
class Correction:
    """What rounds of one arm in one group say of the table."""

    factor: float = 0.0  # log of measured over table, the pace apart
    weight: float = 0.0  # rounds it rests on, discounted
    streak: int = 0  # rounds beyond the clip, signed by their side
    size: float = 0.0  # mean batch size of its rounds
    told_factor: float = 0.0  # by other engines
    told_weight: float = 0.0
    measured: Measured = field(default_factory=Measured)

    @property
    def rounds(self) -> float:
        """Weight of all engines together."""
        return self.weight + self.told_weight

    @property
    def total(self) -> float:
        """Factors summed by weight."""
        return self.weight * self.factor + self.told_weight * self.told_factor

    def take(self, off: float, *, replaces: bool) -> float:
        """A round whose log is `off` from what was expected; the part of it that is believed."""
        if replaces:
            part, self.weight, self.streak = 1.0, 0.0, 0
        else:
            clip = CLIP if self.weight >= 1.0 or off > 0 else STALE_CLIP
            part = max(1.0 / (self.weight + 1.0), 1.0 / MOST_ROUNDS) * clip / max(abs(off), clip)
        self.weight = min(self.weight + 1.0, MOST_ROUNDS)
        return part

    def count(self, off: float) -> int:
        """Rounds in a row beyond the clip on one side, this one included."""
        if abs(off) <= CLIP:
            self.streak = 0
        elif self.streak * off > 0:
            self.streak += 1 if off > 0 else -1
        else:
            self.streak = 1 if off > 0 else -1
        return abs(self.streak)


class CostTable:
    """Seconds of a round by arm, batch size and context."""

    def __init__(self, arms: Sequence[str], groups: Sequence[int], window: int) -> None:
        self._arms = {arm: index for index, arm in enumerate(arms)}
        self._groups = {smallest: index for index, smallest in enumerate(groups)}
        self._corrections = [[Correction() for _ in arms] for _ in groups]
        speculators = [speculator_of(arm) for arm in arms]
        self._kin = [
            [other for other, name in enumerate(speculators) if name == own and other != arm]
            for arm, own in enumerate(speculators)
            # arms of the same speculator: what slows one slows the others, as a share of their
            # tables
        ]
        self._keep = 1.0 - 1.0 / max(window * IDLE_SHARE, 2.0)
        self._primed = PrimedCosts(arms)
        self._estimates: list[list[Estimate] | None] = [None] * len(groups)
        self._shapes = [BatchSlope() for _ in arms]  # of arms that were not measured
        self._pace = MachinePace()

    def prime(self, samples: Sequence[CostSample]) -> None:
        """Take a table; of several samples of one place the median counts.

        Arms not served are left out.
        """
        self._primed.prime(samples)
        self._estimates = [None] * len(self._estimates)

    def seconds(self, group: int, batch: int, context: int) -> list[float]:
        """Expected seconds [A] of a round of each arm; NaN for one that was never seen."""
        table = [
            one if arm in self._primed else self._shapes[arm].at(batch)
            for arm, one in enumerate(self._primed.seconds(batch, context))
        ]
        pace = math.exp(self._pace.log)
        return [
            one * estimate.scale * pace
            for one, estimate in zip(table, self._estimate(group), strict=True)
        ]

    def doubts(self, group: int) -> list[float]:
        """By what factor, at least 1, each arm's rounds [A] may be faster than expected, for all
        that is known.
        """
        return [estimate.doubt for estimate in self._estimate(group)]

    def _estimate(self, group: int) -> list[Estimate]:
        known = self._estimates[group]
        if known is None:
            known = self._estimates[group] = [
                self._believe(group, arm) for arm in range(len(self._arms))
            ]
        return known

    def _believe(self, group: int, arm: int) -> Estimate:
        here, primed = self._corrections[group][arm], arm in self._primed
        rounds = here.rounds
        if rounds < FULL_ROUNDS:
            every = [row[arm] for row in self._corrections]
            if primed:
                every += [self._corrections[group][other] for other in self._kin[arm]]
            total = sum(one.rounds for one in every) + (PRIMED_ROUNDS if primed else 0.0)
            if not total:
                return Estimate(math.nan, math.nan, 1.0)
            prior = sum(one.total for one in every) / total
            factor = (here.total + PRIOR_ROUNDS * prior) / (rounds + PRIOR_ROUNDS)
        else:
            factor = here.total / rounds
        doubt = DOUBT / math.sqrt(rounds + (PRIMED_ROUNDS if primed else 0.0) + 0.25)
        return Estimate(factor, math.exp(factor), math.exp(doubt + self._pace.hope(here.measured)))

    def observe(self, group: int, arm: str, batch: int, context: int, seconds: float) -> None:
        """A round of an arm. One that took no time says nothing."""
        if seconds <= 0:
            return
        index = self._arms[arm]
        here, known = self._corrections[group][index], self._estimate(group)[index].factor
        primed = index in self._primed
        at_start = self._primed.seconds(batch, context)[index]
        table = at_start if primed else self._shapes[index].at(batch)
        level = math.log(seconds / table) - self._pace.log
        if here.weight < 1.0:
            here.factor = level if math.isnan(known) else known
        off = level - here.factor
        # Nothing was known; or what was known is past; or, of the first rounds, a slow one was a
        # warm-up.
        young = (
            not primed
            and not here.told_weight
            and (not here.weight or (here.weight < JUMP_ROUNDS and off < -CLIP))
        )
        jumps = here.count(off) >= JUMP_ROUNDS
        part = here.take(off, replaces=jumps or young)
        here.factor += part * off - self._pace.learn(here.measured, 0.0 if young else off, part)
        for other, one in enumerate(self._corrections[group]):
            one.told_weight *= self._keep
            if other != index:
                one.weight *= self._keep

        here.size = batch if here.weight <= 1.0 else here.size + SIZE_SHARE * (batch - here.size)
        if not primed and here.weight > 1.0:
            self._fit(index, batch, table * math.exp(here.factor + min(max(off, -CLIP), CLIP)))
        self._refresh(group, index, jumps=jumps)

    def _fit(self, arm: int, batch: int, seconds: float) -> None:
        """Bend an arm's shape; factors move so that nothing changes at the batch sizes where its
        rounds were.
        """
        shape, corrections = self._shapes[arm], [row[arm] for row in self._corrections]
        before = [shape.at(one.size) for one in corrections]
        if shape.learn(batch, seconds):
            for one, old in zip(corrections, before, strict=True):
                one.factor += math.log(old / shape.at(one.size))
            self._estimates = [None] * len(self._estimates)

    def _refresh(self, group: int, arm: int, *, jumps: bool) -> None:
        known, young = self._estimates[group], self._corrections[group][arm].weight < FULL_ROUNDS
        if known is None or jumps or young or self._pace.rounds % REFRESH_ROUNDS == 0:
            self._estimates = [None] * len(self._estimates)
        else:
            known[arm] = self._believe(group, arm)

    def snapshot(self) -> tuple[CostEvidence, ...]:
        """What this engine's rounds have shown."""
        return tuple(
            CostEvidence(
                arm,
                smallest,
                self._corrections[group][index].factor,
                self._corrections[group][index].weight,
            )
            for smallest, group in self._groups.items()
            for arm, index in self._arms.items()
            if self._corrections[group][index].weight > 0
        )

    def merge(self, evidence: Sequence[CostEvidence]) -> None:
        """What other engines' rounds have shown; arms and groups that are not served here are left
        out.

        Factors are known up to a number that is common to an engine's arms and belongs to its pace.
        Where both engines have rounds it is chosen so that they agree on average; how the arms
        stand to each other is what is learned.
        """
        for one in (one for row in self._corrections for one in row):
            one.told_factor = one.told_weight = 0.0
        told = [
            (self._corrections[self._groups[one.batch_group]][self._arms[one.arm]], one)
            for one in evidence
            if one.arm in self._arms and one.batch_group in self._groups
        ]
        weights = [min(here.weight, new.weight) for here, new in told]
        apart = sum(
            w * (new.log_factor - here.factor) for w, (here, new) in zip(weights, told, strict=True)
        )
        apart /= sum(weights) or 1.0
        for here, new in told:
            here.told_factor = new.log_factor - apart
            here.told_weight = min(new.weight, MOST_ROUNDS)
        self._estimates = [None] * len(self._estimates)
