"""Judges untrained drafters in rounds of other arms: what they would have proposed, beside what
was drawn.

A look-up costs no forward, and which tokens are drawn does not depend on who drafts: so it is known
without a round of it what such an arm would have given (side observations: Mannor & Shamir 2011).
The bandit learns of its acceptance, the budget how far the drafter's own probabilities can be
trusted; seconds are learned by rounds alone. Owns the looks and the drafts that wait for tokens;
not what is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.arm_names import ArmName
from paceline.services.rollout_gateway.bandits.base import Situation, UnusedDrafts
from paceline.services.rollout_gateway.engines.embedded.budget import RowDrafts, row_drafts
from paceline.services.rollout_gateway.engines.embedded.kv_cache import SlotStore
from paceline.services.rollout_gateway.engines.embedded.speculative import (
    RoundPlan,
    Speculation,
    draft_batch,
)
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.speculators.base import DraftShape

LOOK_EVERY = 8
"""Rounds of other arms from one look to the next. On the demo looks cost 0.5 to 0.8 % of the CPU
time of rounds (docs/adr/0093).
"""


@dataclass(frozen=True, slots=True)
class WaitingDrafts:
    """What an arm would have proposed for a request after its first `begin` response tokens."""

    sequence: RunningSequence
    begin: int
    proposed: RowDrafts
    verified: RowDrafts
    """What the budget would have left of it."""


@dataclass(frozen=True, slots=True)
class JudgedDrafts:
    """Drafts about which the tokens that were drawn have decided."""

    row: int
    """Of the round that decided."""
    taken: int
    """Tokens that a round of the arm would have given."""
    more: bool
    """The request would have gone on."""
    proposed: RowDrafts
    reached: frozenset[int]
    """Of what was proposed the nodes that were drawn, as Budget.learn has them."""


class SideLooks:
    """Looks at one round in LOOK_EVERY of those that the bandit gives to other arms; one look at a
    time, the arms in turn.
    """

    def __init__(self, speculation: Speculation, store: SlotStore) -> None:
        self._speculation, self._store = speculation, store
        self._turn = [
            arm
            for arm in speculation.arms.values()
            if arm.speculator and not speculation.drafters.trains(arm.speculator)
        ]
        self._arm: ArmName | None = None
        self._waiting: list[WaitingDrafts] = []
        self._rounds = 0  # since the last look

    def look(
        self, plan: RoundPlan, slots: Sequence[int], rows: Sequence[RunningSequence], version: int
    ) -> None:
        """Ask an arm what it would draft for the rows of a round that begins, when it is time."""
        arm, speculation = self._due(plan), self._speculation
        if arm is None:
            return
        self._turn.remove(arm)
        self._turn.append(arm)
        asked = [row for row, sequence in enumerate(rows) if not sequence.request.forced_arm]
        sequences = [rows[row] for row in asked]
        batch = draft_batch([slots[row] for row in asked], sequences, self._store, version)
        shape = DraftShape(arm.shape.steps, arm.shape.topk, arm.drafted)
        proposed = speculation.drafters.live[arm.speculator].propose(batch, shape)
        verified = proposed
        if speculation.budget is not None:
            verified = speculation.budget.left(proposed, arm.speculator, arm.name)
        self._arm, self._rounds = arm, 0
        self._waiting = [
            WaitingDrafts(sequence, len(sequence.tokens), *drafts)
            for sequence, *drafts in zip(
                sequences, row_drafts(proposed), row_drafts(verified), strict=True
            )
        ]

    def _due(self, plan: RoundPlan) -> ArmName | None:
        """Whose turn it is; nobody's where its own drafter drafts or there is nothing to choose."""
        speculation = self._speculation
        if not plan.chosen or speculation.measuring or self._waiting:
            return None
        used = {speculation.arms[name].speculator for name in plan.arms}
        arms = (
            arm
            for arm in self._turn
            if arm.name in speculation.served and arm.speculator not in used
        )
        arm = next(arms, None)
        if arm is None:
            return None
        self._rounds += 1
        return arm if self._rounds >= LOOK_EVERY else None

    def learn(self, situation: Situation, rows: Sequence[RunningSequence]) -> None:
        """Tell what is decided after a round of these rows; of requests that left the batch nothing
        is learned.
        """
        if not self._waiting or self._arm is None:
            return
        places = {id(row): place for place, row in enumerate(rows)}
        judged, waiting = [], []
        for one in self._waiting:
            if id(one.sequence) in places:
                found = _judged(one, places[id(one.sequence)])
                if found is None:
                    waiting.append(one)
                else:
                    judged.append(found)
        self._waiting = waiting
        if judged:
            self._tell(self._arm, situation, judged)

    def _tell(self, arm: ArmName, situation: Situation, judged: Sequence[JudgedDrafts]) -> None:
        speculation = self._speculation
        if speculation.budget is not None:
            speculation.budget.learn(
                arm.speculator, [(one.proposed, one.reached) for one in judged]
            )
        speculation.bandit.observe_unused(
            UnusedDrafts(
                arm.name,
                situation,
                [one.row for one in judged],
                [one.taken for one in judged],
                [one.more for one in judged],
            )
        )


def _judged(one: WaitingDrafts, row: int) -> JudgedDrafts | None:
    """None while further tokens may follow what was proposed."""
    sequence = one.sequence
    drawn = sequence.tokens[one.begin :]
    path = list(_followed(one.proposed, drawn))
    whole = len(path) == len(drawn)  # all that was drawn had been proposed
    if whole and (not drawn or (sequence.finish is None and _goes_on(one.proposed, path))):
        return None
    accepted = len(list(_followed(one.verified, drawn)))
    # A round gives one token more than its drafts, unless the request ends with one of these.
    taken = accepted + 1 if sequence.finish is None else min(accepted + 1, len(drawn))
    more = one.begin + taken < sequence.token_limit
    return JudgedDrafts(row, taken, more, one.proposed, frozenset((0, *path)))


def _followed(drafts: RowDrafts, drawn: Sequence[int]) -> Iterator[int]:
    """Nodes that were drawn, level by level: i + 1 for draft i."""
    node = 0
    for token in drawn:
        children = _children(drafts, node)
        if token not in children:
            return
        node = children[token]
        yield node


def _goes_on(drafts: RowDrafts, path: Sequence[int]) -> bool:
    return bool(_children(drafts, path[-1] if path else 0))


def _children(drafts: RowDrafts, node: int) -> dict[int, int]:
    """Nodes under a node, by their token."""
    tokens, _, parents = drafts
    return {
        token: index
        for index, (token, above) in enumerate(zip(tokens, parents, strict=True), 1)
        if above == node and token >= 0
    }
