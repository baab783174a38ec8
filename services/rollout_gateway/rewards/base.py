"""What a reward rule sees and gives. Owns no rule."""

from __future__ import annotations

from typing import Protocol

from rollout_gateway.environments.base import Episode


class RewardRule(Protocol):
    """Scores an episode; a pure function of it, or a call of something that is."""

    async def score(self, episode: Episode) -> float | None:
        """One scalar; None when there is no telling: the sample ends unscored, which is not reward 0.

        Raises PacelineError when what scores is away; the sample then ends as failed (infra).
        """
        ...
