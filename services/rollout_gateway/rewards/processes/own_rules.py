"""Scores by users' own rules: `python -m rollout_gateway.rewards.processes.own_rules`.

One request at a time: {"load": path} finds and builds a rule, {"score": path, "episode": ...} calls
it and checks its answer. Imports what the rules import and nothing more.
"""

from __future__ import annotations

import inspect
from asyncio import Runner
from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError
from paceline.plugins import import_object
from rollout_gateway.environments.base import Episode
from rollout_gateway.rewards.episode_json import episode_from
from rollout_gateway.rewards.processes.pipes import die_with_gateway, refused, serve, take_pipes

ALLOWED = (
    "package.module:Class or path/to/file.py:Class, a class with score(episode) -> float | None"
)


class OwnRule:
    """One object of the user's class; built once, asked one episode at a time."""

    def __init__(self, path: str, runner: Runner) -> None:
        """Raises ConfigError when the path names no such class or the class cannot be built."""
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
        """What the rule says; a coroutine is run to its end, always on the same event loop.

        Raises what the rule raises, TypeError for what is no number.
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

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """{"loaded": path}, {"refused": why} or {"reward": number or null}.

        Raises what the rule raises.
        """
        if "load" in request:
            return self._load(request["load"])
        return {"reward": self._rules[request["score"]].score(episode_from(request["episode"]))}

    def _load(self, path: str) -> dict[str, Any]:
        try:
            if path not in self._rules:
                self._rules[path] = OwnRule(path, self._runner)
        except ConfigError as error:
            return refused(error)
        return {"loaded": path}


def number(value: Any) -> float | None:
    """None, or the number as float: also those of numpy and torch with one element.

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
    requests, answers = take_pipes()
    die_with_gateway()
    with Runner() as runner:
        serve(OwnRules(runner).answer, requests, answers)


if __name__ == "__main__":
    main()
