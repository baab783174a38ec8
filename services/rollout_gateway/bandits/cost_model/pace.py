"""Learns how seconds move from what is expected: with the machine's pace, and with the batch.

The pace is how fast the machine runs now, from the rounds of all arms. Only the arm that runs is
measured, so a change of its own cost looks like one of the machine. A round moves the pace by as
much as it moves its arm, times the arm's share of the last rounds: an arm that runs alone speaks
for the machine; one that is tried now and then, and contradicts the others, speaks for itself. Arms
that rest are expected to have moved with the pace. Nobody has measured that, so an arm may still be
as fast as it was when the pace was; and where an arm that is seldom used turns out faster than
expected, the machine may have become so, and all arms with it. Both are reasons to look at an arm
again, not to think it faster.
"""

from __future__ import annotations

from dataclasses import dataclass

CLIP = 0.3  # log seconds beyond which a round is suspected to be an outlier
KEEP = 1.0 - 1.0 / 32  # per round, of an arm's share of the last rounds
SELDOM = 0.5  # share of the last rounds below which an arm does not speak for the machine
SETTLE = 1.0 / 48  # per round; a burst of slow rounds is no reason to look at other arms
MOST_HOPE = 1.0
FIRST_SLOPE = 0.1
"""Of 1 + slope x batch, while nothing is known: ten rows double a round's seconds."""
LEAST_SLOPE, MOST_SLOPE = 1e-3, 1.0
FIRST_WEIGHT = 0.3
"""What the first slope is worth, in rounds times squared relative spread of their batch sizes."""
FIT_KEEP = 1.0 - 1.0 / 256
FIT_ROUNDS = 8


@dataclass(slots=True)
class Measured:
    """How often of late, and at which pace, an arm was measured."""

    share: float = 0.0  # of the last rounds of all arms, as it was in its own last round
    last: int = 0  # number of that round
    # at which its rounds were, each weighed by what it counts in the arm's factor
    pace: float = 0.0
    falls: float = 0.0  # those of the pace when it was last as fast as expected


@dataclass(slots=True)
class MachinePace:
    """Log of the seconds that any round takes over those that it took at the start."""

    log: float = 0.0
    rounds: int = 0
    settled: float = 0.0  # the log, some rounds late
    falls: float = 0.0  # logs by which arms that are seldom used turned out faster, summed

    def learn(self, arm: Measured, off: float, part: float) -> float:
        """A round took exp(off) times what was expected, of which `part` is believed; the log that
        is the machine's.
        """
        self.rounds += 1
        arm.share = arm.share * KEEP ** (self.rounds - arm.last) + 1.0 - KEEP
        arm.last = self.rounds
        share = arm.share / (1.0 - KEEP**self.rounds)
        moved = part * off * share
        self.log += moved
        self.settled += SETTLE * (self.log - self.settled)
        arm.pace += moved + part * (self.log - arm.pace - moved)
        if abs(off) <= CLIP:
            arm.falls = self.falls
        elif off < 0 and share < SELDOM:
            self.falls += moved - part * off
        return moved

    def hope(self, arm: Measured) -> float:
        """Log, 0 to MOST_HOPE, by which an arm may be faster than expected because the pace was
        wrong about it.
        """
        return min(
            max(min(self.log, self.settled) - arm.pace, 0.0) + self.falls - arm.falls, MOST_HOPE
        )


@dataclass(slots=True)
class BatchSlope:
    """1 + slope x batch, by least squares of seconds over batch, relative errors counting alike."""

    slope: float = FIRST_SLOPE
    rounds: int = 0
    weight: float = 0.0  # sums, discounted, of rounds weighed by 1 / seconds squared
    sizes: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0
    products: float = 0.0
    count: float = 0.0

    def at(self, batch: float) -> float:
        """Seconds over those of an empty batch."""
        return 1.0 + self.slope * batch

    def learn(self, batch: int, seconds: float) -> bool:
        """A round; True when the slope has changed."""
        weight = 1.0 / (seconds * seconds)
        self.weight = FIT_KEEP * self.weight + weight
        self.sizes = FIT_KEEP * self.sizes + weight * batch
        self.squares = FIT_KEEP * self.squares + weight * batch * batch
        self.seconds = FIT_KEEP * self.seconds + weight * seconds
        self.products = FIT_KEEP * self.products + weight * batch * seconds
        self.count = FIT_KEEP * self.count + 1.0
        self.rounds += 1
        if self.rounds % FIT_ROUNDS:
            return False
        self.slope = self._fitted()
        return True

    def _fitted(self) -> float:
        mean_size, mean_seconds = self.sizes / self.weight, self.seconds / self.weight
        spread = self.squares / self.weight - mean_size * mean_size
        known = self.count * spread / (mean_size * mean_size)
        if known < 1e-6:
            return self.slope
        growth = (self.products / self.weight - mean_size * mean_seconds) / spread
        empty = mean_seconds - growth * mean_size
        slope = growth / empty if empty > 0 else MOST_SLOPE
        slope = min(max(slope, LEAST_SLOPE), MOST_SLOPE)
        return (known * slope + FIRST_WEIGHT * FIRST_SLOPE) / (known + FIRST_WEIGHT)
