"""Right or wrong by the answer after the last marker. Owns the comparison, not the marker's choice."""

from __future__ import annotations

from rollout_gateway.environments.base import Episode


class MathAnswer:
    """1.0 when the response ended by itself and what follows its last marker is the task's answer, else 0.0."""

    def __init__(self, marker: str = "#") -> None:
        self._marker = marker

    async def score(self, episode: Episode) -> float:
        _, marker, answer = episode.text.rpartition(self._marker)
        right = episode.finish == "stop" and bool(marker) and same_answer(answer, episode.task.answer)
        return 1.0 if right else 0.0


def same_answer(given: str, expected: str) -> bool:
    """Equal as integers where both are, else equal as text without surrounding space."""
    given, expected = given.strip(), expected.strip()
    try:
        return int(given) == int(expected)
    except ValueError:
        return given == expected and given != ""
