"""Does a response have the form that its task asks for? Owns the pattern language."""

from __future__ import annotations

from fnmatch import fnmatchcase

from paceline.services.rollout_gateway.environments.base import Episode


class FormatRule:
    """1.0 when the whole response matches the task's metadata["format"], else 0.0.

    In the pattern `*` stands for any text, `?` for one character, `[...]` for a set. A task without
    one accepts what ended by itself and holds the marker exactly once.
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
