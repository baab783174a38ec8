"""The environments: one answer, a conversation with tools, a simulated user; and their table."""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from paceline.errors import ConfigError, InvalidInput, Unavailable
from paceline.plugins import find_variant
from paceline.services.rollout_gateway.chat.messages import Message, ToolCall
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask, Model
from paceline.services.rollout_gateway.environments.toolbox import Toolbox
from paceline.services.rollout_gateway.environments.tools import Tool, answer, schema
from paceline.telemetry import get_logger

METADATA = "interaction"
"""Key of a task's metadata with the name of its simulated user."""


@dataclass(frozen=True, slots=True)
class UserReply:
    """A user's reaction to the model's message."""

    text: str = ""
    """The user's next message; unused when the dialogue ends."""
    reward: float | None = None
    """Reward of the model's turn; None leaves it unscored."""
    ends: bool = False
    """Whether this was the last turn."""


class Interaction(Protocol):
    """The user of one dialogue. Its class is built with the task, once per sample."""

    def answer(self, messages: Sequence[Message]) -> Any:
        """A UserReply to the model's last message; may be a coroutine."""


def interaction_class(
    paths: Mapping[str, str], metadata: Mapping[str, str]
) -> Callable[[EpisodeTask], Any] | None:
    """The class of the simulated user that a task's metadata selects, or the only configured one.
    None ends the dialogue at the model's first answer without a call.

    `paths`: import paths by name. Raises ConfigError for a class that cannot be imported,
    InvalidInput for an unlisted name.
    """
    only = next(iter(paths)) if len(paths) == 1 else ""
    name = metadata.get(METADATA, only)
    if not name:
        return None
    if name not in paths:
        allowed = f"{', '.join(paths) or 'none'}; gateway.interactions adds yours"
        raise InvalidInput(f'metadata["{METADATA}"]', seen=name, allowed=allowed)
    own: Any = find_variant(paths[name], {}, "interaction")
    if not callable(own):
        raise ConfigError("an interaction is no class", seen=paths[name], allowed="a class")
    return own  # type: ignore[no-any-return]


@contextmanager
def _users_code(fault: str, seen: str) -> Iterator[None]:
    """Raises InvalidInput for any exception inside the block, which a user's class may raise."""
    try:
        yield
    except Exception as error:
        raise InvalidInput(f"{fault}: {type(error).__name__}: {error}", seen=seen) from error


def begin_interaction(own: Callable[[EpisodeTask], Any], task: EpisodeTask) -> Interaction:
    """The user of one dialogue. Raises InvalidInput for a failing class."""
    with _users_code("an interaction cannot begin", task.task_id):
        user: Interaction = own(task)
    return user


async def reply_of(user: Interaction, messages: Sequence[Message]) -> UserReply:
    """The user's reply. Raises InvalidInput when the user's code raises or returns no UserReply."""
    with _users_code("an interaction failed", type(user).__name__):
        found = user.answer(messages)
        reply = await found if inspect.isawaitable(found) else found
    if not isinstance(reply, UserReply) or not isinstance(reply.text, str):
        raise InvalidInput("an interaction answers with a UserReply", seen=repr(reply)[:80])
    return reply


log = get_logger(__name__)
DEFAULT_TURNS = 8
MAX_TURNS = 512
MAX_CALLS = 16
"""Calls of one message that run; further calls of the message get an error."""
T = TypeVar("T")


class _Opening(BaseModel):
    """One message of the start of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


_MESSAGES: TypeAdapter[list[_Opening]] = TypeAdapter(Annotated[list[_Opening], Field(min_length=1)])
_NAMES: TypeAdapter[tuple[str, ...]] = TypeAdapter(tuple[str, ...])
_TURNS: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(ge=1, le=MAX_TURNS)])


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

    def __init__(self, toolbox: Toolbox, interactions: Mapping[str, str] | None = None) -> None:
        """`interactions`: import paths of simulated users, by name."""
        self._toolbox = toolbox
        self._interactions = interactions or {}

    async def prepare(self, metadata: Iterable[Mapping[str, str]]) -> None:
        """Check the tasks' requirements.

        Raises ConfigError when a task offers `python` and the sandbox cannot isolate code as
        configured, or when a tool or an interaction cannot be loaded. Raises InvalidInput for an
        unlisted interaction.
        """
        tasks, sandbox = list(metadata), self._toolbox.sandbox
        if sandbox and any("python" in one.get("tools", "python") for one in tasks):
            await sandbox.layers()
        await self._toolbox.tools()
        for one in tasks:
            interaction_class(self._interactions, one)

    async def run(self, task: EpisodeTask, model: Model) -> Episode:
        """Raises InvalidInput for metadata of another form."""
        messages = opening(task)
        tools = await self._offered(task)
        own = interaction_class(self._interactions, task.metadata)
        user = None if own is None else begin_interaction(own, task)
        schemas = [schema(tool) for tool in tools.values()]
        for left in reversed(range(turns_of(task))):
            turn = await model.chat(tuple(messages), schemas)
            messages.append(turn.message)
            calls = turn.message.tool_calls
            if turn.finish not in ("stop", "tool_calls"):
                return _episode(task, messages, turn.finish)
            if not calls and (user is None or not await _continue(user, messages, model)):
                return _episode(task, messages, "stop")
            if calls and left:
                asked = (_answer(call, index, tools) for index, call in enumerate(calls))
                answers = await asyncio.gather(*asked)
                messages += [one for one in answers if isinstance(one, Message)]
                failures = [str(one) for one in answers if isinstance(one, Unavailable)]
                if failures:
                    log.warning("a tool failed", task=task.task_id, error=failures[0])
                    return _episode(task, messages, "error")

        return _episode(task, messages, "length")

    async def _offered(self, task: EpisodeTask) -> Mapping[str, Tool]:
        known = await self._toolbox.tools()
        if "tools" not in task.metadata:
            return known
        names = _read(task, "tools", _NAMES)
        if unknown := [name for name in names if name not in known]:
            message = f'metadata["tools"] of task {task.task_id}'
            raise InvalidInput(message, seen=unknown[0], allowed=", ".join(known))
        return {name: known[name] for name in names}


async def _continue(user: Interaction, messages: list[Message], model: Model) -> bool:
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
    text = f"error: at most {MAX_CALLS} calls in one message"
    if index < MAX_CALLS:
        try:
            text = await answer(call, tools)
        except Unavailable as error:
            return error
    return Message("tool", text, tool_call_id=call.call_id, name=call.name)


def turns_of(task: EpisodeTask) -> int:
    """Maximum turns of the model in a task. Raises InvalidInput for metadata of another form."""
    return _read(task, "max_turns", _TURNS) if "max_turns" in task.metadata else DEFAULT_TURNS


def opening(task: EpisodeTask) -> list[Message]:
    """First messages of a task's conversation. Raises InvalidInput for metadata of another form."""
    if "messages" not in task.metadata:
        system = task.metadata.get("system")
        return [*([Message("system", system)] if system else []), Message("user", task.prompt)]
    return [Message(one.role, one.content) for one in _read(task, "messages", _MESSAGES)]


def _read(task: EpisodeTask, key: str, form: TypeAdapter[T]) -> T:
    """A value of the task's metadata, which is JSON. Raises InvalidInput."""
    try:
        return form.validate_json(task.metadata[key])
    except ValidationError as error:
        message, seen = f'metadata["{key}"] of task {task.task_id}', task.metadata[key][:80]
        raise InvalidInput(message, seen=seen, allowed=error.errors()[0]["msg"]) from error


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
