"""The bandits: bucketed epsilon-greedy, epsilon-greedy and UCB1, each over a sliding window.

The rules of choice are in the modules of each kind.

A table maps draft-token counts in descending order to batch-size groups in ascending order. One
request verifies the most tokens and a full batch the least, so there must be as many counts as
groups. Among arms with the same count, epsilon-greedy compares the median rate in the window; an
arm without rounds counts as infinitely fast. With one arm per count, FastRL's default, nothing is
explored.

FastRL cannot switch speculation off between rounds, so `off` belongs to no bucket and is chosen
only when no other arm may be. Rewards are the protocol's tokens per second. FastRL instead uses the
arm's median acceptance length over all groups.

Every arm is played once. Then the arm with the largest x + sqrt(2 ln n / n_j) is played: x is its
mean reward, n_j its rounds, and n the rounds of all candidate arms. Mean and counts cover the
group's window, so an arm without rounds in the window is played again.

The rule needs rewards in [0, 1]. A round's reward is its tokens per second divided by the highest
rate of any arm in the window. Past rewards are rescaled when that maximum moves, so one very fast
round has no effect after it has left the window.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from paceline.arm_names import read_arm, speculator_of
from paceline.errors import ConfigError
from paceline.services.rollout_gateway.bandits import base
from paceline.speculators.shift import AcceptanceShift
from paceline.trajectory import Target
from paceline.v1.engine_pb2 import ArmStats

BOUND_Z = 2.0  # standard errors added to a rate for its upper bound
TRIAL_PULLS = 4
"""Rounds of an arm that a group's window must hold before the arm counts as tried. The first may be
a warm-up.
"""


class PlayedRound(NamedTuple):
    """Result of one round."""

    arm: str
    tokens: float
    seconds: float
    accept_length: float
    rate: float

    def scaled(self, gain: float) -> PlayedRound:
        """This round with `gain` times its tokens in the same seconds."""
        tokens, length = self.tokens * gain, self.accept_length * gain
        return PlayedRound(self.arm, tokens, self.seconds, length, self.rate * gain)


@dataclass(slots=True)
class ArmWindow:
    """Rounds of one arm in the window, and counts since the start."""

    rates: deque[float] = field(default_factory=deque)  # of each round, oldest first
    tokens: float = 0.0
    seconds: float = 0.0
    accepted: float = 0.0
    squares: float = 0.0  # of the rates
    pulls: int = 0
    explorations: int = 0

    def add(self, one: PlayedRound) -> None:
        """Adds a round."""
        self.rates.append(one.rate)
        self._count(one, 1)

    def drop(self, one: PlayedRound) -> None:
        """Removes the oldest round."""
        self.rates.popleft()
        self._count(one, -1)

    def clear(self) -> None:
        """Removes all rounds; counts since the start stay."""
        self.rates.clear()
        self.tokens = self.seconds = self.accepted = self.squares = 0.0

    def _count(self, one: PlayedRound, sign: int) -> None:
        self.tokens += sign * one.tokens
        self.seconds += sign * one.seconds
        self.accepted += sign * one.accept_length
        self.squares += sign * one.rate * one.rate

    @property
    def rounds(self) -> int:
        """Number of rounds in the window."""
        return len(self.rates)

    @property
    def rate(self) -> float:
        """Tokens per second over the window: all tokens divided by all seconds."""
        return self.tokens / self.seconds if self.rates and self.seconds > 0 else 0.0

    @property
    def rate_at_best(self) -> float:
        """The rate plus BOUND_Z standard errors; infinite without rounds."""
        if not self.rates:
            return math.inf
        mean = sum(self.rates) / self.rounds
        variance = max(self.squares / self.rounds - mean * mean, 0.0)
        spread = math.sqrt(variance / self.rounds) / mean if mean > 0 else 0.0
        return self.rate * (1.0 + BOUND_Z * spread)


class GroupWindow:
    """The last `window` rounds of one batch-size group, over all arms.

    One window for all arms lets old evidence of a rarely used arm expire, so the arm is tried
    again.
    """

    def __init__(self, names: Sequence[str], window: int) -> None:
        self.arms = {name: ArmWindow() for name in names}
        self._rounds: deque[PlayedRound] = deque()
        self._window = window

    def add(self, one: PlayedRound) -> None:
        """Records a round; the oldest one leaves a full window."""
        self._rounds.append(one)
        self.arms[one.arm].add(one)
        if len(self._rounds) > self._window:
            old = self._rounds.popleft()
            self.arms[old.arm].drop(old)

    def renew(self, gains: Mapping[str, float], keep: int) -> None:
        """Scales the newest `keep` rounds of each arm in `gains` by the arm's gain, and makes them
        the newest of the window. Other rounds of these arms are dropped.
        """
        own = [one for one in self._rounds if one.arm in gains]
        self._rounds = deque(one for one in self._rounds if one.arm not in gains)
        left = Counter({name: keep - self.arms[name].rounds for name in gains})
        for name in gains:
            self.arms[name].clear()
        for one in own:
            left[one.arm] += 1
            if left[one.arm] > 0:
                self.add(one.scaled(gains[one.arm]))


def length_gains(arms: Set[str], shift: AcceptanceShift | None) -> dict[str, float]:
    """Ratio of tokens per round with the new drafter, by arm; 1 where it is unknown."""
    gains = dict.fromkeys(arms, 1.0)
    for arm in arms:
        if shift is not None and (name := read_arm(arm)) is not None:
            gains[arm] = shift.length_gain(name.shape.steps)
    return gains


class WindowedBandit(ABC):
    """Base of a bandit with a GroupWindow per batch-size group. A subclass adds the rule."""

    def __init__(self, settings: base.BanditSettings, arms: Sequence[str], seed: int) -> None:
        self._settings = settings
        self._names = tuple(arms)
        self._groups = {one: GroupWindow(arms, settings.window) for one in settings.groups}
        self._random = random.Random(seed)

    def choose(self, situation: base.Situation, names: Sequence[str] = ()) -> base.ArmChoice:
        """Returns the arm of the next round, one of `names`; (): any arm."""
        names = names or self._names
        if len(names) == 1:
            return base.ArmChoice(names[0], explored=False)
        return self._choose(situation, names)

    @abstractmethod
    def _choose(self, situation: base.Situation, names: Sequence[str]) -> base.ArmChoice:
        """Chooses among `names`, which has at least two entries."""

    def observe(self, outcome: base.RoundOutcome) -> None:
        """Records a round."""
        group = self._group(outcome.situation)
        facts = (outcome.tokens, outcome.seconds, outcome.accept_length, outcome.rate)
        group.add(PlayedRound(outcome.arm, *facts))
        group.arms[outcome.arm].pulls += 1
        group.arms[outcome.arm].explorations += outcome.explored

    def renew(self, arms: Set[str], changed: Target, shift: AcceptanceShift | None = None) -> None:
        """After a new drafter, its arms inherit rounds or are tried again.

        A new policy moves all arms a little, and the window follows.
        """
        if changed is Target.DRAFTER:
            gains = length_gains(arms, shift)
            keep = self._settings.inherited_rounds if shift is not None else 0
            for group in self._groups.values():
                group.renew(gains, keep)

    def learn(self, reports: Sequence[ArmStats]) -> None:
        """Adds rounds with the reported means until an arm counts as tried. They are no pulls of
        this bandit.
        """
        for one in reports:
            group = self._groups.get(one.batch_group)
            measured = one.pulls >= TRIAL_PULLS and one.mean_tokens_per_s > 0
            if group is None or one.arm not in group.arms or not measured:
                continue
            tokens, rate = one.batch_group * one.mean_accept_length, one.mean_tokens_per_s
            played = PlayedRound(one.arm, tokens, tokens / rate, one.mean_accept_length, rate)
            for _ in range(TRIAL_PULLS - group.arms[one.arm].rounds):
                group.add(played)

    def reports(self) -> list[ArmStats]:
        """Statistics of every arm and group with at least one pull."""
        return [
            ArmStats(
                arm=name,
                batch_group=smallest,
                pulls=arm.pulls,
                explorations=arm.explorations,
                mean_tokens_per_s=arm.rate,
                mean_accept_length=arm.accepted / max(arm.rounds, 1),
            )
            for smallest, group in self._groups.items()
            for name, arm in group.arms.items()
            if arm.pulls
        ]

    def _group(self, situation: base.Situation) -> GroupWindow:
        return self._groups[base.group_of(self._settings.groups, situation.batch_size)]

    def _nearest(self, situation: base.Situation) -> list[GroupWindow]:
        """The other groups, nearest batch sizes first."""
        groups = self._settings.groups
        own = groups.index(base.group_of(groups, situation.batch_size))
        others = sorted(range(len(groups)), key=lambda index: abs(index - own))[1:]
        return [self._groups[groups[index]] for index in others]


def draft_tokens_of(arm: str) -> int:
    """Tokens per request that a drafting arm verifies, including the root. Raises ConfigError."""
    count = arm.rpartition("_")[2]
    if not count.isdecimal():
        allowed = "<speculator>:..._<draft tokens>"
        raise ConfigError("beg needs the draft tokens of each arm", seen=arm, allowed=allowed)
    return int(count)


def bucket_arms(arms: Sequence[str], groups: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """The arms of each batch-size group; empty tuples when no arm drafts.

    Raises ConfigError when the counts do not match the groups.
    """
    budgets = {arm: draft_tokens_of(arm) for arm in arms if speculator_of(arm)}
    descending = sorted(set(budgets.values()), reverse=True)
    if not descending:
        return dict.fromkeys(groups, ())
    if len(descending) != len(groups):
        message = "beg maps each number of draft tokens to one batch-size group"
        allowed = f"{len(groups)} numbers, for the groups from {list(groups)} rows on"
        raise ConfigError(message, seen=f"draft tokens {descending}", allowed=allowed)
    pairs = zip(groups, descending, strict=True)
    return {group: tuple(arm for arm in budgets if budgets[arm] == one) for group, one in pairs}


def median_rate(arm: ArmWindow) -> float:
    """Median tokens per second of the arm's rounds; infinite without rounds."""
    return median(arm.rates) if arm.rates else float("inf")


