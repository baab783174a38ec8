"""Environments: one file each, named in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import NotFound
from paceline.plugins import OWN, find_variant
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
    """The environment of that name, or a user's own by import path, built from the equipment.

    Raises NotFound; ConfigError for one that cannot be imported.
    """
    if name not in ENVIRONMENTS and ":" not in name:
        allowed = f"{', '.join(sorted(ENVIRONMENTS))}; or your own, {OWN}"
        raise NotFound("no such environment", seen=name, allowed=allowed)
    return find_variant(name, ENVIRONMENTS, "environment")(equipment)


__all__ = ["ENVIRONMENTS", "Environment", "Equipment", "SingleTurn", "ToolUse", "environment"]
