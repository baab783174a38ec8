"""Lists the reward rules in one table, builds them, and checks and counts their scores."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from paceline.errors import ConfigError, InvalidInput, NotFound, PacelineError
from paceline.services.rollout_gateway import environments, metrics, rewards
from paceline.services.rollout_gateway.config import RewardsConfig
from paceline.services.rollout_gateway.rewards import child, code_tests, math_answer, remote
from paceline.services.rollout_gateway.sandbox import Sandbox
from paceline.telemetry import get_logger
from paceline.trajectory import REWARD_RANGE, is_reward


@dataclass(frozen=True, slots=True)
class FormatRule(rewards.RewardRule):
    """1.0 when the whole response matches the task's metadata["format"], else 0.0.

    In the pattern `*` matches any text, `?` one character, `[...]` a set. Without a pattern, a
    response that ended by itself and contains the marker exactly once gets 1.0.
    """

    _marker: str = "#"

    async def score(self, episode: environments.Episode) -> float:
        text, pattern = episode.text, episode.task.metadata.get("format")
        right = text.count(self._marker) == 1 if pattern is None else fnmatchcase(text, pattern)
        return float(right and episode.finish == "stop")


SETTING = "gateway.rewards.mixtures"
GENERATED_ANSWER = "paceline.tasks.generated:GeneratedAnswer"


class Mixture(rewards.RewardRule):
    """reward = sum over the parts of weight * score of the part's rule."""

    def __init__(self, parts: Mapping[str, tuple[MeasuredRule, float]]) -> None:
        """`parts`: the name of a rule, the rule and its weight."""
        self._parts = parts

    async def prepare(self) -> None:
        """Prepare every part."""
        for rule, _ in self._parts.values():
            await rule.inner.prepare()

    async def score(self, episode: environments.Episode) -> rewards.RuleScore | None:
        """The weighted sum and its unweighted parts; None when a part with a weight gives none.

        A part of weight 0 is only reported. Raises the error of the first failed part; by then each
        part has counted its own failure.
        """
        asked = (rule.score(episode) for rule, _ in self._parts.values())
        given = await asyncio.gather(*asked, return_exceptions=True)
        scores, total = dict[str, float](), 0.0
        for (name, (_, weight)), value in zip(self._parts.items(), given, strict=True):
            if isinstance(value, BaseException):
                raise value
            if value is not None:
                scores[name] = value
                total += weight * value
            elif weight:
                return None
        return rewards.RuleScore(total, scores)


def check_mixtures(mixtures: Mapping[str, Mapping[str, float]], rules: Collection[str]) -> None:
    """Raises ConfigError for a mixture with a rule's name or without parts.

    Also for a part that is no rule of `rules` (for example another mixture), and for weights that
    are not finite or all 0.
    """
    for name, weights in mixtures.items():
        place = f"{SETTING}.{name}"
        if name in rules:
            raise ConfigError(f"{SETTING}: a rule has that name", seen=name, allowed="another name")
        if unknown := [part for part in weights if part not in rules]:
            what = "is a mixture itself" if unknown[0] in mixtures else "is no reward rule"
            allowed = ", ".join(sorted(rules))
            raise ConfigError(f"a part of {place} {what}", seen=unknown[0], allowed=allowed)
        odd = {part: weight for part, weight in weights.items() if not math.isfinite(weight)}
        if odd or not any(weights.values()):
            allowed = "finite numbers, one at least not 0"
            raise ConfigError(f"weights of {place}", seen=odd or dict(weights), allowed=allowed)


log = get_logger(__name__)
SHOWN = 500
"""Maximum characters of an exception in the log."""


class RewardRules:
    """All rules of one gateway, each built on first use.

    Nothing runs before a rule needs it.
    """

    def __init__(self, config: RewardsConfig, sandbox: Sandbox | None = None) -> None:
        """sandbox: runs models' code; None makes a separate sandbox.

        Raises ConfigError for an invalid mixture.
        """
        check_mixtures(config.mixtures, {*REWARDS, *config.own})
        self.config = config
        self.children = child.Children(config.processes, config.deadline_s)
        self.sandbox = sandbox or Sandbox(config.sandbox)
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
            await rule.inner.prepare()
        except ConfigError:
            self._rules.pop(name, None)  # a corrected rule can be requested again
            raise

    async def stop(self) -> None:
        """End children and connections; running scores raise Unavailable."""
        closing = [rule.inner.close() for rule in self._rules.values()]
        await asyncio.gather(self.children.close(), *closing)

    def _build(self, name: str) -> rewards.RewardRule:
        if name in REWARDS:
            return REWARDS[name](self)
        own, mixtures = self.config.own, self.config.mixtures
        if name in mixtures:
            parts = mixtures[name].items()
            return Mixture({part: (self.rule(part), weight) for part, weight in parts})
        if name not in own:
            allowed = ", ".join(sorted([*REWARDS, *own, *mixtures]))
            allowed += "; gateway.rewards.own adds yours"
            raise NotFound("no such reward rule", seen=name, allowed=allowed)
        return child.ChildRule(own[name], self.children)


REWARDS: dict[str, Callable[[RewardRules], rewards.RewardRule]] = {
    "math_answer": lambda rules: math_answer.MathAnswer(
        rules.config.marker, child.ChildRule(math_answer.MATH_EQUAL, rules.children)
    ),
    "format": lambda rules: FormatRule(rules.config.marker),
    "remote": lambda rules: remote.RemoteReward(rules.config.remote),
    "code_tests": lambda rules: code_tests.CodeTests(rules.sandbox),
    "reasoning_gym": lambda rules: child.ChildRule(GENERATED_ANSWER, rules.children),
}
"""Name to builder; a builder raises ConfigError when its settings are missing."""


class MeasuredRule:
    """A rule with its metrics, its log and the check of its scores."""

    def __init__(self, name: str, rule: rewards.RewardRule) -> None:
        self._name = name
        self.inner = rule

    async def score(self, episode: environments.Episode) -> float | None:
        """The value of `scored`."""
        scored = await self.scored(episode)
        return None if scored is None else scored.value

    async def scored(self, episode: environments.Episode) -> rewards.RuleScore | None:
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
            reason, told = "exception", repr(why)[:SHOWN]
            if isinstance(why, rewards.Unscored):
                reason, told = why.reason, str(why)
            about = {"rule": self._name, "reason": reason}
            log.warning("unscored", **about, task=episode.task.task_id, error=told)
            metrics.REWARD_FAILURES.record(**about)
            value = None
        finally:
            metrics.REWARD_TIME.record(clock() - started, rule=self._name)

        (metrics.UNSCORED if value is None else metrics.SCORES).record(rule=self._name)
        return value

    def _finite(self, given: float | rewards.RuleScore | None) -> rewards.RuleScore | None:
        if given is None:
            return None
        score = given if isinstance(given, rewards.RuleScore) else rewards.RuleScore(given)
        if not is_reward(score.value):
            message, reason = (
                f"the reward rule {self._name} returned no reward",
                "REWARD_NOT_FINITE",
            )
            allowed = f"{REWARD_RANGE} or None"
            raise InvalidInput(message, reason=reason, seen=score.value, allowed=allowed)
        return score
