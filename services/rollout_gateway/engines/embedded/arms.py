"""Reads the arms of the embedded engine and checks their shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.arm_names import OFF, read_arm
from paceline.errors import ConfigError
from paceline.speculators.base import DraftShape

MAX_STEPS, MAX_TOPK, MAX_TOKENS = 15, 16, 64


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to draft."""

    name: str
    speculator: str  # empty: off
    shape: DraftShape


NOTHING = DraftShape(steps=0)


def parse_arm(name: str, speculators: Sequence[str], *, chains_only: bool = False) -> Arm:
    """An arm from its name. Raises ConfigError naming what this engine can do."""
    if name == OFF:
        return Arm(OFF, "", NOTHING)
    found = read_arm(name)
    if found is None:
        raise ConfigError(
            "not an arm", seen=name, allowed=f"{OFF} or <speculator>:<steps>_<topk>_<draft tokens>"
        )
    if found.speculator not in speculators:
        raise ConfigError(
            f"arm {name} needs a speculator that is not loaded",
            seen=name,
            allowed=list(speculators),
        )
    steps, topk, tokens = found.steps, found.topk, found.draft_tokens
    if not (1 <= steps <= MAX_STEPS and 1 <= topk <= MAX_TOPK):
        raise ConfigError(
            "no such tree", seen=name, allowed=f"steps 1-{MAX_STEPS}, topk 1-{MAX_TOPK}"
        )
    if chains_only and topk != 1:
        raise ConfigError(
            "verification by rejection drafts chains", seen=name, allowed="topk 1, or same_draw"
        )
    if topk == 1 and tokens != steps + 1:
        raise ConfigError(
            "a chain has as many nodes as steps and root",
            seen=name,
            allowed=f"{steps + 1} draft tokens",
        )
    largest = min(1 + topk + (steps - 1) * topk**2, MAX_TOKENS)
    if not 2 <= tokens <= largest:
        raise ConfigError(
            "no tree of this engine has so many nodes",
            seen=name,
            allowed=f"2-{largest} draft tokens",
        )
    return Arm(name, found.speculator, DraftShape(steps, topk, tokens - 1))


def slack(arms: Iterable[Arm]) -> int:
    """Cache positions that a round may use behind the last known token: verified nodes, or rows
    that drafting keeps.
    """
    used = [
        max(arm.shape.drafts + 1, arm.shape.topk * max(arm.shape.steps - 1, 0) + 1) for arm in arms
    ]
    return max(used, default=1) + 1
