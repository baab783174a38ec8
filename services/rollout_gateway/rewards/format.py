"""Scores whether a response matches its task's pattern."""

from __future__ import annotations

from fnmatch import fnmatchcase

from paceline.services.rollout_gateway.environments.base import Episode


class FormatRule:
    """1.0 when the whole response matches the task's metadata["format"], else 0.0.

    In the pattern `*` matches any text, `?` one character, `[...]` a set. Without a pattern, a
    response that ended by itself and contains the marker exactly once gets 1.0.
    """

    def __init__(self, marker: str = "#") -> None:
        self._marker = marker

    async def score(self, episode: Episode) -> float:
        pattern = episode.task.metadata.get("format")
        if episode.finish != "stop":
            return 0.0
        if pattern is None:
            return float(episode.text.count(self._marker) == 1)
        return float(fnmatchcase(episode.text, pattern))
