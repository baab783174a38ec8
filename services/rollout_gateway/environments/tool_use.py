"""A conversation in which the model may call tools.

Owns the loop and the task's side of it; tools are in tools.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence

from paceline.errors import InvalidInput, Unavailable
from paceline.telemetry import get_logger
from rollout_gateway.chat.messages import Message, ToolCall
from rollout_gateway.environments.base import Episode, EpisodeTask, Model
from rollout_gateway.environments.tools import CALCULATOR, Tool, answer, python, schema
from rollout_gateway.sandbox import Sandbox

log = get_logger(__name__)
DEFAULT_TURNS = 8
MAX_TURNS = 512
MAX_CALLS = 16
"""Calls of one message that are answered by their tools; a message with more gets an error for the
rest.
"""
_ROLES = ("system", "user", "assistant")


class ToolUse:
    """Asks, runs the tools the model calls, and asks again until it answers without a call.

    metadata["messages"], a JSON list of {"role", "content"}, is how the conversation begins;
    without it the task's prompt is the user's text, after metadata["system"] where there is one.
    metadata["tools"], a JSON list of names, says which tools there are (all by default),
    metadata["max_turns"] how often the model may speak.

    Finish is the last turn's, with two exceptions: "length" when the turns are used up while the
    model still calls tools, "error" when the sandbox fails.
    """

    def __init__(self, sandbox: Sandbox | None) -> None:
        """Without a sandbox there is no tool `python`."""
        self._sandbox = sandbox
        found = [CALCULATOR] if sandbox is None else [CALCULATOR, python(sandbox)]
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in found}

    async def prepare(self, metadata: Iterable[Mapping[str, str]]) -> None:
        """Raises ConfigError where a task offers `python` and code cannot be shut in as
        configured.
        """
        if self._sandbox and any("python" in one.get("tools", "python") for one in metadata):
            await self._sandbox.layers()

    async def run(self, task: EpisodeTask, model: Model) -> Episode:
        """Raises InvalidInput for a task that says something else than the above."""
        messages = opening(task)
        tools = self._offered(task)
        schemas = [schema(tool) for tool in tools.values()]
        for left in reversed(range(_turns(task))):
            turn = await model.chat(tuple(messages), schemas)
            messages.append(turn.message)
            calls = turn.message.tool_calls
            finish = "stop" if turn.finish == "tool_calls" else turn.finish
            if not calls or finish != "stop":
                return _episode(task, messages, finish)
            if left:
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

    def _offered(self, task: EpisodeTask) -> Mapping[str, Tool]:
        if "tools" not in task.metadata:
            return self._tools
        names = _json(task, "tools")
        if not isinstance(names, list) or not all(
            isinstance(name, str) and name in self._tools for name in names
        ):
            allowed = f"a JSON list of {', '.join(self._tools)}"
            raise InvalidInput(
                f'metadata["tools"] of task {task.task_id}', seen=names, allowed=allowed
            )
        return {name: self._tools[name] for name in names}


def _episode(task: EpisodeTask, messages: Sequence[Message], finish: str) -> Episode:
    spoken = [message.content for message in messages if message.role == "assistant"]
    return Episode(task, spoken[-1], finish, tuple(messages))


async def _answer(call: ToolCall, index: int, tools: Mapping[str, Tool]) -> Message | Unavailable:
    """What the tool says; its failure is returned rather than raised, so that no call beside it is
    left running.
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
    """How the conversation of a task begins. Raises InvalidInput for one of another form."""
    if "messages" not in task.metadata:
        system = task.metadata.get("system")
        return [*([Message("system", system)] if system else []), Message("user", task.prompt)]
    found = _json(task, "messages")
    if not isinstance(found, list) or not found or not all(_is_message(one) for one in found):
        allowed = f"a JSON list of {{role: {' | '.join(_ROLES)}, content: text}}"
        raise InvalidInput(
            f'metadata["messages"] of task {task.task_id}', seen=found, allowed=allowed
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
    except ValueError as error:
        seen = task.metadata[key][:80]
        raise InvalidInput(
            f'metadata["{key}"] of task {task.task_id} is not JSON', seen=seen
        ) from error
