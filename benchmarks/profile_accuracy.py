"""Scores answers to held-out tasks by the rule `math_answer`, as an evaluation of a run does."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.services.rollout_gateway.config import RewardsConfig
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask, TextTurn
from paceline.services.rollout_gateway.rewards.rules import RewardRules
from paceline.tasks import Task

BATCH = 32
"""Tasks that are answered at a time."""
MARKER = RewardsConfig().marker


async def accuracy(turns: Sequence[TextTurn], tasks: Sequence[Task], marker: str = MARKER) -> float:
    """Share of the tasks answered correctly.

    A correct response ended by itself, and its answer behind the last marker equals the task's.
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
