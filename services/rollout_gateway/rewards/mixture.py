"""Adds several rules to one reward, each with its weight, and keeps the score of each part."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping
from typing import Protocol

from paceline.errors import ConfigError
from paceline.services.rollout_gateway.environments.base import Episode
from paceline.services.rollout_gateway.rewards.base import RuleScore

SETTING = "gateway.rewards.mixtures"


class MixedRule(Protocol):
    """A measured rule of a mixture."""

    async def prepare(self) -> None: ...

    async def score(self, episode: Episode) -> float | None: ...


class Mixture:
    """reward = sum over the parts of weight * score of the part's rule."""

    def __init__(self, parts: Mapping[str, tuple[MixedRule, float]]) -> None:
        """`parts`: the name of a rule, the rule and its weight."""
        self._parts = parts

    async def prepare(self) -> None:
        """See Prepares: prepares every part."""
        for rule, _ in self._parts.values():
            await rule.prepare()

    async def score(self, episode: Episode) -> RuleScore | None:
        """The weighted sum and its unweighted parts; None when a part with a weight gives none.

        A part of weight 0 is only reported. Raises the error of the first failed part; by then each
        part has counted its own failure.
        """
        given = await asyncio.gather(
            *(rule.score(episode) for rule, _ in self._parts.values()), return_exceptions=True
        )
        scores: dict[str, float] = {}
        total = 0.0
        for (name, (_, weight)), value in zip(self._parts.items(), given, strict=True):
            if isinstance(value, BaseException):
                raise value
            if value is not None:
                scores[name] = value
                total += weight * value
            elif weight:
                return None
        return RuleScore(total, scores)


def check_mixtures(mixtures: Mapping[str, Mapping[str, float]], rules: Collection[str]) -> None:
    """Raises ConfigError for a mixture with a rule's name or without parts.

    Also for a part that is no rule of `rules` (for example another mixture), and for weights that
    are not finite or all 0.
    """
    for name, weights in mixtures.items():
        place = f"{SETTING}.{name}"
        if name in rules:
            raise ConfigError(f"{SETTING}: a rule has that name", seen=name, allowed="another name")
        unknown = [part for part in weights if part not in rules]
        if unknown:
            what = "is a mixture itself" if unknown[0] in mixtures else "is no reward rule"
            allowed = ", ".join(sorted(rules))
            raise ConfigError(f"a part of {place} {what}", seen=unknown[0], allowed=allowed)
        odd = {part: weight for part, weight in weights.items() if not math.isfinite(weight)}
        if odd or not any(weights.values()):
            allowed = "finite numbers, one at least not 0"
            raise ConfigError(f"weights of {place}", seen=odd or dict(weights), allowed=allowed)
