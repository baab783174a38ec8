"""Scores by users' own rules, in a separate process.

One request at a time: Load imports and builds a rule, Score calls it and checks its answer. The
process imports no more than the rules need.
"""

from __future__ import annotations

import inspect
from asyncio import Runner
from typing import Any

from paceline.errors import ConfigError
from paceline.plugins import import_object
from paceline.services.rollout_gateway.environments import Episode
from paceline.services.rollout_gateway.rewards.pipes import (
    Answer,
    Done,
    Load,
    Refused,
    Request,
    Rewards,
    serve,
    take_pipes,
)

ALLOWED = (
    "package.module:Class or path/to/file.py:Class, a class with score(episode) -> float | None"
)


class OwnRule:
    """One object of the user's class, built once; scores one episode at a time."""

    def __init__(self, path: str, runner: Runner) -> None:
        """Raises ConfigError when the path leads to no such class or the class cannot be built."""
        try:
            rule = import_object(path)()
        except Exception as error:
            raise ConfigError(
                f"a reward rule cannot be built: {type(error).__name__}: {error}", seen=path
            ) from error
        if not callable(getattr(rule, "score", None)):
            raise ConfigError("a reward rule has no method score", seen=path, allowed=ALLOWED)
        self._rule = rule
        self._runner = runner

    def score(self, episode: Episode) -> float | None:
        """The rule's score; a coroutine runs to its end, always on the same event loop.

        Raises the rule's errors, and TypeError for a value that is no number.
        """
        value = self._rule.score(episode)
        if inspect.isawaitable(value):
            value = self._runner.run(_result(value))
        return number(value)


class OwnRules:
    """The rules of one child."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._rules: dict[str, OwnRule] = {}

    def answer(self, request: Request) -> Answer:
        """Done or Refused, or Rewards. Raises the rule's errors."""
        if isinstance(request, Load):
            try:
                if request.path not in self._rules:
                    self._rules[request.path] = OwnRule(request.path, self._runner)
            except ConfigError as error:
                return Refused.of(error)
            return Done()
        rule = self._rules[request.path]
        return Rewards(tuple(rule.score(episode) for episode in request.episodes))


def number(value: Any) -> float | None:
    """None, or the number as float; numpy and torch values with one element count as numbers.

    Raises TypeError.
    """
    if value is None:
        return None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(
            f"score has to return a float or None, not {type(value).__name__}: {value!r:.200}"
        )
    return float(value)


async def _result(value: Any) -> Any:
    return await value


def main() -> None:
    """Serve until the gateway ends."""
    pipes = take_pipes()
    with Runner() as runner:
        serve(OwnRules(runner).answer, *pipes)


if __name__ == "__main__":
    main()
