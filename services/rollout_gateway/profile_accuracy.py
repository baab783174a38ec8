"""Answers held-out tasks under a profile and scores the answers by the rule `math_answer`, as an
evaluation of a run does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidInput
from paceline.models.config import read_config
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.config import RewardsConfig
from paceline.services.rollout_gateway.engines.embedded.profile_report import (
    draw_all,
    profiled_engine,
)
from paceline.services.rollout_gateway.environments.base import Episode, EpisodeTask, TextTurn
from paceline.services.rollout_gateway.rewards.rules import RewardRules
from paceline.tasks import Task

BATCH = 32
"""Tasks that are answered at a time."""
MARKER = RewardsConfig().marker


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What is asked, and how an answer is found."""

    tasks: Sequence[Task]
    tokens: int  # of an answer, at most; fewer where the model's context ends before
    marker: str = MARKER  # the answer follows the last of these

    async def accuracy_of(
        self, directory: Path, profile: str, *, dtype: str, threads: int = 1
    ) -> float:
        """Share of the tasks that the model in `directory` answers right under a profile, each
        drawn once, with the same seeds under all.

        Raises InvalidInput for tasks that leave no room for an answer, and what building an engine
        raises.
        """
        codec = TextCodec(directory, read_config(directory).eos_token_ids)
        prompts = [codec.encode(task.prompt) for task in self.tasks]
        longest, room = max(map(len, prompts)), read_config(directory).max_position_embeddings
        if longest >= room:
            raise InvalidInput(
                "tasks leave no room for an answer",
                seen=f"a prompt of {longest} tokens",
                allowed=f"at most {room - 1}",
            )
        tokens = min(self.tokens, room - longest)
        rows = min(BATCH, len(prompts))
        engine = profiled_engine(directory, profile, rows, longest + tokens, dtype, threads)
        turns = [
            TextTurn(one.token_ids, codec.decode(one.token_ids), one.finish or "")
            for one in draw_all(engine, prompts, tokens)
        ]
        return await accuracy(turns, self.tasks, self.marker)


async def accuracy(turns: Sequence[TextTurn], tasks: Sequence[Task], marker: str = MARKER) -> float:
    """Share of the tasks that are answered right: by a response that ended by itself, whose answer
    behind the last marker equals the task's.
    """
    rules = RewardRules(RewardsConfig(marker=marker))
    try:
        rule = rules.rule("math_answer")
        right = 0.0
        for turn, task in zip(turns, tasks, strict=True):
            asked = EpisodeTask(task.task_id, task.prompt, task.answer, task.metadata)
            right += await rule.score(Episode(asked, turn.text, turn.finish)) or 0.0
    finally:
        await rules.stop()
    return right / len(tasks)
