"""Rests the arms of a drafter whose drafts are not accepted.

The watchdog judges drafters and leaves the choice among living arms to another bandit. A round
counts its acceptance length minus 1, since the target gives one token anyway. The rounds of all
arms of a drafter in a batch-size group count together. With `limit` =
BanditSettings.watchdog_rounds:

- At the start and after `renew`, the first `limit` rounds decide. The drafter is dead if their mean
  does not exceed 0 by more than noise: NOISE_Z standard errors of the mean, or NOISE_FLOOR tokens
  if that is more.
- Later, a working drafter dies after a long streak without acceptance (at most NOISE_FLOOR). The
  streak must be as improbable as `limit` heads in a row, given the share q of its rounds with
  acceptance: `limit` rounds if q is a half or more, otherwise limit ln 2 / -ln(1 - q). A drafter
  that seldom proposes, such as n-grams, therefore does not count as dead.

A dead drafter's arms are not chosen in that group until `renew` names one, or until a whole window
of rounds has passed (two, then four windows, when each trial fails). A drafter without weights is
revived by the window alone. `off` drafts nothing and stays. If no arm would be left, all arms stay.
"""

import math
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

from paceline.arm_names import speculator_of
from paceline.services.rollout_gateway.bandits import base
from paceline.speculators.shift import AcceptanceShift
from paceline.trajectory import Target
from paceline.v1.engine_pb2 import ArmStats

# One-sided 10 %: among 20 rounds of one request, one round with acceptance is noise, two are not.
NOISE_Z = 1.28
LONGEST_REST = 4  # in windows; each failed trial in a row doubles the rest
# Tokens per request. A fresh drafter of a small vocabulary is right this often by chance.
NOISE_FLOOR = 0.05


@dataclass(slots=True)
class Pulse:
    """Acceptance of one drafter in one group, since the start or the last `renew`."""

    limit: int  # rounds before the first verdict
    rounds: int = 0
    hits: int = 0  # rounds with acceptance
    streak: int = 0  # rounds since the last acceptance
    total: float = 0.0  # accepted per request, summed over the first `limit` rounds
    squares: float = 0.0
    dead: bool = False
    rests_until: int = 0  # round of the group until which a dead drafter rests
    failures: int = 0  # failed trials in a row

    def record_round(self, accept_length: float) -> bool:
        """Records a round. Returns True when this round shows that the drafter has died."""
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
        """True when the present streak is too long, given the drafter's earlier share of hits."""
        if self.streak < self.limit:
            return False
        share = self.hits / max(self.rounds - self.streak, self.limit)
        return share >= 0.5 or (1.0 - share) ** self.streak <= 0.5**self.limit


class AcceptanceWatchdog:
    """A bandit that hides the arms of dead drafters from an inner bandit."""

    def __init__(
        self, inner: base.Bandit, settings: base.BanditSettings, arms: Sequence[str]
    ) -> None:
        self._inner = inner
        self._settings = settings
        self._speculators = {arm: speculator_of(arm) for arm in arms}
        self._rounds: Counter[int] = Counter()  # by group
        self._pulses: dict[tuple[int, str], Pulse] = {}  # by group and drafter
        self._deaths: Counter[tuple[int, str]] = Counter()  # since the process started

    def choose(self, situation: base.Situation, names: Sequence[str] = ()) -> base.ArmChoice:
        """The inner bandit's choice among arms of living drafters, or among all if no drafter
        lives.
        """
        group = base.group_of(self._settings.groups, situation.batch_size)
        names = names or tuple(self._speculators)
        drafters = {name: self._speculators.get(name, "") for name in names}
        pulses = {name: self._pulses.get((group, one)) for name, one in drafters.items()}
        alive = tuple(name for name, pulse in pulses.items() if pulse is None or not pulse.dead)
        return self._inner.choose(situation, alive or names)

    def observe(self, outcome: base.RoundOutcome) -> None:
        """Passes a round to the inner bandit, and updates the drafter's record."""
        self._inner.observe(outcome)
        group = base.group_of(self._settings.groups, outcome.situation.batch_size)
        self._rounds[group] += 1
        limit = self._settings.watchdog_rounds
        for key, pulse in self._pulses.items():
            if key[0] == group and pulse.dead and pulse.rests_until < self._rounds[group]:
                self._pulses[key] = Pulse(limit, failures=pulse.failures)  # a trial after the rest
        if speculator := self._speculators[outcome.arm]:
            pulse = self._pulses.setdefault((group, speculator), Pulse(limit))
            if pulse.record_round(outcome.accept_length):
                pulse.failures = pulse.failures + 1 if pulse.rounds == limit else 1
                windows = min(2 ** (pulse.failures - 1), LONGEST_REST)
                pulse.rests_until = self._rounds[group] + self._settings.window * windows
                self._deaths[group, speculator] += 1

    def renew(self, arms: Set[str], changed: Target, shift: AcceptanceShift | None = None) -> None:
        """Revives the drafters of these arms if the drafter changed; a new policy revives none."""
        self._inner.renew(arms, changed, shift)
        if changed is Target.DRAFTER:
            revived = {speculator_of(arm) for arm in arms}
            self._pulses = {key: one for key, one in self._pulses.items() if key[1] not in revived}

    def learn(self, reports: Sequence[ArmStats]) -> None:
        """Passes the statistics to the inner bandit."""
        self._inner.learn(reports)

    def reports(self) -> Sequence[ArmStats]:
        """Statistics of every arm and group with at least one pull, dead arms included, with the
        number of deaths of the arm's drafter.
        """
        reports = self._inner.reports()
        for one in reports:
            one.drafter_deaths = self._deaths[one.batch_group, speculator_of(one.arm)]
        return reports
