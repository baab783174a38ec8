"""Leaves the arms of a drafter that is dead: one whose drafts are not accepted. Owns the verdict,
not the choice.

A round of a drafter is its acceptance length less 1, the token that the target gives anyway; the
rounds of all its arms in a batch-size group count together. With `limit` =
BanditSettings.watchdog_rounds:

- The first `limit` rounds, after the start and after `renew`: the drafter is dead when their mean
  is not above 0 by
  more than noise, that is NOISE_Z standard errors of the mean or NOISE_FLOOR tokens, whichever is
  more.
- Later, a drafter that worked dies when nothing is accepted (NOISE_FLOOR at most) in so many rounds
  on end that it is
  as improbable as `limit` heads in a row, by the share q of its rounds in which something was:
  `limit` rounds for q of a half or more, limit ln 2 / -ln(1 - q) below. A drafter that seldom
  proposes, as n-grams, is so not taken for dead.

A dead drafter's arms are not chosen in that group until `renew` names one of them, or until a whole
window of rounds has passed (two, then four, when each trial finds it dead). A drafter without
weights is revived only by the window. `off` drafts nothing and stays. When no arm would be left,
all arms stay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from paceline.arm_names import speculator_of
from paceline.services.rollout_gateway.bandits.base import (
    ArmChoice,
    ArmReport,
    Bandit,
    BanditSettings,
    RoundOutcome,
    Situation,
    group_of,
)
from paceline.speculators.shift import AcceptanceShift
from paceline.telemetry import get_logger
from paceline.trajectory import Target

log = get_logger(__name__)

# one-sided, 10 %: of 20 rounds of one row, one that accepts is noise and two are not
NOISE_Z = 1.28
LONGEST_REST = 4  # windows; each trial in a row that shows no life doubles the rest
# tokens per row; a fresh drafter of a small vocabulary is right this often by chance
NOISE_FLOOR = 0.05


@dataclass(slots=True)
class Pulse:
    """Signs of life of one drafter in one group, since the start or the last `renew`."""

    limit: int  # rounds of the first verdict
    rounds: int = 0
    hits: int = 0  # rounds in which something was accepted
    streak: int = 0  # rounds since the last hit
    total: float = 0.0  # accepted per row, of the first `limit` rounds
    squares: float = 0.0
    dead: bool = False

    def beat(self, accept_length: float) -> bool:
        """Learn of a round; True when it shows that the drafter has died."""
        accepted = accept_length - 1.0
        hit = accepted > NOISE_FLOOR
        self.rounds += 1
        self.hits += hit
        self.streak = 0 if hit else self.streak + 1
        if self.rounds <= self.limit:
            self.total += accepted
            self.squares += accepted * accepted
        was_dead = self.dead
        self.dead |= (self.rounds == self.limit and self.silent_from_the_start) or self.fell_silent
        return self.dead and not was_dead

    @property
    def silent_from_the_start(self) -> bool:
        """True when the first rounds accepted no more than noise."""
        mean = self.total / self.limit
        variance = max(self.squares - self.total * mean, 0.0) / max(self.limit - 1, 1)
        return mean <= max(NOISE_FLOOR, NOISE_Z * math.sqrt(variance / self.limit))

    @property
    def fell_silent(self) -> bool:
        """True when the present streak is too long for a drafter that worked as this one did."""
        if self.streak < self.limit:
            return False
        share = self.hits / max(self.rounds - self.streak, self.limit)
        return share >= 0.5 or (1.0 - share) ** self.streak <= 0.5**self.limit


@dataclass(slots=True)
class WatchedDrafter:
    """What a group knows of one drafter."""

    pulse: Pulse
    rests_until: int = 0  # round of the group; while it is dead
    deaths_at_once: int = 0  # trials in a row that showed no life


class AcceptanceWatchdog:
    """A bandit that keeps another one from the arms of dead drafters."""

    def __init__(self, inner: Bandit, settings: BanditSettings, arms: Sequence[str]) -> None:
        self._inner = inner
        self._groups = settings.groups
        self._limit = settings.watchdog_rounds
        self._names = tuple(arms)
        self._window = settings.window
        self._rounds = dict.fromkeys(settings.groups, 0)
        self._drafters: dict[tuple[int, str], WatchedDrafter] = {}
        self._alive = dict.fromkeys(settings.groups, self._names)
        self._warned: set[str] = set()
        self._deaths: Counter[tuple[int, str]] = Counter()  # since the start

    def choose(self, situation: Situation, names: Sequence[str] = ()) -> ArmChoice:
        """The inner bandit's choice among the arms whose drafters live, or all when none does."""
        alive = self._alive[group_of(self._groups, situation.batch_size)]
        if names:
            alive = tuple(name for name in names if name in alive) or tuple(names)
        return self._inner.choose(situation, alive)

    def observe(self, outcome: RoundOutcome) -> None:
        """Tell the inner bandit of a round, and look for signs of life."""
        self._inner.observe(outcome)
        speculator = speculator_of(outcome.arm)
        group = group_of(self._groups, outcome.situation.batch_size)
        self._rounds[group] += 1
        self._wake(group)
        if speculator:
            drafter = self._drafters.setdefault(
                (group, speculator), WatchedDrafter(Pulse(self._limit))
            )
            if drafter.pulse.beat(outcome.accept_length):
                self._retire(group, speculator, drafter)

    def renew(self, arms: Set[str], changed: Target, shift: AcceptanceShift | None = None) -> None:
        """New drafters live until they prove dead again; a new policy revives nobody."""
        self._inner.renew(arms, changed, shift)
        if changed is not Target.DRAFTER:
            return
        revived = {speculator_of(arm) for arm in arms}
        self._drafters = {
            key: drafter for key, drafter in self._drafters.items() if key[1] not in revived
        }
        self._warned -= revived
        for group in self._groups:
            self._admit(group)

    def reports(self) -> Sequence[ArmReport]:
        """Statistics of every arm and group that was pulled, dead or not, and how often its drafter
        died there.
        """
        return [
            replace(one, drafter_deaths=self._deaths[one.batch_group, speculator_of(one.arm)])
            for one in self._inner.reports()
        ]

    def _wake(self, group: int) -> None:
        """Drafters whose rest is over are tried again."""
        rested = [
            drafter
            for (where, _), drafter in self._drafters.items()
            if where == group and 0 < drafter.rests_until < self._rounds[group]
        ]
        for drafter in rested:
            drafter.pulse, drafter.rests_until = Pulse(self._limit), 0
        if rested:
            self._admit(group)

    def _retire(self, group: int, speculator: str, drafter: WatchedDrafter) -> None:
        pulse = drafter.pulse
        again = drafter.deaths_at_once + 1 if pulse.rounds == self._limit else 1
        drafter.deaths_at_once = again
        drafter.rests_until = self._rounds[group] + self._window * min(
            2 ** (again - 1), LONGEST_REST
        )
        self._admit(group)
        self._deaths[group, speculator] += 1
        if speculator not in self._warned:
            self._warned.add(speculator)
            log.warning(
                "a drafter's tokens are not accepted; its arms rest until it changes",
                speculator=speculator,
                batch_group=group,
                rounds=pulse.rounds,
                rounds_since_accepted=pulse.streak,
            )

    def _admit(self, group: int) -> None:
        dead = {
            speculator
            for (where, speculator), drafter in self._drafters.items()
            if where == group and drafter.pulse.dead
        }
        self._alive[group] = (
            tuple(name for name in self._names if speculator_of(name) not in dead) or self._names
        )
