"""Writes an episode as JSON and reads it, for children and for rewards at a URL.

Messages are spelled as in OpenAI's chat completions; arguments of tool calls stay the text the
model wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_gateway.chat.messages import Message, ToolCall
from rollout_gateway.environments.base import Episode, EpisodeTask


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


def episode_from(value: Mapping[str, Any]) -> Episode:
    """What `episode_to` wrote."""
    task = EpisodeTask(value["task_id"], value["prompt"], value["answer"], value["metadata"])
    messages = tuple(_message_from(message) for message in value["messages"])
    return Episode(task, value["text"], value["finish"], messages)


def _message_from(value: Mapping[str, Any]) -> Message:
    calls = (
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in value.get("tool_calls", ())
    )
    return Message(
        value["role"],
        value["content"],
        value.get("reasoning_content", ""),
        tuple(calls),
        value.get("tool_call_id", ""),
        value.get("name", ""),
    )
