"""What a reward rule sees and gives. Owns no rule."""

from __future__ import annotations

from typing import Protocol

from rollout_gateway.environments.base import Episode


class RewardRule(Protocol):
    """Scores an episode; a pure function of it."""

    def score(self, episode: Episode) -> float:
        """One scalar."""
        ...
