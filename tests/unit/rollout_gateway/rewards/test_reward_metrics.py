"""Metrics of scores and of missing scores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from paceline.config import TelemetryConfig
from paceline.errors import InvalidInput, Unavailable
from paceline.services.rollout_gateway.config import RemoteRewardConfig, RewardsConfig
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.rewards.rules import RewardRules
from paceline.telemetry import prometheus_page, setup, shutdown

RULE = """
import time
class Says:
    def score(self, episode):
        return eval(episode.text)
"""


def rules_of(folder: Path, deadline_s: float) -> RewardRules:
    remote = RemoteRewardConfig(url="http://127.0.0.1:9/")
    own = {"says": f"{folder}/own.py:Says"}
    return RewardRules(RewardsConfig(deadline_s=deadline_s, remote=remote, own=own))


@pytest_asyncio.fixture
async def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RewardRules]:
    monkeypatch.setattr(RemoteRewardConfig, "attempts", 1)
    setup("test", TelemetryConfig())
    rules = rules_of(tmp_path, deadline_s=60)
    yield rules
    await rules.stop()
    shutdown()


def episode(text: str) -> Episode:
    return Episode(EpisodeTask("t", "p", "6"), text, "stop")


async def test_scores_and_failures_are_counted_by_rule_and_reason(
    rules: RewardRules, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(RULE)
    for text in ("1.5", "2", "None", "1 / 0"):
        await rules.rule("says").score(episode(text))
    impatient = rules_of(tmp_path, deadline_s=0.5)
    await impatient.rule("says").score(episode("time.sleep(1000)"))
    await impatient.stop()
    with pytest.raises(InvalidInput):
        await rules.rule("says").score(episode("float('nan')"))
    with pytest.raises(Unavailable):
        await rules.rule("remote").score(episode("#6"))
    await rules.rule("math_answer").score(episode("#6"))

    page = prometheus_page().decode()
    label = 'rule="says"'
    assert f"paceline_reward_scores_total{{{label}}} 2.0" in page
    assert f"paceline_reward_unscored_total{{{label}}} 3.0" in page
    for reason in ("exception", "deadline", "reward_not_finite"):
        assert f'paceline_reward_failures_total{{reason="{reason}",{label}}} 1.0' in page
    assert 'paceline_reward_failures_total{reason="unavailable",rule="remote"} 1.0' in page
    assert f"paceline_reward_time_seconds_count{{{label}}} 6.0" in page
    assert 'paceline_reward_scores_total{rule="math_answer"} 1.0' in page


async def test_an_agents_own_reward_counts_for_no_rule(rules: RewardRules) -> None:
    await rules.rule("format").score(Episode(EpisodeTask("t", "p", "6"), "#6", "stop", reward=0.5))
    assert "paceline_reward" not in prometheus_page().decode()
