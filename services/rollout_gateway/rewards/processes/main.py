"""A child that scores: `python -m rollout_gateway.rewards.processes.main`.

One request at a time: {"load": path} builds a rule, {"score": path, "episode": ...} asks it.
Imports what the rules import and nothing more.
"""

from __future__ import annotations

from asyncio import Runner
from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError
from rollout_gateway.rewards.own_rule import OwnRule
from rollout_gateway.rewards.processes.episode_json import episode_from
from rollout_gateway.rewards.processes.loop import die_with_gateway, refused, serve, take_pipes


class Child:
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


def main() -> None:
    """Serve until the gateway ends."""
    requests, answers = take_pipes()
    die_with_gateway()
    with Runner() as runner:
        serve(Child(runner).answer, requests, answers)


if __name__ == "__main__":
    main()
