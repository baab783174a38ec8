"""Expects the tokens of a round of each arm, from which drafts were accepted.

With a_p the chance that the draft at position p (positions.py) is accepted once those before it
were (Leviathan et al. 2023, without assuming the a_p equal),

    E[tokens | steps] = 1 + sum over k = 1 .. steps of a_1 ... a_k.

A round that accepts n of its drafts shows n successes and, at position n + 1, a failure (unless it
drafted no further or the response reached its limit there). Evidence is kept per batch-size group,
at most a window of trials a position, and fades while none comes. What a group does not know it
takes from all groups together, and what nobody knows of a position from the position before it.
What a request's own rounds have shown is rows.py's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from paceline.services.rollout_gateway.bandits.base import RowFacts
from paceline.services.rollout_gateway.bandits.cost_model.positions import DraftSpan, lay_out
from paceline.services.rollout_gateway.bandits.cost_model.rows import (
    Counts,
    Flags,
    Floats,
    RowAcceptance,
)
from paceline.services.rollout_gateway.bandits.evidence import POLICY_TRIALS, AcceptanceEvidence
from paceline.speculators.shift import AcceptanceShift

FIRST_CHANCE = 0.6  # of the first draft of a drafter that nothing is known of
GUESS_STRENGTH = 1.0  # trials that the position before is worth
POOL_STRENGTH = 8.0  # trials that all groups together are worth to one of them
BOUND_Z = 0.5  # standard deviations of the optimistic chance
IDLE_SHARE = 0.2  # of the window: rounds in which evidence that is not renewed fades to 1 / e
TRIAL_ROWS = 4  # after which a drafter is no longer new
OLD_TRIALS = 1.0  # what old evidence is worth when a drafter is tried anew
ALL = slice(None)
SLACK = 1.02  # by which a window of trials may be exceeded before it is cut
STALE_SHARE = 0.02  # rows since beliefs were made anew, as a share of the trials they rest on
STALE_ROUNDS = 4  # after which they are made anew in any case


@dataclass(frozen=True, slots=True)
class Beliefs:
    """What is expected in one batch-size group; tables by position have one place for each of all
    families.
    """

    chances: Floats  # [P] of a draft to be accepted once those before it were
    tokens: Sequence[float]  # [A] expected of a row in a round of each arm
    bound: Sequence[float]  # [A] the same at best


class GroupAcceptance:
    """Chances of every position in every batch-size group, and of every running request."""

    def __init__(
        self, arms: Sequence[str], groups: Sequence[int], window: int, *, shared: bool = True
    ) -> None:
        spans, self._families = lay_out(arms, shared=shared)
        self._spans = [spans.get(arm) for arm in arms]
        self._index = {arm: index for index, arm in enumerate(arms)}
        self._groups = {smallest: index for index, smallest in enumerate(groups)}
        positions = sum(span.steps for span in self._families.values())
        # By source (this engine's rounds, other engines'), group and position.
        self._accepted = np.zeros((2, len(groups), positions))
        self._trials = np.zeros((2, len(groups), positions))
        self._idle_keep = 1.0 - 1.0 / max(window * IDLE_SHARE, 2.0)
        self._window = float(window)
        self._beliefs: list[Beliefs | None] = [None] * len(groups)
        self._stale_rows = self._stale_rounds = 0  # since beliefs were made
        # accepted and trials of all groups; fades with the rounds of every group
        self._pool = np.zeros((2, positions))
        # Rows of rounds by group and family, since the start, the last new drafter or the last
        # `doubt`.
        self._seen = [dict.fromkeys(self._families, 0) for _ in groups]
        self.rows = RowAcceptance(positions, self._spans)

    def beliefs(self, group: int) -> Beliefs:
        """What is expected in a group."""
        known = self._beliefs[group]
        if known is None:
            known = self._beliefs[group] = self._believe(group)
        return known

    def family(self, arm: int) -> str:
        """The family of an arm; empty for one that drafts nothing."""
        span = self._spans[arm]
        return span.family if span is not None else ""

    def is_new(self, group: int, arm: int) -> bool:
        """True while hardly any row of the group's rounds has shown what this arm's drafter is
        worth.
        """
        span = self._spans[arm]
        return span is not None and self._seen[group][span.family] < TRIAL_ROWS

    def doubt(self, group: int, family: str) -> None:
        """What was known of a family is old: it is new to this group again, and a few rows outweigh
        the past of all.
        """
        self._seen[group][family] = 0
        span = self._families[family]
        for trials, accepted in ((self._trials, self._accepted), (self._pool[1], self._pool[0])):
            trials = trials[..., span.first : span.end]
            accepted = accepted[..., span.first : span.end]
            scale = OLD_TRIALS / np.maximum(trials, OLD_TRIALS)
            trials *= scale
            accepted *= scale
        self._changed()

    def follow(self, rows: Sequence[RowFacts], group: int) -> tuple[Counts, list[int]]:
        """Slots [B] of the requests that run now, and the lengths of those that do not any more:
        these are dropped.
        """
        return self.rows.follow(rows, self.beliefs(group).tokens)

    def observe(self, group: int, arm: str, slots: Counts, accepted: Counts, more: Flags) -> None:
        """A round: drafts accepted of each row [B]; more: the row's response goes on, so a draft
        was refused.
        """
        span = self._spans[self._index[arm]]
        keep = np.full_like(self._trials, self._idle_keep)
        if span is not None:
            accepted = np.minimum(accepted, span.steps)
            _, fresh = _counted(accepted, more, span.steps)
            keep[0, group, span.first : span.end][fresh > 0] = 1.0
        self._trials *= keep
        self._accepted *= keep
        self._pool *= keep[0, group]
        if span is None:
            self._age(len(slots), self._window)
        else:
            self._learn(group, span, slots, accepted, more)

    def observe_unused(
        self, group: int, arm: str, slots: Counts, accepted: Counts, more: Flags
    ) -> None:
        """What an arm that drafts would have had accepted, beside a round that was counted:
        nothing else fades. The past weighs as little as under a new policy: a drafter that looks
        up becomes right from one step to the next, and no round of its own would show that.
        """
        span = self._spans[self._index[arm]]
        if span is not None:
            self._cap(group, POLICY_TRIALS, slice(span.first, span.end))
            self._learn(group, span, slots, np.minimum(accepted, span.steps), more)

    def _learn(
        self, group: int, span: DraftSpan, slots: Counts, accepted: Counts, more: Flags
    ) -> None:
        self._seen[group][span.family] += len(slots)
        hits, fresh = _counted(accepted, more, span.steps)
        own, part = self._trials[0, group], slice(span.first, span.end)
        own[part] += fresh
        self._accepted[0, group, part] += hits
        self._pool[:, part] += hits, fresh
        if own.max() > SLACK * self._window:
            self._cap(group, self._window)
        self._age(len(slots), float(own[span.first]))
        self.rows.observe(slots, span, accepted, more, self.beliefs(group).chances)

    def _age(self, rows: int, trials: float) -> None:
        """Beliefs outlive a few rounds where these change next to nothing."""
        self._stale_rows += rows
        self._stale_rounds += 1
        if self._stale_rows > STALE_SHARE * trials or self._stale_rounds >= STALE_ROUNDS:
            self._changed()

    def _believe(self, group: int) -> Beliefs:
        pool_accepted, pool_trials = self._pool.tolist()
        accepted = self._accepted[:, group].sum(axis=0).tolist()
        trials = self._trials[:, group].sum(axis=0).tolist()
        chances: list[float] = []
        tokens, bounds = [1.0] * (len(trials) + 1), [1.0] * (len(trials) + 1)
        for span in self._families.values():
            chance, path, best_path, total, best = FIRST_CHANCE, 1.0, 1.0, 1.0, 1.0
            for at in range(span.first, span.end):
                weight = pool_trials[at] + GUESS_STRENGTH
                pool = (pool_accepted[at] + GUESS_STRENGTH * chance) / weight
                strength = weight if weight < POOL_STRENGTH else POOL_STRENGTH
                weight = trials[at] + strength
                chance = (accepted[at] + strength * pool) / weight
                chances.append(chance)
                path *= chance
                best_path *= min(
                    chance + BOUND_Z * math.sqrt(chance * (1.0 - chance) / (weight + 1.0)), 1.0
                )
                total += path
                best += best_path
                tokens[at + 1], bounds[at + 1] = total, best

        ends = [0 if span is None else span.end for span in self._spans]
        return Beliefs(
            np.array(chances), [tokens[end] for end in ends], [bounds[end] for end in ends]
        )

    def _cap(self, groups: int | slice, most: float, positions: slice = ALL) -> None:
        scale = most / np.maximum(self._trials[:, groups, positions], most)
        self._trials[:, groups, positions] *= scale
        self._accepted[:, groups, positions] *= scale
        self._pool[:, positions] *= most / np.maximum(self._pool[1, positions], most)

    def _changed(self) -> None:
        self._stale_rows = self._stale_rounds = 0
        self._beliefs = [None] * len(self._beliefs)

    def new_policy(self) -> None:
        """What is known of all positions weighs little."""
        self._cap(ALL, POLICY_TRIALS)
        self._changed()

    def new_drafter(self, arms: Set[str], shift: AcceptanceShift | None, rounds: int) -> None:
        """Of these arms' positions nothing is known; with a shift what was known of the drafter
        before it, shifted and worth so many rounds.
        """
        touched = {
            span.family for arm in arms if (span := self._spans[self._index[arm]]) is not None
        }
        spans = [self._families[family] for family in sorted(touched)]
        for span in spans:
            if shift is not None and rounds:
                self._inherit(span, shift, float(rounds))
                continue
            for known in (self._trials, self._accepted, self._pool):
                known[..., span.first : span.end] = 0.0
            for seen in self._seen:
                seen[span.family] = 0
        self._changed()
        for span in spans:
            self.rows.forget(span, self.beliefs(0).tokens)
        self._changed()

    def _inherit(self, span: DraftSpan, shift: AcceptanceShift, rounds: float) -> None:
        """A group that has seen nothing believes the pool, and the pool what the trainer says."""
        shifted = np.vectorize(shift.shifted, otypes=[np.float64])
        drafts = np.arange(span.steps)
        sizes = np.array(list(self._groups), dtype=np.float64)[:, None]  # rows of a round, at least
        for trials, accepted, most in (
            (self._trials, self._accepted, rounds * sizes),
            (self._pool[1], self._pool[0], POOL_STRENGTH),
        ):
            trials = trials[..., span.first : span.end]
            accepted = accepted[..., span.first : span.end]
            chances = accepted / np.maximum(trials, 1e-9)
            np.minimum(trials, most, out=trials)
            accepted[:] = trials * shifted(np.broadcast_to(drafts, chances.shape), chances)
        pool = self._pool[:, span.first : span.end]
        lacking = np.maximum(POOL_STRENGTH - pool[1], 0.0)
        pool[0] += lacking * [shift.chance(draft) for draft in range(span.steps)]
        pool[1] += lacking
        for seen in self._seen:
            seen[span.family] = max(seen[span.family], TRIAL_ROWS)

    def snapshot(self) -> tuple[AcceptanceEvidence, ...]:
        """What this engine's rounds have shown."""
        return tuple(
            AcceptanceEvidence(
                span.family,
                smallest,
                tuple(self._accepted[0, index, span.first : span.end].tolist()),
                tuple(self._trials[0, index, span.first : span.end].tolist()),
            )
            for smallest, index in self._groups.items()
            for span in self._families.values()
            if self._trials[0, index, span.first : span.end].any()
        )

    def merge(self, evidence: Sequence[AcceptanceEvidence]) -> None:
        """What other engines' rounds have shown; families and groups that are not served here are
        left out.
        """
        self._accepted[1], self._trials[1] = 0.0, 0.0
        self._pool[:] = self._accepted[0].sum(axis=0), self._trials[0].sum(axis=0)
        for one in evidence:
            span, group = self._families.get(one.family), self._groups.get(one.batch_group)
            if span is None or group is None:
                continue
            steps = min(span.steps, len(one.accepted), len(one.trials))
            self._accepted[1, group, span.first : span.first + steps] = one.accepted[:steps]
            self._trials[1, group, span.first : span.first + steps] = one.trials[:steps]
            self._pool[0, span.first : span.first + steps] += one.accepted[:steps]
            self._pool[1, span.first : span.first + steps] += one.trials[:steps]
            self._seen[group][span.family] = max(self._seen[group][span.family], TRIAL_ROWS)

        self._cap(ALL, self._window)
        self._changed()


def _counted(accepted: Counts, more: Flags, steps: int) -> tuple[Counts, Counts]:
    """Rows in which the draft at each position [steps] was accepted, and in which it was tried."""
    reached = np.bincount(accepted, minlength=steps + 1)[::-1].cumsum()[::-1]
    tried = reached[:-1]
    if not more.all():
        # Of rows that ended with so many drafts accepted the next one was not refused.
        tried = tried - np.bincount(accepted[~more], minlength=steps + 1)[:-1]
    return reached[1:], tried
