"""The examples of docs/plugins.md run unchanged."""

from __future__ import annotations

import re
from asyncio import Runner
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.policy_trainer.batches.test_batcher import Bench, trajectory, wanted

from paceline.errors import ConfigError, InvalidInput
from paceline.plugins import import_filter
from paceline.services.coordinator.calls.tasks import TaskSource
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.policy_trainer.algorithm_settings import OwnConfig
from paceline.services.policy_trainer.algorithms import build_algorithm
from paceline.services.policy_trainer.algorithms.base import SessionBatch
from paceline.services.policy_trainer.batches.batcher import Batcher
from paceline.services.rollout_gateway.chat.messages import Message
from paceline.services.rollout_gateway.environments import ChatTurn, Episode, EpisodeTask, TextTurn
from paceline.services.rollout_gateway.environments.kinds import (
    begin_interaction,
    interaction_class,
    reply_of,
)
from paceline.services.rollout_gateway.environments.table import Equipment, environment
from paceline.services.rollout_gateway.rewards.child_program import build_rule, score
from paceline.tasks import Task, write_tasks

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
EXAMPLE = re.compile(
    r"```python\n# (?P<file>[^;]+\.py); (?P<setting>\S+) = \"(?P<path>[^\"]+)\"\n"
    r"(?P<source>.*?)```",
    re.DOTALL,
)


@pytest.fixture
def examples(tmp_path: Path) -> dict[str, str]:
    """The import path of each setting's example; the fixture writes the example to a file."""
    found = {}
    for number, one in enumerate(EXAMPLE.finditer(PAGE.read_text())):
        (folder := tmp_path / str(number)).mkdir()
        (folder / one["file"]).write_text(one["source"])
        found[one["setting"]] = f"{folder}/{one['path']}"
    return found


def tasks_of(directory: Path, **keys: object) -> TaskSource:
    made = [Task(f"t{i}", f"{i}=", str(i), {"level": str(i)}) for i in range(8)]
    write_tasks(directory / "tasks.jsonl", made)
    settings = {"tasks_path": str(directory / "tasks.jsonl"), "prompts_per_step": 5, **keys}
    return TaskSource(CoordinatorConfig.model_validate(settings))


def test_the_task_filter_leaves_tasks_out_and_too_few_are_refused(
    examples: dict[str, str], tmp_path: Path
) -> None:
    own = examples["coordinator.task_filter"]
    source = tasks_of(tmp_path, task_filter=own)
    drawn = {task.task_id for step in range(4) for task in source.step_request(step, 1).tasks}
    assert drawn == {f"t{i}" for i in range(3, 8)}
    with pytest.raises(ConfigError, match=r"seen: 6; allowed: 1\.\.5"):
        tasks_of(tmp_path, task_filter=own, prompts_per_step=6)


async def test_the_group_filter_drops_groups_and_what_it_says_is_recorded(
    examples: dict[str, str],
) -> None:
    bench = Bench()
    keeps = import_filter(examples["policy_trainer.group_filter"], "group filter")
    batcher = Batcher(bench.stream, bench.notes, max_staleness=0, keeps=keeps)
    await batcher.open()
    cut = [replace(trajectory("a", i), finish_reason="length") for i in range(2)]
    await bench.append(*cut, trajectory("b", 0), trajectory("b", 1))
    batch = await batcher.collect(wanted("a", "b"))
    await batcher.settle(batch.record)
    assert [one.group_id for one in batch.trajectories] == ["b", "b"]
    assert batch.record.dropped_groups == {"filtered": 1}
    assert bench.notes.dropped == {str(one.key): "filtered" for one in cut}


class Answers:
    """A model that answers with its number of requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[Message, ...]] = []

    def encode(self, text: str) -> tuple[int, ...]:
        raise NotImplementedError

    async def generate(self, prompt: tuple[int, ...]) -> TextTurn:
        raise NotImplementedError

    def score(self, reward: float) -> None:
        raise NotImplementedError

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ChatTurn:
        self.asked.append(tuple(messages))
        return ChatTurn(Message("assistant", str(len(self.asked))), "stop")


async def test_the_environment_asks_twice(examples: dict[str, str]) -> None:
    own = Equipment(own={"second_look": examples["gateway.environments.second_look"]})
    model = Answers()
    episode = await environment("second_look", own).run(EpisodeTask("t", "6*7=", "42"), model)
    assert (episode.text, episode.finish) == ("2", "stop")
    assert [len(asked) for asked in model.asked] == [1, 3]
    assert [message.role for message in episode.messages] == ["user", "assistant"] * 2


async def test_the_user_scores_and_ends_the_dialogue(examples: dict[str, str]) -> None:
    own = interaction_class({"teacher": examples["gateway.interactions.teacher"]}, {})
    assert own is not None
    user = begin_interaction(own, EpisodeTask("t", "6*7=", "42"))
    replies = [await reply_of(user, [Message("assistant", said)]) for said in ("1", "2", "3", "42")]
    assert [one.reward for one in replies] == [0.0, 0.0, 0.0, 1.0]
    assert [one.ends for one in replies] == [False, False, True, True]


def test_the_reward_rule_scores_an_episode(examples: dict[str, str]) -> None:
    with Runner() as runner:
        rule = build_rule(examples["gateway.rewards.own.brevity"])
        episodes = [Episode(EpisodeTask("t", "p", ""), "x" * n, "stop") for n in (0, 350)]
        assert [score(rule, one, runner) for one in episodes] == [1.0, 0.25]


def test_the_algorithm_has_its_own_advantages(examples: dict[str, str]) -> None:
    own = build_algorithm(OwnConfig(name=examples["policy_trainer.algorithm.name"]))
    grpo = build_algorithm(OwnConfig(name="paceline.services.policy_trainer.algorithms.grpo:Grpo"))
    nothing = torch.zeros(3)
    batch = SessionBatch(
        torch.tensor([0.0, 1.0, 4.0]),
        torch.zeros(3, dtype=torch.int64),
        torch.ones(3),
        torch.arange(3),
        nothing,
        nothing,
    )
    plain = grpo.advantages(batch)
    assert torch.equal(own.advantages(batch), plain * plain.abs())


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def own(one):\n    return 1", "must return True or False; seen: 1"),
        ("def own(one):\n    return one.missing", "failed: AttributeError"),
    ],
)
def test_a_filter_that_fails_or_says_something_else_is_refused(
    tmp_path: Path, source: str, says: str
) -> None:
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(InvalidInput, match=says):
        tasks_of(tmp_path, task_filter=f"{tmp_path}/own.py:own")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nothing", "no such task filter; seen: nothing; allowed: package.module:Name"),
        ("math:pi", "a task filter is not callable; seen: math:pi"),
        ("absent.module:x", "a task filter cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_filter_that_cannot_be_had_is_refused_by_name(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        import_filter(path, "task filter")
