"""How many tokens a round of each arm is expected to give, from which drafts were accepted. Knows no seconds.

An arm `<speculator>:<steps>_<topk>_<draft tokens>` drafts at positions 1 .. steps. Chains (topk 1) of one speculator
share their positions: the first three drafts of a chain of seven are those of a chain of three. A tree is a family of
its own, because what stands at a level depends on its width and its nodes. With a_p the chance that the draft at
position p is accepted once those before it were (Leviathan et al. 2023, without assuming the a_p equal),

    E[tokens | steps] = 1 + sum over k = 1 .. steps of a_1 ... a_k.

A round that accepts n of its drafts shows n successes and, at position n + 1, a failure (unless it drafted no further or
the response ended there). Evidence is kept per batch-size group, at most a window of trials a position, and fades
while none comes. What a group does not know it takes from all groups together, and what nobody knows of a position
from the position before it. A request's own rounds shift its group's chances: a Beta prior of ROW_STRENGTH trials.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError
from rollout_gateway.bandits.base import speculator_of
from rollout_gateway.engines.base import Target
from rollout_gateway.engines.evidence import AcceptanceEvidence

FIRST_CHANCE = 0.6  # of the first draft of a drafter that nothing is known of
GUESS_STRENGTH = 1.0  # trials that the position before is worth
POOL_STRENGTH = 8.0  # trials that all groups together are worth to one of them
ROW_STRENGTH = 12.0  # trials that the group is worth to a request
ROW_KEEP = 1.0 - 1.0 / 64  # of a request's evidence, per round of it
BOUND_Z = 1.0  # standard deviations of the optimistic chance
IDLE_SHARE = 0.2  # of the window: rounds in which evidence that is not renewed fades to 1 / e
POLICY_TRIALS = 64.0  # a position's evidence is worth at most this after a new policy

_ARM = re.compile(r"(?P<speculator>[^:]+):(?P<steps>\d+)_(?P<topk>\d+)_(?P<tokens>\d+)")
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Where an arm's positions lie among those of all families."""

    family: str
    first: int
    steps: int

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + self.steps


def family_and_steps(arm: str) -> tuple[str, int]:
    """("eagle:1", 3) of "eagle:3_1_4"; a tree's family is its own name. Raises ConfigError."""
    found = _ARM.fullmatch(arm)
    if found is None:
        raise ConfigError("cost_model reads steps from arms", seen=arm, allowed="off or <speculator>:<steps>_<topk>_<n>")
    family = f"{found['speculator']}:1" if found["topk"] == "1" else arm
    return family, int(found["steps"])


def lay_out(arms: Sequence[str]) -> tuple[dict[str, Span], dict[str, Span]]:
    """Spans by arm (of those that draft) and by family. Raises ConfigError."""
    shapes = {arm: family_and_steps(arm) for arm in arms if speculator_of(arm)}
    longest: dict[str, int] = {}
    for family, steps in shapes.values():
        longest[family] = max(longest.get(family, 0), steps)
    families, first = {}, 0
    for family, steps in longest.items():
        families[family] = Span(family, first, steps)
        first += steps
    return {arm: Span(name, families[name].first, steps) for arm, (name, steps) in shapes.items()}, families


