"""Lays out the draft positions of all arms, each family's after the last one's.

An arm `<speculator>:<steps>_<topk>_<draft tokens>` drafts at positions 1 .. steps. Chains (topk 1)
of one speculator share their positions: the first three drafts of a chain of seven are those of a
chain of three. A tree is a family of its own, because what stands at a level depends on its width
and its nodes; so is every chain where drafts are left out before they are verified
(`share_positions` off), since more of a longer one is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.arm_names import read_arm, speculator_of
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DraftSpan:
    """Where an arm's positions lie among those of all families."""

    family: str
    first: int
    steps: int

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + self.steps


def family_and_steps(arm: str, *, shared: bool = True) -> tuple[str, int]:
    """("eagle:1", 3) of "eagle:3_1_4"; the arm's own name for a tree, or if not shared.

    Raises ConfigError.
    """
    found = read_arm(arm)
    if found is None:
        raise ConfigError(
            "cost_model reads steps from arms",
            seen=arm,
            allowed="off or <speculator>:<steps>_<topk>_<n>",
        )
    family = f"{found.speculator}:1" if shared and found.shape.topk == 1 else arm
    return family, found.shape.steps


def lay_out(
    arms: Sequence[str], *, shared: bool = True
) -> tuple[dict[str, DraftSpan], dict[str, DraftSpan]]:
    """Spans by arm (of those that draft) and by family. Raises ConfigError."""
    shapes = {arm: family_and_steps(arm, shared=shared) for arm in arms if speculator_of(arm)}
    longest: dict[str, int] = {}
    for family, steps in shapes.values():
        longest[family] = max(longest.get(family, 0), steps)
    families, first = {}, 0
    for family, steps in longest.items():
        families[family] = DraftSpan(family, first, steps)
        first += steps
    return {
        arm: DraftSpan(name, families[name].first, steps) for arm, (name, steps) in shapes.items()
    }, families
