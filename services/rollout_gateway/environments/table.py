"""Builds an environment by its name, built-in or configured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.errors import NotFound
from paceline.plugins import find_variant
from paceline.services.rollout_gateway.environments import Environment
from paceline.services.rollout_gateway.environments.kinds import SingleTurn, ToolUse
from paceline.services.rollout_gateway.environments.openenv import PREFIX, OpenEnv
from paceline.services.rollout_gateway.environments.toolbox import Toolbox
from paceline.services.rollout_gateway.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Equipment:
    """The gateway's resources that an environment may need."""

    sandbox: Sandbox | None = None
    own: Mapping[str, str] = field(default_factory=dict)  # configured name -> import path
    toolbox: Toolbox = field(default_factory=Toolbox)
    interactions: Mapping[str, str] = field(default_factory=dict)  # name -> import path
    servers: dict[str, OpenEnv] = field(default_factory=dict)  # environments in use, by name


ENVIRONMENTS: dict[str, Callable[[Equipment], Environment]] = {
    "single_turn": lambda equipment: SingleTurn(),
    "tool_use": lambda equipment: ToolUse(equipment.toolbox, equipment.interactions),
}


def environment(name: str, equipment: Equipment = Equipment()) -> Environment:
    """Build the environment of that name, built-in or configured.

    Raises NotFound; ConfigError for a class that cannot be imported.
    """
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name](equipment)
    if name.startswith(PREFIX):
        if name not in equipment.servers:
            equipment.servers[name] = OpenEnv(name)
        return equipment.servers[name]
    if name not in equipment.own:
        allowed = ", ".join(sorted([*ENVIRONMENTS, *equipment.own]))
        allowed += "; gateway.environments adds yours; verifiers:ID; openenv:URL"
        raise NotFound("no such environment", seen=name, allowed=allowed)
    return find_variant(equipment.own[name], ENVIRONMENTS, "environment")(equipment)