class Acceptance:
    """Chances of every position in every batch-size group, and of every running request."""

    def __init__(self, arms: Sequence[str], groups: Sequence[int], window: int) -> None:
        self._spans, self._families = lay_out(arms)
        self._groups = {smallest: index for index, smallest in enumerate(groups)}
        shape = (len(groups), sum(span.steps for span in self._families.values()))
        self._accepted, self._trials = np.zeros(shape), np.zeros(shape)
        self._told_accepted, self._told_trials = np.zeros(shape), np.zeros(shape)  # by other engines
        self._idle_keep = 1.0 - 1.0 / max(window * IDLE_SHARE, 2.0)
        self._window = float(window)
        # Columns of the running sums of E[tokens]; arms that draft nothing read a column of zeros.
        self._columns = np.array([self._spans[arm].end if arm in self._spans else 0 for arm in arms])
        self._beliefs: list[tuple[Floats, Floats] | None] = [None] * len(groups)
        self.rows = RowAcceptance(shape[1], len(arms))

    def observe(self, group: int, arm: str, slots: Counts, accepted: Counts, more: npt.NDArray[np.bool_]) -> None:
        """A round: drafts accepted of each row [B]; more: the row's response goes on, so a draft was refused."""
        fresh = np.zeros(self._trials.shape[1])
        span = self._spans.get(arm)
        if span is not None:
            accepted = np.clip(accepted, 0, span.steps)
            reached = np.bincount(accepted, minlength=span.steps + 1)[::-1].cumsum()[::-1]
            ended = np.bincount(accepted[~more], minlength=span.steps + 1)
            fresh[span.first : span.end] = reached[:-1] - ended[:-1]
            self._fade(group, fresh)
            self._accepted[group, span.first : span.end] += reached[1:]
            self._trials[group] += fresh
            self._cap(group, self._window)
        else:
            self._fade(group, fresh)
        self._beliefs = [None] * len(self._beliefs)
        if span is not None:
            self.rows.observe(slots, span, accepted, more)

    def tokens(self, group: int) -> tuple[Floats, Floats]:
        """Expected tokens per row [A] of each arm in a group, and what they may be at best."""
        mean, bound = self.beliefs(group)
        both = self._sums(np.stack((mean, bound)))[:, self._columns]
        return both[0], both[1]

    def row_tokens(self, group: int, slots: Counts) -> Floats:
        """Expected tokens [B, A] of each request, as its own rounds and the group's say."""
        return self._sums(self.rows.chances(slots, self.beliefs(group)[0]))[:, self._columns]

    def beliefs(self, group: int) -> tuple[Floats, Floats]:
        """Chances [P] of the positions of all families in a group: expected, and optimistic."""
        known = self._beliefs[group]
        if known is None:
            known = self._beliefs[group] = self._believe(group)
        return known

    def _believe(self, group: int) -> tuple[Floats, Floats]:
        accepted, trials = self._accepted + self._told_accepted, self._trials + self._told_trials
        pool_accepted, pool_trials = accepted.sum(axis=0).tolist(), trials.sum(axis=0).tolist()
        here_accepted, here_trials = accepted[group].tolist(), trials[group].tolist()
        mean, bound = [], []
        for span in self._families.values():
            guess = FIRST_CHANCE
            for at in range(span.first, span.end):
                pool = (pool_accepted[at] + GUESS_STRENGTH * guess) / (pool_trials[at] + GUESS_STRENGTH)
                strength = min(POOL_STRENGTH, pool_trials[at] + GUESS_STRENGTH)
                weight = here_trials[at] + strength
                guess = (here_accepted[at] + strength * pool) / weight
                mean.append(guess)
                bound.append(min(guess + BOUND_Z * math.sqrt(guess * (1.0 - guess) / (weight + 1.0)), 1.0))
        return np.array(mean), np.array(bound)

    def _sums(self, chances: Floats) -> Floats:
        """E[tokens] [N, 1 + P] of every length, from chances [N, P]; column 0 is a round without drafts."""
        sums = np.ones((len(chances), chances.shape[1] + 1))
        for span in self._families.values():
            part = slice(span.first, span.end)
            sums[:, span.first + 1 : span.end + 1] += chances[:, part].cumprod(axis=1).cumsum(axis=1)
        return sums

    def _fade(self, group: int, fresh: Floats) -> None:
        keep = np.where(fresh > 0, 1.0, self._idle_keep)
        for table in (self._accepted, self._trials, self._told_accepted, self._told_trials):
            table[group] *= keep if table is self._accepted or table is self._trials else self._idle_keep

    def _cap(self, groups: int | slice, most: float) -> None:
        for accepted, trials in ((self._accepted, self._trials), (self._told_accepted, self._told_trials)):
            scale = most / np.maximum(trials[groups], most)
            trials[groups] *= scale
            accepted[groups] *= scale

    def forget(self, arms: Set[str], changed: Target) -> None:
        """New drafter: nothing is known of its positions. New policy: what is known weighs little."""
        if changed is Target.POLICY:
            self._cap(slice(None), POLICY_TRIALS)
        else:
            for family in {self._spans[arm].family for arm in arms if arm in self._spans}:
                span = self._families[family]
                for table in (self._accepted, self._trials, self._told_accepted, self._told_trials):
                    table[:, span.first : span.end] = 0.0
                self.rows.forget(span)
        self._beliefs = [None] * len(self._beliefs)

    def snapshot(self) -> tuple[AcceptanceEvidence, ...]:
        """What this engine's rounds have shown."""
        return tuple(
            AcceptanceEvidence(
                span.family,
                smallest,
                tuple(self._accepted[index, span.first : span.end].tolist()),
                tuple(self._trials[index, span.first : span.end].tolist()),
            )
            for smallest, index in self._groups.items()
            for span in self._families.values()
            if self._trials[index, span.first : span.end].any()
        )

    def merge(self, evidence: Sequence[AcceptanceEvidence]) -> None:
        """What other engines' rounds have shown; families and groups that are not served here are left out."""
        self._told_accepted[:], self._told_trials[:] = 0.0, 0.0
        for one in evidence:
            span, group = self._families.get(one.family), self._groups.get(one.batch_group)
            if span is None or group is None:
                continue
            steps = min(span.steps, len(one.accepted), len(one.trials))
            self._told_accepted[group, span.first : span.first + steps] = one.accepted[:steps]
            self._told_trials[group, span.first : span.first + steps] = one.trials[:steps]
        self._cap(slice(None), self._window)
        self._beliefs = [None] * len(self._beliefs)


