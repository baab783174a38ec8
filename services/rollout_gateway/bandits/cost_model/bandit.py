"""The cost-model bandit: expected tokens of an arm over its expected seconds, in place of past
tokens per second.

Tokens come from acceptance.py and rows.py (by position, group and request), seconds from costs.py
(table and correction), so that a round of one arm teaches about others: a chain of five shows what
one of three would have given.

Full batch: the arm of the most tokens per second. Draining batch (nothing waits): a round costs F +
m x rows seconds, F until the last row ends, m until the row's own end. A token of row r spares 1 /
E_r of a round of that row, hence

    value of a token of row r  =  ((1 - f) / rows  +  f x share_r) / E_r,      f = seconds(1 row) /
    seconds(all rows),

with share_r the weight of row r among those that may be the last, (expected rounds left) **
LAST_POWER normalised. With one row left this is tokens per second again; with many, the rows that
will last count most. The choice tells these values, so that a budget of drafts goes by them too.

Exploring is optimism, not chance: each arm counts as well as it may be at best, by what is known of
its acceptance and of its seconds. Evidence that is not renewed fades, so that arms that may have
become better are looked at again; an arm that seems worse by a factor x is, without any hope, tried
once in x windows, and the best arm of a drafter that is not in use five times as often. A new
drafter is tried at once.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import numpy.typing as npt

from paceline.services.rollout_gateway.bandits.base import (
    ArmChoice,
    BanditSettings,
    CostSample,
    RoundOutcome,
    RowFacts,
    Situation,
    UnusedDrafts,
    group_of,
)
from paceline.services.rollout_gateway.bandits.cost_model.acceptance import GroupAcceptance
from paceline.services.rollout_gateway.bandits.cost_model.costs import CostTable
from paceline.services.rollout_gateway.bandits.cost_model.lengths import ResponseLengths
from paceline.services.rollout_gateway.bandits.evidence import Evidence
from paceline.services.rollout_gateway.bandits.window import WindowedBandit
from paceline.speculators.shift import AcceptanceShift
from paceline.trajectory import Target

LAST_POWER = 4.0
RETEST_SHARE = 0.2
"""Of the window: rounds without a drafter after which it is tried anew, times how much better the
best arm seems.
"""
OLD_SHARE = 0.05
"""Of the window: rounds without a drafter after which a group that is new to it trusts its own
rounds more.
"""

Floats = npt.NDArray[np.float64]


class CostModel(WindowedBandit):
    """Takes the arm that finishes the work soonest, as far as it knows; draws nothing at random."""

    def __init__(self, settings: BanditSettings, arms: Sequence[str], seed: int) -> None:
        super().__init__(settings, arms, seed)
        self._index = {arm: index for index, arm in enumerate(arms)}
        self._group_index = {smallest: index for index, smallest in enumerate(settings.groups)}
        self._acceptance = GroupAcceptance(
            arms, settings.groups, settings.window, shared=settings.share_positions
        )
        self._costs = CostTable(arms, settings.groups, settings.window)
        self._lengths = ResponseLengths()
        self._rounds = [0] * len(settings.groups)
        # round in which an arm was used last
        self._used = [[0] * len(arms) for _ in settings.groups]
        # round, of all, of the last use
        self._met = {self._acceptance.family(index): 0 for index in range(len(arms))}
        self._ids: list[int] = []
        self._slots = np.zeros(0, dtype=np.int64)

    def prime(self, costs: Sequence[CostSample]) -> None:
        """Seconds that rounds took at the engine's start."""
        self._costs.prime(costs)

    def _choose(self, situation: Situation, names: Sequence[str]) -> ArmChoice:
        """It explores when it is not the one believed best."""
        group = self._at(situation.batch_size)
        seconds = self._costs.seconds(group, situation.batch_size, situation.context)
        allowed = [self._index[name] for name in names]
        unseen = next((index for index in allowed if seconds[index] != seconds[index]), None)  # NaN
        if unseen is not None:
            return ArmChoice(self._names[unseen], explored=True)
        tokens, worth = self._tokens(situation, group, seconds)
        beliefs, doubts = self._acceptance.beliefs(group), self._costs.doubts(group)
        believed = [tokens[index] / seconds[index] for index in allowed]
        hoped = [
            rate * beliefs.bound[index] / beliefs.tokens[index] * doubts[index]
            for rate, index in zip(believed, allowed, strict=True)
        ]
        best = max(believed)
        chosen = self._due(group, allowed, believed, best)
        if chosen is None:
            chosen = hoped.index(max(hoped))
        return ArmChoice(self._names[allowed[chosen]], believed[chosen] < best, worth)

    def _due(
        self, group: int, allowed: list[int], believed: list[float], best: float
    ) -> int | None:
        """Place in `allowed` of an arm to be tried whatever is believed of it.

        The best one of new drafters; else one that its group has not used for a window of rounds. A
        drafter that no group has used for a part of a window is new again. The worse an arm is
        thought to be the longer it waits.
        """
        acceptance, window = self._acceptance, self._settings.window
        now, used = self._rounds[group], self._used[group]
        new = [place for place, index in enumerate(allowed) if acceptance.is_new(group, index)]
        if new:
            place = max(new, key=believed.__getitem__)
            family = acceptance.family(allowed[place])
            if sum(self._rounds) - self._met[family] > OLD_SHARE * window:
                acceptance.doubt(group, family)
            return place

        for place, index in enumerate(allowed):
            worth, family = believed[place] / best, acceptance.family(index)
            if (now - used[index]) * worth > window:
                return place
            if family and (sum(self._rounds) - self._met[family]) * worth > RETEST_SHARE * window:
                acceptance.doubt(group, family)

        return None

    def _tokens(
        self, situation: Situation, group: int, seconds: list[float]
    ) -> tuple[list[float], Sequence[float]]:
        """Tokens of a round [A], each row's weighed by what they are worth, and that [B]; (): all
        rows' alike.
        """
        self._follow(situation.rows, group)
        tokens = self._acceptance.rows.tokens[self._slots]
        sums: list[float] = tokens.sum(axis=0).tolist()
        if not situation.draining or len(self._ids) == 1:
            return sums, ()
        rates = [count / each for count, each in zip(sums, seconds, strict=True)]
        usual = rates.index(max(rates))
        one_row = self._costs.seconds(group, 1, situation.context)[usual]
        worth = self._worth(tokens[:, usual], one_row / seconds[usual])
        weighed: list[float] = (worth @ tokens).tolist()
        return weighed, worth.tolist()

    def _worth(self, each: Floats, fixed: float) -> Floats:
        """Value [B] of a token of each row; see the module. each: tokens [B] that the rows are
        given in a round.
        """
        running = self._acceptance.rows
        rounds = (
            self._lengths.remaining(running.generated[self._slots], running.limits[self._slots])
            / each
        )
        share = (rounds / rounds.max()) ** LAST_POWER
        fixed = min(fixed, 1.0)
        worth: Floats = ((1.0 - fixed) / len(each) + fixed / share.sum() * share) / each
        return worth

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn of a round: its seconds, and which drafts of which request were accepted."""
        super().observe(outcome)
        situation = outcome.situation
        group = self._at(situation.batch_size)
        self._rounds[group] += 1
        self._used[group][self._index[outcome.arm]] = self._rounds[group]
        self._met[self._acceptance.family(self._index[outcome.arm])] = sum(self._rounds)
        self._follow(situation.rows, group)
        self._costs.observe(
            group, outcome.arm, situation.batch_size, situation.context, outcome.seconds
        )
        taken, slots = np.array(outcome.taken), self._slots
        more = self._acceptance.rows.advance(slots, taken)
        if not taken.all():  # a row that took nothing had ended before the round
            ran = taken > 0
            taken, slots, more = taken[ran], slots[ran], more[ran]
        if len(taken):
            self._acceptance.observe(group, outcome.arm, slots, taken - 1, more)

    def observe_unused(self, drafts: UnusedDrafts) -> None:
        """Learn what an arm would have had accepted; its drafter need not be tried for that."""
        group = self._at(drafts.situation.batch_size)
        self._met[self._acceptance.family(self._index[drafts.arm])] = sum(self._rounds)
        self._follow(drafts.situation.rows, group)
        slots, accepted = self._slots[list(drafts.rows)], np.array(drafts.taken) - 1
        self._acceptance.observe_unused(
            group, drafts.arm, slots, accepted, np.array(drafts.more, dtype=np.bool_)
        )

    def _follow(self, rows: Sequence[RowFacts], group: int) -> None:
        """Requests that were in the round before and are not now have ended with it."""
        ids = [row[0] for row in rows]
        if ids == self._ids:
            return
        self._slots, ended = self._acceptance.follow(rows, group)
        self._lengths.add(ended)
        self._ids = ids

    def renew(self, arms: Set[str], changed: Target, shift: AcceptanceShift | None = None) -> None:
        """Acceptance of these arms is shifted or not known any more (drafter), or known less well
        (policy); seconds stay.
        """
        super().renew(arms, changed, shift)
        if changed is Target.POLICY:
            self._acceptance.new_policy()
        else:
            self._acceptance.new_drafter(arms, shift, self._settings.inherited_rounds)

    def snapshot(self) -> Evidence:
        """What this engine's own rounds have shown."""
        return Evidence(self._acceptance.snapshot(), self._costs.snapshot())

    def merge(self, evidence: Evidence) -> None:
        """What the rounds of all other engines have shown."""
        self._acceptance.merge(evidence.acceptance)
        self._costs.merge(evidence.costs)

    def _at(self, batch_size: int) -> int:
        return self._group_index[group_of(self._settings.groups, batch_size)]
