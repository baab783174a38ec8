"""The environment of one prompt and one response."""

from __future__ import annotations

from paceline.services.rollout_gateway.environments.base import Episode, EpisodeTask, Model
from paceline.services.rollout_gateway.environments.tool_use import opening


class SingleTurn:
    """Runs one generation on the task's prompt. With metadata "messages" the prompt is that
    conversation under the chat template.
    """

    async def run(self, task: EpisodeTask, model: Model) -> Episode:
        """Raises InvalidInput for metadata "messages" of another form."""
        if "messages" in task.metadata:
            asked = opening(task)
            answered = await model.chat(tuple(asked))
            told = (*asked, answered.message)
            return Episode(task, answered.message.content, answered.finish, told)
        turn = await model.generate(model.encode(task.prompt))
        return Episode(task, turn.text, turn.finish)
