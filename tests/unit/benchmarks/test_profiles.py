"""The bench of profiles: a row each beside the plain engine, and the rule for correct output."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import uvloop

from benchmarks import profiles
from benchmarks.engine.runs import Decoded, TimedRun
from benchmarks.profile_accuracy import accuracy
from benchmarks.result import BenchResult
from paceline.errors import InvalidInput
from paceline.models.profiles import ROUNDED
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.tasks import Task

DEMO = Path("examples/demo")


def measured(engines: str) -> BenchResult:
    """A small run of the bench."""
    parser = argparse.ArgumentParser()
    profiles.add_arguments(parser)
    words = ["--prompts", "2", "--batch", "2", "--max-tokens", "4", "--pairs", "1"]
    return uvloop.run(profiles.run(parser.parse_args([*words, "--engines", engines])))


@pytest.mark.slow
def test_every_profile_has_a_row_beside_the_engine_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profiles, "SCORED_TOKENS", 4)
    result = measured("embedded")
    assert len(result.goals) == len(ROUNDED)
    assert [row["profile"] for row in result.rows] == ["float32", *ROUNDED]
    plain, *others = result.rows
    assert plain["speed"] == "1.000 [1.000, 1.000]"
    assert all(float(str(row["MiB"])) < float(str(plain["MiB"])) / 3 for row in others)
    assert all(float(str(row["gap"])) > 100 * float(str(plain["gap"])) for row in others)


def test_an_engine_that_has_no_profiles_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="seen: vllm; allowed: embedded, sglang"):
        measured("embedded,vllm")


async def test_an_answer_that_came_to_no_end_is_not_right() -> None:
    codec = TextCodec(DEMO / "policy_trained")
    texts = ("#005", "-225005#005")
    run = TimedRun(1.0, tuple(Decoded(codec.encode_piece(text)) for text in texts))
    tasks = [Task(str(number), "225:230=", "005") for number in range(len(texts))]
    assert await accuracy(profiles.turns(run, codec, 8), tasks) == 0.5
