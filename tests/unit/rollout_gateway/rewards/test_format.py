"""The format reward: whether a response has the required form."""

from __future__ import annotations

from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.rewards.rules import FormatRule


def episode(text: str, *, finish: str = "stop", **metadata: str) -> Episode:
    return Episode(EpisodeTask("t", "p", "6", metadata), text, finish)


async def test_a_format_is_matched_as_a_whole() -> None:
    assert await FormatRule().score(episode("a #6", format="* #[0-9]")) == 1.0
    assert await FormatRule().score(episode("a #6.", format="* #[0-9]")) == 0.0


async def test_without_a_format_the_marker_stands_once() -> None:
    assert await FormatRule().score(episode("#6")) == 1.0
    assert await FormatRule().score(episode("##6")) == 0.0


async def test_a_response_cut_by_the_limit_earns_nothing() -> None:
    assert await FormatRule().score(episode("#6", finish="length")) == 0.0
