"""How an arm's seconds grow with the batch, learned from its rounds.

Owns the slope, not the level.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SLOPE = 0.1
"""Of 1 + slope x batch, while nothing is known: ten rows double a round's seconds."""
LEAST_SLOPE, MOST_SLOPE = 1e-3, 1.0
FIRST_WEIGHT = 0.3
"""What the first slope is worth, in rounds times squared relative spread of their batch sizes."""
KEEP = 1.0 - 1.0 / 256
FIT_ROUNDS = 8


@dataclass(slots=True)
class Shape:
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
        self.weight = KEEP * self.weight + weight
        self.sizes = KEEP * self.sizes + weight * batch
        self.squares = KEEP * self.squares + weight * batch * batch
        self.seconds = KEEP * self.seconds + weight * seconds
        self.products = KEEP * self.products + weight * batch * seconds
        self.count = KEEP * self.count + 1.0
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
