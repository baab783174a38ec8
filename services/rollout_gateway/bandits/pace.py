"""How fast the machine runs now, learned from the rounds of all arms. Owns what arms share, not what is an arm's own.

Only the arm that runs is measured, so a change of its own cost looks like one of the machine. A round moves the pace by
as much as it moves its arm, times the arm's share of the last rounds: an arm that runs alone speaks for the machine, and
one that is tried now and then and contradicts the others speaks for itself. Arms that rest are expected to have moved
with the pace. Nobody has measured that, so they may still be as fast as they were: the part of the pace that is `ahead`.
"""

from __future__ import annotations

from dataclasses import dataclass

KEEP = 1.0 - 1.0 / 32
"""Per round, of an arm's share of the last rounds."""
SETTLE = 1.0 / 16
CLIP = 0.3  # log seconds beyond which a round is suspected to be an outlier


@dataclass(slots=True)
class Measured:
    """How often of late, and at which pace, an arm was measured."""

    share: float = 0.0  # of the last rounds of all arms, as it was in its own last round
    last: int = 0  # number of that round
    pace: float = 0.0  # at which its rounds were, each weighed by what it counts in the arm's factor
    falls: float = 0.0  # of Pace when it was last as expected


@dataclass(slots=True)
class Pace:
    """Log of the seconds that any round takes over those that it took at the start."""

    log: float = 0.0
    rounds: int = 0
    settled: float = 0.0  # the same, some rounds late: a burst of slow rounds is no reason to try other arms
    falls: float = 0.0  # logs by which arms became faster of themselves, summed: or was it the machine?

    def learn(self, arm: Measured, off: float, part: float) -> float:
        """A round that took exp(off) times its expected seconds, of which `part` is believed; the machine's log in it."""
        self.rounds += 1
        arm.share = arm.share * KEEP ** (self.rounds - arm.last) + 1.0 - KEEP
        arm.last = self.rounds
        moved = part * off * arm.share / (1.0 - KEEP**self.rounds)
        self.log += moved
        self.settled += SETTLE * (self.log - self.settled)
        arm.pace += moved + part * (self.log - arm.pace - moved)
        if off < -CLIP:
            self.falls += moved - part * off
        elif off <= CLIP:
            arm.falls = self.falls
        return moved

    def ahead(self, arm: Measured) -> float:
        """By how much the machine is thought to be slower than when the arm was measured; a log, at least 0."""
        return max(min(self.log, self.settled) - arm.pace, 0.0) + self.falls - arm.falls
