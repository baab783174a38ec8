"""The environment of a conversation in which the model may call tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence

from paceline.errors import InvalidInput, Unavailable
from paceline.services.rollout_gateway.chat.messages import Message, ToolCall
from paceline.services.rollout_gateway.environments.base import Episode, EpisodeTask, Model
from paceline.services.rollout_gateway.environments.interactions import (
    Interaction,
    Interactions,
    reply_of,
)
from paceline.services.rollout_gateway.environments.toolbox import Toolbox
from paceline.services.rollout_gateway.environments.tools import Tool, answer, schema
from paceline.services.rollout_gateway.sandbox import Sandbox
from paceline.telemetry import get_logger

log = get_logger(__name__)
DEFAULT_TURNS = 8
MAX_TURNS = 512
MAX_CALLS = 16
"""Calls of one message that run; further calls of the message get an error."""
_ROLES = ("system", "user", "assistant")


class ToolUse:
    """Alternates between the model and its tools until the model answers without a call. Then the
    task's interaction, a simulated user, may continue the dialogue.

    metadata["messages"], a JSON list of {"role", "content"}, is the start of the conversation.
    Without it the user's message is the task's prompt, after metadata["system"] if present.
    metadata["tools"], a JSON list of names, selects the tools (default: all). metadata["max_turns"]
    limits the model's turns. metadata["interaction"] selects the user.

    The finish is the last turn's, with two exceptions: "length" when the turns are used up while
    the model still calls tools, "error" when the sandbox fails.
    """

    def __init__(
        self,
        sandbox: Sandbox | None,
        toolbox: Toolbox | None = None,
        interactions: Interactions | None = None,
    ) -> None:
        """Without a sandbox there is no tool `python`."""
        self._sandbox = sandbox
        self._toolbox = toolbox or Toolbox(sandbox)
        self._interactions = interactions or Interactions({})

    async def prepare(self, metadata: Iterable[Mapping[str, str]]) -> None:
        """Check the tasks' requirements.

        Raises ConfigError when a task offers `python` and the sandbox cannot isolate code as
        configured, or when a tool or an interaction cannot be loaded. Raises InvalidInput for an
        unlisted interaction.
        """
        told = list(metadata)
        if self._sandbox and any("python" in one.get("tools", "python") for one in told):
            await self._sandbox.layers()
        await self._toolbox.tools()
        for one in told:
            self._interactions.check(one)

    async def run(self, task: EpisodeTask, model: Model) -> Episode:
        """Raises InvalidInput for metadata of another form."""
        messages = opening(task)
        tools = await self._offered(task)
        user = self._interactions.of(task)
        schemas = [schema(tool) for tool in tools.values()]
        for left in reversed(range(_turns(task))):
            turn = await model.chat(tuple(messages), schemas)
            messages.append(turn.message)
            calls = turn.message.tool_calls
            finish = "stop" if turn.finish == "tool_calls" else turn.finish
            if finish != "stop" or (not calls and user is None):
                return _episode(task, messages, finish)
            if not calls and user is not None:
                if not await _goes_on(user, messages, model):
                    return _episode(task, messages, "stop")
            elif left:
                answers = await asyncio.gather(
                    *(_answer(call, index, tools) for index, call in enumerate(calls))
                )
                messages += [one for one in answers if isinstance(one, Message)]
                failures = [str(one) for one in answers if isinstance(one, Unavailable)]
                if failures:
                    log.warning(
                        "an episode ends because a tool failed",
                        task=task.task_id,
                        error=failures[0],
                    )
                    return _episode(task, messages, "error")

        return _episode(task, messages, "length")

    async def _offered(self, task: EpisodeTask) -> Mapping[str, Tool]:
        known = await self._toolbox.tools()
        if "tools" not in task.metadata:
            return known
        names = _json(task, "tools")
        if not isinstance(names, list) or not all(
            isinstance(name, str) and name in known for name in names
        ):
            allowed = f"a JSON list of {', '.join(known)}"
            raise InvalidInput(
                f'metadata["tools"] of task {task.task_id}', seen=repr(names)[:80], allowed=allowed
            )
        return {name: known[name] for name in names}


async def _goes_on(user: Interaction, messages: list[Message], model: Model) -> bool:
    """Append the user's reply; False when the user ends the dialogue."""
    reply = await reply_of(user, tuple(messages))
    if reply.reward is not None:
        model.score(reply.reward)
    if not reply.ends:
        messages.append(Message("user", reply.text))
    return not reply.ends


def _episode(task: EpisodeTask, messages: Sequence[Message], finish: str) -> Episode:
    spoken = [message.content for message in messages if message.role == "assistant"]
    return Episode(task, spoken[-1], finish, tuple(messages))


async def _answer(call: ToolCall, index: int, tools: Mapping[str, Tool]) -> Message | Unavailable:
    """The tool's answer as a message. A failure is returned rather than raised, so that parallel
    calls can finish.
    """
    try:
        text = (
            await answer(call, tools)
            if index < MAX_CALLS
            else f"error: at most {MAX_CALLS} calls in one message"
        )
    except Unavailable as error:
        return error
    return Message("tool", text, tool_call_id=call.call_id, name=call.name)


def opening(task: EpisodeTask) -> list[Message]:
    """First messages of a task's conversation. Raises InvalidInput for metadata of another form."""
    if "messages" not in task.metadata:
        system = task.metadata.get("system")
        return [*([Message("system", system)] if system else []), Message("user", task.prompt)]
    found = _json(task, "messages")
    if not isinstance(found, list) or not found or not all(_is_message(one) for one in found):
        allowed = f"a JSON list of {{role: {' | '.join(_ROLES)}, content: text}}"
        raise InvalidInput(
            f'metadata["messages"] of task {task.task_id}', seen=repr(found)[:80], allowed=allowed
        )
    return [Message(one["role"], one["content"]) for one in found]


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in _ROLES
        and isinstance(value.get("content"), str)
    )


def _turns(task: EpisodeTask) -> int:
    text = task.metadata.get("max_turns", str(DEFAULT_TURNS))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MAX_TURNS):
        raise InvalidInput(
            f'metadata["max_turns"] of task {task.task_id}', seen=text, allowed=f"1 to {MAX_TURNS}"
        )
    return int(text)


def _json(task: EpisodeTask, key: str) -> object:
    try:
        return json.loads(task.metadata[key])
    except (ValueError, RecursionError) as error:
        seen = task.metadata[key][:80]
        raise InvalidInput(
            f'metadata["{key}"] of task {task.task_id} is not JSON', seen=seen
        ) from error
