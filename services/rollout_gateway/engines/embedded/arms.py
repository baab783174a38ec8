"""Reads the arms of the embedded engine and checks their shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.arm_names import TreeSize, parse_arm
from paceline.speculators.base import DraftShape

LARGEST = TreeSize(steps=15, topk=16, draft_tokens=64)
"""Of each number the most."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to draft."""

    name: str
    speculator: str  # empty: off
    shape: DraftShape


def embedded_arm(name: str, speculators: Iterable[str], *, chains_only: bool = False) -> Arm:
    """An arm from its name. Raises ConfigError naming what this engine can do."""
    found = parse_arm(name, dict.fromkeys(speculators, not chains_only), LARGEST)
    shape = DraftShape(found.shape.steps, found.shape.topk, found.drafted)
    return Arm(name, found.speculator, shape)


def slack(arms: Iterable[Arm]) -> int:
    """Cache positions that a round may use behind the last known token: verified nodes, or rows
    that drafting keeps.
    """
    used = [
        max(arm.shape.drafts + 1, arm.shape.topk * max(arm.shape.steps - 1, 0) + 1) for arm in arms
    ]
    return max(used, default=1) + 1