class BucketedEpsilonGreedy(WindowedBandit):
    """Chooses the table's bucket for the batch size, and epsilon-greedy within it."""

    def __init__(self, settings: base.BanditSettings, arms: Sequence[str], seed: int) -> None:
        super().__init__(settings, arms, seed)
        self._buckets = bucket_arms(arms, settings.groups)

    def _choose(self, situation: base.Situation, names: Sequence[str]) -> base.ArmChoice:
        bucket = self._bucket(situation.batch_size, names)
        if len(bucket) == 1:
            return base.ArmChoice(bucket[0], explored=False)
        if self._random.random() < self._settings.epsilon:
            return base.ArmChoice(self._random.choice(bucket), explored=True)
        arms = self._group(situation).arms
        chosen = max(bucket, key=lambda name: median_rate(arms[name]))
        return base.ArmChoice(chosen, explored=not arms[chosen].rounds)

    def _bucket(self, batch_size: int, names: Sequence[str]) -> Sequence[str]:
        arms = self._buckets[base.group_of(self._settings.groups, batch_size)]
        own = [arm for arm in arms if arm in names]
        return own or [name for name in names if not speculator_of(name)] or list(names)


HOPELESS = 0.7
"""Share of the best rate, measured in the nearest group that has tried the arm. An arm below this
share is not tried in the present group.
"""


