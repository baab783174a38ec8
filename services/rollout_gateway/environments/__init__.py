"""Environments: one file each, named in the table."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import NotFound
from rollout_gateway.environments.base import Environment
from rollout_gateway.environments.single_turn import SingleTurn

ENVIRONMENTS: dict[str, Callable[[], Environment]] = {"single_turn": SingleTurn}


def environment(name: str) -> Environment:
    """The environment of that name. Raises NotFound."""
    if name not in ENVIRONMENTS:
        raise NotFound("no such environment", seen=name, allowed=", ".join(sorted(ENVIRONMENTS)))
    return ENVIRONMENTS[name]()


__all__ = ["ENVIRONMENTS", "Environment", "SingleTurn", "environment"]
