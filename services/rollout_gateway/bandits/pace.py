"""How fast the machine runs now, learned from the rounds of all arms. Owns what arms share, not
what is an arm's own.

Only the arm that runs is measured, so a change of its own cost looks like one of the machine. A
round moves the pace by as much as it moves its arm, times the arm's share of the last rounds: an
arm that runs alone speaks for the machine; one that is tried now and then, and contradicts the
others, speaks for itself. Arms that rest are expected to have moved with the pace. Nobody has
measured that, so an arm may still be as fast as it was when the pace was; and where an arm that is
seldom used turns out faster than expected, the machine may have become so, and all arms with it.
Both are reasons to look at an arm again, not to think it faster.
"""

from __future__ import annotations

from dataclasses import dataclass

CLIP = 0.3  # log seconds beyond which a round is suspected to be an outlier
KEEP = 1.0 - 1.0 / 32  # per round, of an arm's share of the last rounds
SELDOM = 0.5  # share of the last rounds below which an arm does not speak for the machine
SETTLE = 1.0 / 48  # per round; a burst of slow rounds is no reason to look at other arms
MOST_HOPE = 1.0


@dataclass(slots=True)
class Measured:
    """How often of late, and at which pace, an arm was measured."""

    share: float = 0.0  # of the last rounds of all arms, as it was in its own last round
    last: int = 0  # number of that round
    pace: float = (
        0.0  # at which its rounds were, each weighed by what it counts in the arm's factor
    )
    falls: float = 0.0  # those of the pace when it was last as fast as expected


@dataclass(slots=True)
class Pace:
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
