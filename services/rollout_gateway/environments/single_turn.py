"""One prompt, one response. Owns nothing beyond that."""

from __future__ import annotations

from rollout_gateway.environments.base import Episode, EpisodeTask, Model


class SingleTurn:
    """The task's prompt as it is, one generation, done."""

    async def run(self, task: EpisodeTask, model: Model) -> Episode:
        turn = await model.generate(model.encode(task.prompt))
        return Episode(task, turn.text, turn.finish)
