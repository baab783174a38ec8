"""Lists the reward rules in one table, builds them, and checks and counts their scores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from paceline.errors import ConfigError, InvalidInput, NotFound, PacelineError
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.config import RewardsConfig
from paceline.services.rollout_gateway.environments.base import Episode
from paceline.services.rollout_gateway.rewards.base import (
    Closes,
    Prepares,
    RewardRule,
    RuleScore,
    Unscored,
)
from paceline.services.rollout_gateway.rewards.code_tests import CodeTests
from paceline.services.rollout_gateway.rewards.format import FormatRule
from paceline.services.rollout_gateway.rewards.math_answer import MATH_EQUAL, MathAnswer
from paceline.services.rollout_gateway.rewards.mixture import Mixture, check_mixtures
from paceline.services.rollout_gateway.rewards.model import ModelReward
from paceline.services.rollout_gateway.rewards.processes.pool import Children, ChildRule
from paceline.services.rollout_gateway.rewards.remote import RemoteReward
from paceline.services.rollout_gateway.sandbox import Sandbox
from paceline.telemetry import get_logger
from paceline.trajectory import REWARD_RANGE, is_reward

log = get_logger(__name__)
SHOWN = 500
"""Maximum characters of an exception in the log."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Resources for building rules."""

    config: RewardsConfig
    children: Children
    sandbox: Sandbox


REWARDS: dict[str, Callable[[Parts], RewardRule]] = {
    "math_answer": lambda parts: MathAnswer(
        parts.config.marker, ChildRule(MATH_EQUAL, parts.children)
    ),
    "format": lambda parts: FormatRule(parts.config.marker),
    "remote": lambda parts: RemoteReward(parts.config.remote),
    "model": lambda parts: ModelReward(parts.config.model),
    "code_tests": lambda parts: CodeTests(parts.sandbox),
}
"""Name to builder; a builder raises ConfigError when its settings are missing."""


class RewardRules:
    """All rules of one gateway, each built on first use.

    Nothing runs before a rule needs it.
    """

    def __init__(self, config: RewardsConfig, sandbox: Sandbox | None = None) -> None:
        """sandbox: runs models' code; None makes a separate sandbox.

        Raises ConfigError for an invalid mixture.
        """
        check_mixtures(config.mixtures, {*REWARDS, *config.own})
        self._children = Children(config.processes, config.deadline_s)
        self._closing = AsyncExitStack()
        self._closing.push_async_callback(self._children.close)
        self._parts = Parts(config, self._children, sandbox or Sandbox(config.sandbox))
        self._rules: dict[str, MeasuredRule] = {}

    def rule(self, name: str) -> MeasuredRule:
        """The rule of that name: a built-in rule, a configured rule or a mixture.

        Its scores are finite: other values raise InvalidInput. Raises NotFound, and ConfigError
        when its settings are missing.
        """
        if name not in self._rules:
            self._rules[name] = MeasuredRule(name, self._build(name))
        return self._rules[name]

    async def check(self, name: str) -> None:
        """Raises the errors of `rule`, and ConfigError for a rule that cannot be built or a model
        that cannot be loaded.
        """
        rule = self.rule(name)
        try:
            await rule.prepare()
        except ConfigError:
            self._rules.pop(name, None)  # a corrected rule can be requested again
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the rules' children and models."""
        models = [
            rule.inner for rule in self._rules.values() if isinstance(rule.inner, ModelReward)
        ]
        return [*self._children.pids, *(pid for model in models for pid in model.pids)]

    async def stop(self) -> None:
        """End children and connections; running scores raise Unavailable."""
        await self._closing.aclose()

    def _build(self, name: str) -> RewardRule | Mixture:
        if name in REWARDS:
            rule = REWARDS[name](self._parts)
            if isinstance(rule, Closes):
                self._closing.push_async_callback(rule.close)
            return rule
        own, mixtures = self._parts.config.own, self._parts.config.mixtures
        if name in mixtures:
            parts = mixtures[name].items()
            return Mixture({part: (self.rule(part), weight) for part, weight in parts})
        if name not in own:
            allowed = ", ".join(sorted([*REWARDS, *own, *mixtures]))
            raise NotFound(
                "no such reward rule",
                seen=name,
                allowed=f"{allowed}; gateway.rewards.own adds yours",
            )
        return ChildRule(own[name], self._children)


class MeasuredRule:
    """A rule with its metrics, its log and the check of its scores."""

    def __init__(self, name: str, rule: RewardRule | Mixture) -> None:
        self._name = name
        self.inner = rule

    async def prepare(self) -> None:
        """See Prepares; does nothing for a rule without requirements."""
        if isinstance(self.inner, Prepares):
            await self.inner.prepare()

    async def score(self, episode: Episode) -> float | None:
        """The value of `scored`."""
        scored = await self.scored(episode)
        return None if scored is None else scored.value

    async def scored(self, episode: Episode) -> RuleScore | None:
        """See RewardRule; never raises Unscored. A reward that the agent set replaces the rule's
        score.

        Raises InvalidInput for a score that is not finite.
        """
        if episode.reward is not None:
            return self._finite(episode.reward)
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            value = self._finite(await self.inner.score(episode))
        except PacelineError as error:
            metrics.REWARD_FAILURES.record(rule=self._name, reason=error.reason.lower())
            raise
        except Exception as why:  # noqa: BLE001 - any error of a rule leaves the sample unscored
            reason = why.reason if isinstance(why, Unscored) else "exception"
            log.warning(
                "unscored",
                rule=self._name,
                task=episode.task.task_id,
                reason=reason,
                error=str(why) if isinstance(why, Unscored) else repr(why)[:SHOWN],
            )
            metrics.REWARD_FAILURES.record(rule=self._name, reason=reason)
            value = None
        finally:
            metrics.REWARD_TIME.record(clock() - started, rule=self._name)

        (metrics.UNSCORED if value is None else metrics.SCORES).record(rule=self._name)
        return value

    def _finite(self, given: float | RuleScore | None) -> RuleScore | None:
        if given is None:
            return None
        score = given if isinstance(given, RuleScore) else RuleScore(given)
        if not is_reward(score.value):
            message = f"the reward rule {self._name} gave what is no reward"
            raise InvalidInput(
                message,
                reason="REWARD_NOT_FINITE",
                seen=score.value,
                allowed=f"{REWARD_RANGE} or None",
            )
        return score
