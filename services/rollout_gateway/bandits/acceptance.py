"""How many tokens a round of each arm is expected to give, from which drafts were accepted. Knows
no seconds.

An arm `<speculator>:<steps>_<topk>_<draft tokens>` drafts at positions 1 .. steps. Chains (topk 1)
of one speculator share their positions: the first three drafts of a chain of seven are those of a
chain of three. A tree is a family of its own, because what stands at a level depends on its width
and its nodes; so is every chain where drafts are left out before they are verified
(`share_positions` off), since more of a longer one is. With a_p the chance that the draft at
position p is accepted once those before it were (Leviathan et al. 2023, without assuming the a_p
equal),

    E[tokens | steps] = 1 + sum over k = 1 .. steps of a_1 ... a_k.

A round that accepts n of its drafts shows n successes and, at position n + 1, a failure (unless it
drafted no further or the response reached its limit there). Evidence is kept per batch-size group,
at most a window of trials a position, and fades while none comes. What a group does not know it
takes from all groups together, and what nobody knows of a position from the position before it. A
request's own rounds shift its group's chances: a Beta prior of ROW_STRENGTH trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.arm_names import read_arm, speculator_of
from paceline.errors import ConfigError
from paceline.trajectory import Target
from rollout_gateway.bandits.base import RowFacts
from rollout_gateway.bandits.evidence import AcceptanceEvidence

FIRST_CHANCE = 0.6  # of the first draft of a drafter that nothing is known of
GUESS_STRENGTH = 1.0  # trials that the position before is worth
POOL_STRENGTH = 8.0  # trials that all groups together are worth to one of them
ROW_STRENGTH = 12.0  # trials that the group is worth to a request
ROW_KEEP = 1.0 - 1.0 / 64  # of a request's evidence, per round of it
BOUND_Z = 0.5  # standard deviations of the optimistic chance
IDLE_SHARE = 0.2  # of the window: rounds in which evidence that is not renewed fades to 1 / e
FIRST_SLOTS = 64
TRIAL_ROWS = 4  # after which a drafter is no longer new
OLD_TRIALS = 1.0  # what old evidence is worth when a drafter is tried anew
SLACK = 1.02  # by which a window of trials may be exceeded before it is cut
STALE_SHARE = 0.02  # rows since beliefs were made anew, as a share of the trials they rest on
STALE_ROUNDS = 4  # after which they are made anew in any case
POLICY_TRIALS = 64.0  # a position's evidence is worth at most this after a new policy

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


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


def family_and_steps(arm: str, *, shared: bool = True) -> tuple[str, int]:
    """("eagle:1", 3) of "eagle:3_1_4"; the arm's own name for a tree, or if not shared.

    Raises ConfigError.
    """
    found = read_arm(arm)
    if found is None:
        raise ConfigError(
            "cost_model reads steps from arms",
            seen=arm,
            allowed="off or <speculator>:<steps>_<topk>_<n>",
        )
    family = f"{found.speculator}:1" if shared and found.topk == 1 else arm
    return family, found.steps


def lay_out(arms: Sequence[str], *, shared: bool = True) -> tuple[dict[str, Span], dict[str, Span]]:
    """Spans by arm (of those that draft) and by family. Raises ConfigError."""
    shapes = {arm: family_and_steps(arm, shared=shared) for arm in arms if speculator_of(arm)}
    longest: dict[str, int] = {}
    for family, steps in shapes.values():
        longest[family] = max(longest.get(family, 0), steps)
    families, first = {}, 0
    for family, steps in longest.items():
        families[family] = Span(family, first, steps)
        first += steps
    return {
        arm: Span(name, families[name].first, steps) for arm, (name, steps) in shapes.items()
    }, families


@dataclass(frozen=True, slots=True)
class Beliefs:
    """What is expected in one batch-size group; tables by position have one place for each of all
    families.
    """

    chances: Floats  # [P] of a draft to be accepted once those before it were
    tokens: Sequence[float]  # [A] expected of a row in a round of each arm
    bound: Sequence[float]  # [A] the same at best


class Acceptance:
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
        self._accepted, self._trials = (
            np.zeros((2, len(groups), positions)),
            np.zeros((2, len(groups), positions)),
        )
        self._idle_keep = 1.0 - 1.0 / max(window * IDLE_SHARE, 2.0)
        self._window = float(window)
        self._beliefs: list[Beliefs | None] = [None] * len(groups)
        self._stale_rows = self._stale_rounds = 0  # since beliefs were made
        self._pool = np.zeros(
            (2, positions)
        )  # accepted and trials of all groups; fades with the rounds of every group
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
            trials, accepted = (
                trials[..., span.first : span.end],
                accepted[..., span.first : span.end],
            )
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
            reached = np.bincount(accepted, minlength=span.steps + 1)[::-1].cumsum()[::-1]
            fresh = reached[:-1] if more.all() else reached[:-1] - _ends(accepted, more, span.steps)
            keep[0, group, span.first : span.end][fresh > 0] = 1.0
        self._trials *= keep
        self._accepted *= keep
        self._pool *= keep[0, group]
        if span is not None:
            self._seen[group][span.family] += len(slots)
            own, end = self._trials[0, group], span.end
            own[span.first : end] += fresh
            self._accepted[0, group, span.first : end] += reached[1:]
            self._pool[0, span.first : end] += reached[1:]
            self._pool[1, span.first : end] += fresh
            if own.max() > SLACK * self._window:
                self._cap(group, self._window)
        self._age(
            len(slots), self._window if span is None else float(self._trials[0, group, span.first])
        )
        if span is not None:
            self.rows.observe(slots, span, accepted, more, self.beliefs(group).chances)

    def _age(self, rows: int, trials: float) -> None:
        """Beliefs outlive a few rounds where these change next to nothing."""
        self._stale_rows += rows
        self._stale_rounds += 1
        if self._stale_rows > STALE_SHARE * trials or self._stale_rounds >= STALE_ROUNDS:
            self._changed()

    def _believe(self, group: int) -> Beliefs:
        pool_accepted, pool_trials = self._pool.tolist()
        accepted, trials = (
            self._accepted[:, group].sum(axis=0).tolist(),
            self._trials[:, group].sum(axis=0).tolist(),
        )
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

    def _cap(self, groups: int | slice, most: float) -> None:
        scale = most / np.maximum(self._trials[:, groups], most)
        self._trials[:, groups] *= scale
        self._accepted[:, groups] *= scale
        self._pool *= most / np.maximum(self._pool[1], most)

    def _changed(self) -> None:
        self._stale_rows = self._stale_rounds = 0
        self._beliefs = [None] * len(self._beliefs)

    def forget(self, arms: Set[str], changed: Target) -> None:
        """New drafter: nothing is known of its positions.

        New policy: what is known weighs little.
        """
        if changed is Target.POLICY:
            self._cap(slice(None), POLICY_TRIALS)
        else:
            touched = {
                span.family for arm in arms if (span := self._spans[self._index[arm]]) is not None
            }
            spans = [self._families[family] for family in sorted(touched)]
            for span in spans:
                self._trials[:, :, span.first : span.end] = self._accepted[
                    :, :, span.first : span.end
                ] = 0.0
                self._pool[:, span.first : span.end] = 0.0
                for seen in self._seen:
                    seen[span.family] = 0
            self._changed()
            for span in spans:
                self.rows.forget(span, self.beliefs(0).tokens)
        self._changed()

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
        self._cap(slice(None), self._window)
        self._changed()


class RowAcceptance:
    """Drafts accepted of each running request, by slot; a slot is a row of the tables here, not of
    the engine.
    """

    def __init__(self, positions: int, spans: Sequence[Span | None]) -> None:
        self._accepted, self._trials = (
            np.zeros((FIRST_SLOTS, positions)),
            np.zeros((FIRST_SLOTS, positions)),
        )
        self.tokens: Floats = np.ones(
            (FIRST_SLOTS, len(spans))
        )  # [slots, A] expected in a round of each arm
        self.generated, self.limits = (
            np.zeros(FIRST_SLOTS),
            np.zeros(FIRST_SLOTS),
        )  # response tokens: so far, at most
        self._free = list(range(FIRST_SLOTS - 1, -1, -1))
        self._slots: dict[int, int] = {}
        counts, places = np.arange(positions + 1)[:, None], np.arange(positions)
        # By drafts accepted and position; a draft was tried when the one before it was accepted.
        self._hits, self._tried = (
            (places < counts).astype(np.float64),
            (places <= counts).astype(np.float64),
        )
        families = {span.family for span in spans if span is not None}
        self._arms = {
            family: [
                index
                for index, span in enumerate(spans)
                if span is not None and span.family == family
            ]
            for family in families
        }  # by family: its arms, and the last drafts of each
        self._lasts = {
            family: [span.steps - 1 for span in spans if span is not None and span.family == family]
            for family in families
        }

    def follow(self, rows: Sequence[RowFacts], tokens: Sequence[float]) -> tuple[Counts, list[int]]:
        """As Acceptance.follow; `tokens` [A] is what new requests are expected to be given."""
        known, ended = self._slots, []
        slots = [known.get(row[0], -1) for row in rows]
        if -1 in slots:
            slots = [
                self._begin(row, tokens) if slot < 0 else slot
                for row, slot in zip(rows, slots, strict=True)
            ]
        if len(known) > len(rows):
            for request_id in known.keys() - {row[0] for row in rows}:
                slot = known.pop(request_id)
                ended.append(int(self.generated[slot]))
                self._free.append(slot)
        return np.array(slots), ended

    def _begin(self, row: RowFacts, tokens: Sequence[float]) -> int:
        slot = self._slots.get(
            row.request_id
        )  # requests that are not ours share an id, hence a slot
        if slot is None:
            slot = self._slots[row.request_id] = self._take()
        self._accepted[slot] = self._trials[slot] = 0.0
        self.tokens[slot], self.generated[slot], self.limits[slot] = (
            tokens,
            row.generated,
            row.limit,
        )
        return slot

    def advance(self, slots: Counts, taken: Counts) -> Flags:
        """A round gave the requests in `slots` [B] so many tokens [B]; whether each may go on."""
        generated = self.generated[slots] + taken
        self.generated[slots] = generated
        return generated < self.limits[slots]

    def _take(self) -> int:
        if not self._free:
            size = len(self._trials)
            tables = (self._accepted, self._trials, self.tokens)
            self._accepted, self._trials, self.tokens = (
                np.concatenate((one, one)) for one in tables
            )
            self.generated, self.limits = np.tile(self.generated, 2), np.tile(self.limits, 2)
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def observe(
        self, slots: Counts, span: Span, accepted: Counts, more: Flags, group: Floats
    ) -> None:
        """Count a round's drafts for the requests in `slots` [B]; group: chances of the group's
        positions [P].
        """
        hits, tried = self._hits[accepted, : span.steps], self._tried[accepted, : span.steps]
        if not more.all():
            tried = np.where(more[:, None], tried, hits)
        known, seen = self._accepted[slots], self._trials[slots]
        known *= ROW_KEEP
        seen *= ROW_KEEP
        known[:, span.first : span.end] += hits
        seen[:, span.first : span.end] += tried
        self._accepted[slots], self._trials[slots] = known, seen
        arms, lasts = self._arms[span.family], self._lasts[span.family]
        part = slice(span.first, span.first + max(lasts) + 1)
        chances = (known[:, part] + ROW_STRENGTH * group[part]) / (seen[:, part] + ROW_STRENGTH)
        sums = chances.cumprod(axis=1).cumsum(axis=1)
        self.tokens[slots[:, None], arms] = 1.0 + sums[:, lasts]

    def forget(self, span: Span, tokens: Sequence[float]) -> None:
        """A family drafts otherwise from now on: it is expected to give every request as much,
        `tokens` [A].
        """
        self._accepted[:, span.first : span.end] = self._trials[:, span.first : span.end] = 0.0
        arms = self._arms[span.family]
        self.tokens[:, arms] = [tokens[arm] for arm in arms]


def _ends(accepted: Counts, more: Flags, steps: int) -> Counts:
    """Rows [steps] that ended with so many drafts accepted: the next one was not refused."""
    return np.bincount(accepted[~more], minlength=steps + 1)[:-1]
