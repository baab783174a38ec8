"""Writes an episode as JSON, for rewards at a URL.

Messages have the form of OpenAI's chat completions; arguments of tool calls stay the model's text.
"""

from __future__ import annotations

from typing import Any

from paceline.services.rollout_gateway.environments.base import Episode


def episode_to(episode: Episode) -> dict[str, Any]:
    """task_id, prompt, answer, metadata, text, finish, messages."""
    return {
        "task_id": episode.task.task_id,
        "prompt": episode.task.prompt,
        "answer": episode.task.answer,
        "metadata": dict(episode.task.metadata),
        "text": episode.text,
        "finish": episode.finish,
        "messages": [message.shown() for message in episode.messages],
    }
