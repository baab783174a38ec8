"""Environments: one file each, named in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import NotFound
from rollout_gateway.environments.base import Environment
from rollout_gateway.environments.single_turn import SingleTurn
from rollout_gateway.environments.tool_use import ToolUse
from rollout_gateway.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Equipment:
    """What the gateway has that an environment may need."""

    sandbox: Sandbox | None = None


ENVIRONMENTS: dict[str, Callable[[Equipment], Environment]] = {
    "single_turn": lambda equipment: SingleTurn(),
    "tool_use": lambda equipment: ToolUse(equipment.sandbox),
}


def environment(name: str, equipment: Equipment = Equipment()) -> Environment:
    """The environment of that name. Raises NotFound."""
    if name not in ENVIRONMENTS:
        raise NotFound("no such environment", seen=name, allowed=", ".join(sorted(ENVIRONMENTS)))
    return ENVIRONMENTS[name](equipment)


__all__ = ["ENVIRONMENTS", "Environment", "Equipment", "SingleTurn", "ToolUse", "environment"]
