"""A rule that runs in a child process.

Owns nothing: the child has the rule, Children has the child.
"""

from __future__ import annotations

from rollout_gateway.environments.base import Episode
from rollout_gateway.rewards.processes.pool import Children


class ChildRule:
    """The rule at an import path, asked in a child."""

    def __init__(self, path: str, children: Children) -> None:
        self._path = path
        self._children = children

    async def prepare(self) -> None:
        """Raises ConfigError when the rule cannot be built, Unavailable, DeadlineExceeded."""
        await self._children.load(self._path)

    async def score(self, episode: Episode) -> float | None:
        """Raises Unscored, ConfigError or Unavailable, see Children.score."""
        return await self._children.score(self._path, episode)