class EpsilonGreedy(WindowedBandit):
    """Explores with probability epsilon, otherwise takes the fastest arm of the batch's group. Only
    arms that may be the best by the evidence of all groups are tried or explored.
    """

    def _choose(self, situation: base.Situation, names: Sequence[str]) -> base.ArmChoice:
        arms = self._group(situation).arms
        untried = [name for name in names if arms[name].rounds < TRIAL_PULLS]
        tried = [name for name in names if name not in untried]
        best = max(tried, key=lambda name: arms[name].rate, default=None)
        hopeful = [name for name in untried if not self._hopeless(name, situation)]
        trial = min(hopeful, key=lambda name: arms[name].rounds, default=None)
        if trial is not None or best is None:
            return base.ArmChoice(trial or names[0], explored=True)
        if self._random.random() < self._settings.epsilon:
            hopeful = [name for name in names if arms[name].rate_at_best >= arms[best].rate]
            chosen = self._random.choice(hopeful)
            return base.ArmChoice(chosen, explored=chosen != best)
        return base.ArmChoice(best, explored=False)

    def _hopeless(self, name: str, situation: base.Situation) -> bool:
        """Whether the nearest group that has tried the arm excludes it as the best."""
        for group in self._nearest(situation):
            if group.arms[name].rounds >= TRIAL_PULLS:
                best = max(one.rate for one in group.arms.values())
                return group.arms[name].rate_at_best < HOPELESS * best
        return False


def ucb1_index(mean: float, rounds: int, total: int) -> float:
    """Upper confidence bound of an arm: `mean` reward in [0, 1], its `rounds` (>= 1), and the
    `total` rounds of all arms.
    """
    return mean + math.sqrt(2.0 * math.log(total) / rounds)


def highest_rate(arms: Iterable[ArmWindow]) -> float:
    """Highest tokens per second of any round in the window; 0 without rounds."""
    return max((rate for arm in arms for rate in arm.rates), default=0.0)


class UCB1(WindowedBandit):
    """Takes the arm with the largest upper confidence bound in the batch's group, without
    randomness.
    """

    def _choose(self, situation: base.Situation, names: Sequence[str]) -> base.ArmChoice:
        """Chooses an arm; `explored` is true if its mean is below the best mean."""
        arms = self._group(situation).arms
        for name in names:
            if not arms[name].rounds:
                return base.ArmChoice(name, explored=True)
        total = sum(arms[name].rounds for name in names)
        scale = highest_rate(arms.values()) or 1.0
        means = {name: sum(arms[name].rates) / arms[name].rounds / scale for name in names}
        chosen = max(names, key=lambda name: ucb1_index(means[name], arms[name].rounds, total))
        return base.ArmChoice(chosen, explored=means[chosen] < max(means.values()))
