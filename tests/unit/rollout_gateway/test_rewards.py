"""Right, wrong, and not ended."""

from __future__ import annotations

import pytest

from paceline.errors import NotFound
from rollout_gateway.environments.base import Episode, EpisodeTask
from rollout_gateway.rewards import FormatRule, MathAnswer, reward_rule


def episode(text: str, *, answer: str = "6", finish: str = "stop", **metadata: str) -> Episode:
    return Episode(EpisodeTask("t", "p", answer, metadata), text, finish)


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("48-18=30#6", "6", 1.0),
        ("#5 no, #06 ", "6", 1.0),
        ("#6#5", "6", 0.0),
        ("6", "6", 0.0),
        ("#", "6", 0.0),
        ("#-3", "-3", 1.0),
        ("#x y", "x y", 1.0),
        ("#", "", 0.0),
    ],
)
async def test_the_answer_stands_after_the_last_marker(text: str, answer: str, reward: float) -> None:
    assert await MathAnswer().score(episode(text, answer=answer)) == reward


async def test_a_response_cut_by_the_limit_earns_nothing() -> None:
    assert await MathAnswer().score(episode("#6", finish="length")) == 0.0
    assert await FormatRule().score(episode("#6", finish="length")) == 0.0


async def test_the_marker_is_a_setting() -> None:
    assert await MathAnswer(marker="=>").score(episode("so => 6")) == 1.0


async def test_a_format_is_matched_as_a_whole() -> None:
    assert await FormatRule().score(episode("a #6", format="* #[0-9]")) == 1.0
    assert await FormatRule().score(episode("a #6.", format="* #[0-9]")) == 0.0
    assert await FormatRule().score(episode("#6")) == 1.0
    assert await FormatRule().score(episode("##6")) == 0.0


async def test_an_unknown_rule_names_the_known_ones() -> None:
    with pytest.raises(NotFound, match="math_answer"):
        reward_rule("luck", "#")