class RowAcceptance:
    """Drafts accepted of each running request, by slot; a slot is a row of the tables here, not of the engine."""

    def __init__(self, positions: int, arms: int) -> None:
        self._accepted, self._trials = np.zeros((64, positions)), np.zeros((64, positions))
        self._free = list(range(63, -1, -1))
        self._slots: dict[int, int] = {}

    def follow(self, request_ids: Sequence[int]) -> Counts:
        """Slots [B] of the requests that run now; those of all others are free again."""
        gone = self._slots.keys() - set(request_ids)
        for request_id in gone:
            self._free.append(self._slots.pop(request_id))
        for request_id in request_ids:
            if request_id not in self._slots:
                self._slots[request_id] = self._take()
        return np.array([self._slots[request_id] for request_id in request_ids])

    def _take(self) -> int:
        if not self._free:
            size = len(self._trials)
            more = np.zeros_like(self._trials)
            self._accepted, self._trials = np.concatenate((self._accepted, more)), np.concatenate((self._trials, more))
            self._free = list(range(2 * size - 1, size - 1, -1))
        slot = self._free.pop()
        self._accepted[slot] = self._trials[slot] = 0.0
        return slot

    def observe(self, slots: Counts, span: Span, accepted: Counts, more: npt.NDArray[np.bool_]) -> None:
        """Count a round's drafts for the requests in `slots` [B]."""
        levels, accepted = np.arange(span.steps), accepted[:, None]
        hits = levels < accepted
        tried = hits | ((levels == accepted) & more[:, None])
        accepted_before, tried_before = self._accepted[slots], self._trials[slots]
        accepted_before *= ROW_KEEP
        tried_before *= ROW_KEEP
        accepted_before[:, span.first : span.end] += hits
        tried_before[:, span.first : span.end] += tried
        self._accepted[slots], self._trials[slots] = accepted_before, tried_before

    def chances(self, slots: Counts, group: Floats) -> Floats:
        """Chances [B, P] of the requests' positions; group: those of their group [P]."""
        chances: Floats = (self._accepted[slots] + ROW_STRENGTH * group) / (self._trials[slots] + ROW_STRENGTH)
        return chances

    def forget(self, span: Span) -> None:
        """The family drafts otherwise from now on."""
        self._accepted[:, span.first : span.end] = self._trials[:, span.first : span.end] = 0.0


def spans_of(arms: Sequence[str]) -> Mapping[str, Span]:
    """Where each arm's positions lie."""
    return lay_out(arms)[0]
