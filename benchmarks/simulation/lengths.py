"""Gives every group of samples its response lengths, in tokens: drawn, or as a run has had them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

DEMO = Path(__file__).parent / "demo_lengths.json"
"""Written by record_lengths.py: [[tokens of a sample, ...] of a group, ...] in the run's order."""


class Lengths(Protocol):
    """Where lengths come from: the same for the same group, whatever the schedule."""

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
        """Drawn from the group's own stream of numbers."""
        normal = np.random.default_rng([self.seed, group]).standard_normal(samples)
        drawn = self.median * np.exp(self.sigma * normal)
        return tuple(int(one) for one in np.clip(drawn, 1, self.limit))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Groups as they came; after the last one from the first on."""

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of_demo(cls) -> Recorded:
        """The demo's."""
        return cls(tuple(map(tuple, json.loads(DEMO.read_text(encoding="utf-8")))))

    def of_group(self, group: int, samples: int) -> tuple[int, ...]:
        """A recorded group; its samples again where more are asked for."""
        recorded = self.groups[group % len(self.groups)]
        return tuple(recorded[sample % len(recorded)] for sample in range(samples))
