"""The cost-model bandit: expected tokens of an arm over its expected seconds, in place of past tokens per second.

Tokens come from acceptance.py (by position, group and request), seconds from costs.py (table and correction), so that a
round of one arm teaches about others: a chain of five shows what one of three would have given.

Full batch: the arm of the most tokens per second. Draining batch (nothing waits): a round costs F + m x rows seconds, F
until the last row ends, m until the row's own end. A token of row r spares 1 / E_r of a round of that row, hence

    value of a token of row r  =  ((1 - f) / rows  +  f x share_r) / E_r,      f = seconds(1 row) / seconds(all rows),

with share_r the weight of row r among those that may be the last, (expected rounds left) ** LAST_POWER normalised. With one
row left this is tokens per second again; with many, the rows that will last count most.

Exploring is optimism, not chance: each arm counts as well as it may be at best, by what is known of its acceptance and of
its seconds. Evidence that is not renewed fades, so that every arm is looked at again about once a window, and a new
drafter at once; in between no round is spent on it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import numpy.typing as npt

from rollout_gateway.bandits.acceptance import Acceptance
from rollout_gateway.bandits.base import BanditSettings, Choice, CostSample, Outcome, RowFacts, Situation, group_of
from rollout_gateway.bandits.costs import CostTable
from rollout_gateway.bandits.lengths import ResponseLengths
from rollout_gateway.bandits.window import GroupWindow, WindowedBandit
from rollout_gateway.engines.base import Target
from rollout_gateway.engines.evidence import Evidence

LAST_POWER = 4.0

Floats = npt.NDArray[np.float64]


class CostModel(WindowedBandit[GroupWindow]):
    """Takes the arm that finishes the work soonest, as far as it knows; draws nothing at random."""

    def __init__(self, settings: BanditSettings, arms: Sequence[str], seed: int) -> None:
        super().__init__(settings, arms, seed, GroupWindow)
        self._index = {arm: index for index, arm in enumerate(arms)}
        self._group_index = {smallest: index for index, smallest in enumerate(settings.groups)}
        self._acceptance = Acceptance(arms, settings.groups, settings.window)
        self._costs = CostTable(arms, settings.groups, settings.window)
        self._lengths = ResponseLengths()
        self._ids: list[int] = []
        self._slots = np.zeros(0, dtype=np.int64)
        self._last: Outcome | None = None
        self._allowed: dict[tuple[str, ...], list[int]] = {}

    def prime(self, costs: Sequence[CostSample]) -> None:
        """Seconds that rounds took at the engine's start."""
        self._costs.prime(costs)

    def choose_among(self, situation: Situation, names: Sequence[str]) -> Choice:
        """The arm of the next round, one of `names`; it explores when it is not the one believed best."""
        if len(names) == 1:
            return Choice(names[0], explored=False)
        group = self._at(situation.batch_size)
        seconds, doubt = self._costs.seconds(group, situation.batch_size, situation.context)
        allowed = self._indices(names)
        unseen = np.isnan(seconds)[allowed]
        if unseen.any():
            return Choice(names[int(unseen.argmax())], explored=True)
        mean, bound = self._acceptance.tokens(group)
        believed = self._tokens(situation, group, seconds) / seconds
        hoped = believed * (bound / mean) * doubt
        chosen = int(hoped[allowed].argmax())
        return Choice(names[chosen], explored=chosen != int(believed[allowed].argmax()))

    def _tokens(self, situation: Situation, group: int, seconds: Floats) -> Floats:
        """Tokens of a round [A], each row's weighed by what they are worth."""
        self._follow(situation.rows)
        tokens = self._acceptance.row_tokens(group, self._slots)
        if not situation.draining or len(self._ids) == 1:
            return tokens.sum(axis=0)
        return self._worth(situation, tokens, seconds, group) @ tokens

    def _worth(self, situation: Situation, tokens: Floats, seconds: Floats, group: int) -> Floats:
        """Value [B] of a token of each row; see the module."""
        usual = int((tokens.sum(axis=0) / seconds).argmax())
        each = tokens[:, usual]
        facts = np.array([(row.generated, row.limit) for row in situation.rows], dtype=np.float64)
        rounds = self._lengths.remaining(facts[:, 0], facts[:, 1]) / each
        share = (rounds / rounds.max()) ** LAST_POWER
        fixed = min(self._costs.seconds(group, 1, situation.context)[0][usual] / seconds[usual], 1.0)
        worth: Floats = ((1.0 - fixed) / len(each) + fixed * share / share.sum()) / each
        return worth

    def observe(self, outcome: Outcome) -> None:
        """Learn of a round: its seconds, and which drafts of which request were accepted."""
        super().observe(outcome)
        situation = outcome.situation
        self._follow(situation.rows)
        group = self._at(situation.batch_size)
        self._costs.observe(group, outcome.arm, situation.batch_size, situation.context, outcome.seconds)
        taken = np.array(outcome.taken)
        more = np.array([row.generated + count < row.limit for row, count in zip(situation.rows, taken, strict=True)])
        ran = taken > 0  # a row that took nothing had ended before the round
        self._acceptance.observe(group, outcome.arm, self._slots[ran], taken[ran] - 1, more[ran])
        self._last = outcome

    def _follow(self, rows: Sequence[RowFacts]) -> None:
        """Requests that were in the round before and are not now have ended with it."""
        ids = [row.request_id for row in rows]
        if ids == self._ids:
            return
        self._slots = self._acceptance.rows.follow(ids)
        self._ids = ids
        if self._last is not None:
            still = set(ids)
            pairs = zip(self._last.situation.rows, self._last.taken, strict=True)
            self._lengths.add([row.generated + count for row, count in pairs if row.request_id not in still])
            self._last = None

    def forget(self, arms: Set[str], changed: Target) -> None:
        """Acceptance of these arms is not known any more (drafter) or less well (policy); seconds stay."""
        super().forget(arms, changed)
        self._acceptance.forget(arms, changed)

    def snapshot(self) -> Evidence:
        """What this engine's own rounds have shown."""
        return Evidence(self._acceptance.snapshot(), self._costs.snapshot())

    def merge(self, evidence: Evidence) -> None:
        """What the rounds of all other engines have shown."""
        self._acceptance.merge(evidence.acceptance)
        self._costs.merge(evidence.costs)

    def _at(self, batch_size: int) -> int:
        return self._group_index[group_of(self._settings.groups, batch_size)]

    def _indices(self, names: Sequence[str]) -> list[int]:
        key = tuple(names)
        if key not in self._allowed:
            self._allowed[key] = [self._index[name] for name in key]
        return self._allowed[key]
