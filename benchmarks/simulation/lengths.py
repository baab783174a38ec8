"""Gives every group of samples its response lengths, in tokens: drawn or recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

DEMO = Path(__file__).parent / "demo_lengths.json"
"""Written by record_lengths.py: [[tokens of a sample, ...] of a group, ...] in the run's order."""


class Lengths(Protocol):
    """A source of lengths: the same for the same group, under any schedule."""

    def of_group(self, group: int, samples: int) -> tuple[int, ...]:
        """Response tokens of each sample of the run's group number `group`."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(ln(median) + sigma z) tokens, at most `limit`."""

    median: float
    sigma: float
    limit: int
    seed: int

    def of_group(self, group: int, samples: int) -> tuple[int, ...]:
        """Draws lengths from the group's own random stream."""
        normal = np.random.default_rng([self.seed, group]).standard_normal(samples)
        drawn = self.median * np.exp(self.sigma * normal)
        return tuple(int(one) for one in np.clip(drawn, 1, self.limit))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Recorded groups in their order; after the last group, the first group follows again."""

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of_demo(cls) -> Recorded:
        """The recorded groups of the demo."""
        return cls(tuple(map(tuple, json.loads(DEMO.read_text(encoding="utf-8")))))

    def of_group(self, group: int, samples: int) -> tuple[int, ...]:
        """A recorded group; it repeats its samples if more are needed."""
        recorded = self.groups[group % len(self.groups)]
        return tuple(recorded[sample % len(recorded)] for sample in range(samples))
