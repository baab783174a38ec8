"""Mixtures of reward rules: the weighted sum, each part, and invalid mixtures."""

from __future__ import annotations

import re
import tomllib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.config import TelemetryConfig
from paceline.errors import ConfigError, InvalidInput, NotFound, Unavailable
from paceline.services.rollout_gateway.config import RemoteRewardConfig, RewardsConfig
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.rewards import RuleScore
from paceline.services.rollout_gateway.rewards.rules import RewardRules
from paceline.telemetry import prometheus_page, setup, shutdown

DOCS = Path(__file__).parents[4] / "docs" / "rewards.md"
OWN = """
class Given:
    def score(self, episode):
        value = episode.task.metadata["given"]
        return None if value == "none" else float(value)
"""


def episode(text: str, **metadata: str) -> Episode:
    return Episode(EpisodeTask("t", "p", "6", metadata), text, "stop")


@pytest.fixture
async def mixed(tmp_path: Path) -> AsyncIterator[Any]:
    """Makes the rules of a table of mixtures."""
    (tmp_path / "own.py").write_text(OWN)
    made = []

    def make(mixtures: Mapping[str, Mapping[str, Any]]) -> RewardRules:
        rules = RewardRules(
            RewardsConfig.model_validate(
                {
                    "mixtures": mixtures,
                    "own": {"given": f"{tmp_path}/own.py:Given"},
                    "remote": RemoteRewardConfig(url="http://127.0.0.1:9/"),
                }
            )
        )
        made.append(rules)
        return rules

    yield make
    for rules in made:
        await rules.stop()


@pytest.mark.parametrize(
    ("text", "value", "parts"),
    [
        ("#6", 1.25, {"math_answer": 1.0, "format": 1.0}),
        ("#5", 0.25, {"math_answer": 0.0, "format": 1.0}),
        ("## 6", 1.0, {"math_answer": 1.0, "format": 0.0}),
    ],
)
async def test_a_mixture_is_the_weighted_sum_and_keeps_its_parts(
    mixed: Any, text: str, value: float, parts: dict[str, float]
) -> None:
    rules = mixed({"both": {"math_answer": 1.0, "format": 0.25}})
    await rules.check("both")
    assert await rules.rule("both").scored(episode(text)) == RuleScore(value, parts)
    assert await rules.rule("both").score(episode(text)) == value


async def test_the_example_of_the_page_scores_as_the_page_says(mixed: Any) -> None:
    page = DOCS.read_text()
    (example,) = re.findall(r"```toml\n(\[gateway\.rewards\.mixtures.*?)```", page, re.DOTALL)
    table = tomllib.loads(example)["gateway"]["rewards"]["mixtures"]
    rules = mixed(table)
    (name,) = table
    assert (await rules.rule(name).scored(episode("#6"))).value == 1.2
    assert (await rules.rule(name).scored(episode("#7"))).value == 0.2
    assert "`#6` earns 1.2" in page


async def test_a_part_that_counts_and_gives_none_leaves_the_sample_unscored(mixed: Any) -> None:
    rules = mixed({"counts": {"given": 1, "format": 1}, "watches": {"given": 0, "format": 1}})
    assert await rules.rule("counts").scored(episode("#6", given="none")) is None
    assert await rules.rule("watches").scored(episode("#6", given="none")) == RuleScore(
        1.0, {"format": 1.0}
    )
    assert await rules.rule("watches").scored(episode("#6", given="7")) == RuleScore(
        1.0, {"given": 7.0, "format": 1.0}
    )


async def test_a_part_that_is_away_or_not_finite_fails_the_whole(mixed: Any) -> None:
    rules = mixed({"away": {"remote": 1, "format": 1}, "own": {"given": 1, "format": 1}})
    with pytest.raises(Unavailable):
        await rules.rule("away").scored(episode("#6"))
    with pytest.raises(InvalidInput, match=r"rule given .*seen: nan"):
        await rules.rule("own").scored(episode("#6", given="nan"))


async def test_a_sum_beyond_every_reward_is_refused_by_the_name_of_the_mixture(mixed: Any) -> None:
    rules = mixed({"huge": {"format": 1e300}})
    with pytest.raises(InvalidInput, match=r"rule huge .*seen: 1e\+300"):
        await rules.rule("huge").scored(episode("#6"))


async def test_the_agent_reward_stands_and_has_no_parts(mixed: Any) -> None:
    rule = mixed({"both": {"math_answer": 1, "format": 1}}).rule("both")
    given = Episode(EpisodeTask("t", "p", "6"), "#6", "stop", reward=0.5)
    assert await rule.scored(given) == RuleScore(0.5)


async def test_every_part_is_counted_under_its_own_name(mixed: Any) -> None:
    setup("test", TelemetryConfig())
    try:
        await mixed({"both": {"math_answer": 1, "format": 1}}).rule("both").score(episode("#6"))
        page = prometheus_page().decode()
    finally:
        shutdown()
    for name in ("both", "math_answer", "format"):
        assert f'paceline_reward_scores_total{{rule="{name}"}} 1.0' in page


@pytest.mark.parametrize(
    ("mixtures", "said"),
    [
        ({"m": {"math_anser": 1}}, "part of .*mixtures.m is no reward rule; seen: math_anser; al"),
        ({"m": {"m": 1}}, "is a mixture itself; seen: m; allowed: .*math_answer"),
        ({"m": {"n": 1}, "n": {"format": 1}}, "is a mixture itself; seen: n"),
        ({"m": {"format": 0, "math_answer": 0}}, "weights of .*allowed: finite numbers, one"),
        ({"m": {}}, "weights of .*seen: {}"),
        ({"m": {"format": float("nan")}}, "weights of .*seen: {'format': nan}"),
        ({"m": {"format": float("inf")}}, "weights of .*seen: {'format': inf}"),
        ({"format": {"math_answer": 1}}, "a rule has that name; seen: format"),
    ],
)
def test_what_cannot_be_mixed_is_refused_at_the_start(
    mixtures: dict[str, dict[str, float]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        RewardRules(RewardsConfig(mixtures=mixtures))


async def test_an_unknown_rule_names_the_mixtures_too(mixed: Any) -> None:
    with pytest.raises(NotFound, match=r"seen: nothing; allowed: .*mine"):
        mixed({"mine": {"format": 1}}).rule("nothing")
