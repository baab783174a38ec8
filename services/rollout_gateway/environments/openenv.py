"""The environment of an OpenEnv server: `openenv:URL[?OPTION=VALUE&...]`.

Each sample has a WebSocket of its own, which is a session of the server. The server's observations
become messages. If the server lists tools, the model's calls are the actions; else its text is.
Options are `action`, the field of a text action; `observation`, the field with the text of an
observation; `reward`, "last" or "sum"; and `deadline_s` of one answer. Needs the extra `openenv`.
"""

import asyncio
import json
import math
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

import httpx
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from paceline.addresses import direct, proxied
from paceline.errors import ConfigError, InvalidInput, Unavailable
from paceline.local.patience import patient
from paceline.services.rollout_gateway.chat.messages import Message, ToolCall
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask, Model, kinds
from paceline.services.rollout_gateway.environments.tools import Tool, schema, shortened
from paceline.telemetry import get_logger

PREFIX = "openenv:"
"""Begins the name of such an environment."""
RESET = "reset"
"""Key of a task's metadata: arguments of the server's reset, a JSON object."""
MAX_BYTES = 16 << 20
"""Maximum bytes of one message of a server."""
FULL_S = 1.0
"""Pause before another connection to a server that is full with sessions of others."""
ALLOWED = f"{PREFIX}http://HOST:PORT[?action=FIELD&observation=FIELD&reward=last|sum&deadline_s=60]"
log = get_logger(__name__)


class Options(BaseModel):
    """The options of a name."""

    model_config = ConfigDict(extra="forbid")
    action: str = ""
    observation: str = ""
    reward: Literal["last", "sum"] = "last"
    deadline_s: Annotated[float, Field(gt=0, le=3600)] = 60


class _Result(BaseModel):
    """A server's answer to reset or step."""

    observation: dict[str, JsonValue] = {}
    reward: float | None = None
    done: bool = False


_ARGUMENTS: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])


class _Full(Exception):
    """The server has no free session."""


class OpenEnv:
    """One server. An instance leads many samples at once."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError for a name of another form."""
        url, _, options = name.removeprefix(PREFIX).partition("?")
        try:
            self._options = Options.model_validate(dict(parse_qsl(options, strict_parsing=True)))
            given = httpx.URL(url)
        except (ValueError, httpx.InvalidURL) as error:
            raise ConfigError("no OpenEnv server", seen=name, allowed=ALLOWED) from error
        if given.scheme not in ("http", "https") or not given.host:
            raise ConfigError("no OpenEnv server", seen=name, allowed=ALLOWED)
        self._url, self._field = url.rstrip("/"), self._options.action
        self._ended = asyncio.Condition()
        self._open = 0  # sessions of this instance

    async def prepare(self, _: object) -> None:
        """Read the form of actions. Raises ConfigError, or Unavailable without the server."""
        _websockets()
        try:
            async with httpx.AsyncClient(
                timeout=patient(self._options.deadline_s), **direct(self._url)
            ) as client:
                answer = (await client.get(f"{self._url}/schema")).raise_for_status().json()
                found = answer["action"].get("properties", {})
        except (httpx.HTTPError, ValueError, KeyError, AttributeError) as error:
            raise self._away(f"/schema: {type(error).__name__}: {error}") from error
        texts = [name for name, one in found.items() if _takes_text(name, one)]
        if self._options.action and self._options.action not in found:
            message, allowed = f"an action of {self._url} has no such field", ", ".join(found)
            raise ConfigError(message, seen=self._options.action, allowed=allowed)
        self._field = self._options.action or (texts[0] if len(texts) == 1 else "")

    async def run(self, task: EpisodeTask, model: Model) -> Episode:
        """Lead one sample. A lost server ends it with finish "error".

        Raises InvalidInput for metadata of another form, or when the server refuses an action.
        """
        messages: list[Message] = []
        async with self._session(_reset_arguments(task)) as (ask, begun):
            try:
                return await self._lead(ask, begun, task, model, messages)
            except Unavailable as error:
                log.warning("a server was lost", task=task.task_id, error=str(error))
                spoken = [one.content for one in messages if one.role == "assistant"]
                return Episode(task, spoken[-1] if spoken else "", "error", tuple(messages))

    async def _lead(
        self,
        ask: "_Session",
        result: _Result,
        task: EpisodeTask,
        model: Model,
        messages: list[Message],
    ) -> Episode:
        """`result`: of the reset. `messages`: empty; receives the conversation."""
        tools = [schema(tool) for tool in await ask.tools()]
        if not tools and not self._field:
            message = f"{self._url} has neither tools nor one field for text; name it by ?action="
            raise ConfigError(message, seen="several fields, or none", allowed=ALLOWED)
        *before, last = kinds.opening(task)
        seen = self._text(result)
        messages += [*before, Message("user", "\n\n".join(filter(None, (last.content, seen))))]
        rewards: list[float] = []
        finish, turns = "length", kinds.turns_of(task)
        for left in reversed(range(turns)):
            turn = await model.chat(tuple(messages), tools)
            messages.append(turn.message)
            calls, finish = turn.message.tool_calls, turn.finish
            if finish not in ("stop", "tool_calls") or (tools and not calls):
                break
            for action, call in self._actions(turn.message, tools):
                result = action if isinstance(action, _Result) else await ask.result("step", action)
                rewards += [] if result.reward is None else [result.reward]
                messages.append(_answer(self._text(result), call))
                if result.done:
                    break
            finish = "stop" if result.done or left else "length"
            if result.done:
                break
        total = sum(rewards) if self._options.reward == "sum" else rewards[-1] if rewards else None
        reward = None if not rewards else total
        text = next(one.content for one in reversed(messages) if one.role == "assistant")
        return Episode(task, text, finish, tuple(messages), reward)

    def _actions(
        self, message: Message, tools: Sequence[object]
    ) -> list[tuple[Mapping[str, Any] | _Result, ToolCall | None]]:
        """The actions of a message with their calls; in place of an action that cannot be sent, the
        observation of its error.
        """
        if not tools:
            return [({self._field: message.content}, None)]
        found: list[tuple[Mapping[str, Any] | _Result, ToolCall | None]] = []
        for index, call in enumerate(message.tool_calls):
            try:
                arguments = _ARGUMENTS.validate_json(call.arguments)
                named = {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
                fault = f"at most {kinds.MAX_CALLS} calls in one message"
            except ValidationError as error:
                named, fault = {}, f"the arguments are no JSON object: {error.errors()[0]['msg']}"
            if named and index < kinds.MAX_CALLS:
                found.append((named, call))
            else:
                found.append((_Result(observation={"text": f"error: {fault}"}), call))
        return found

    def _text(self, result: _Result) -> str:
        """The text of an observation: the named field, the result of a tool, the only text, or all
        fields as JSON.
        """
        found = {name: one for name, one in result.observation.items() if name != "metadata"}
        if self._options.observation:
            found = {"text": found.get(self._options.observation, "")}
        elif "tool_name" in found:
            found = {"text": _tool_text(found)}
        only = [one for one in found.values() if isinstance(one, str)]
        if (
            len(only) == 1
            and len([one for one in found.values() if one not in (None, [], {})]) <= 1
        ):
            return shortened(only[0])
        return shortened(json.dumps(found, ensure_ascii=False)) if found else ""

    @asynccontextmanager
    async def _session(self, reset: Mapping[str, Any]) -> AsyncIterator[tuple["_Session", _Result]]:
        """A session of the server with the result of its reset; waits while the server is full.
        Raises InvalidInput, Unavailable.
        """
        while True:
            async with self._connected() as connection:
                session = _Session(connection, self._url, self._options.deadline_s)
                with suppress(_Full):
                    begun = await session.result("reset", reset)
                    self._open += 1
                    try:
                        yield session, begun
                    finally:
                        self._open -= 1
                        async with self._ended:
                            self._ended.notify_all()
                        await session.close()
                    return
            log.info("an OpenEnv server is full", url=self._url, own_sessions=self._open)
            async with self._ended:
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if self._open else patient(FULL_S)):
                        await self._ended.wait()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        websockets = _websockets()
        place = "ws" + self._url.removeprefix("http") + "/ws"
        limit_s = patient(self._options.deadline_s)
        try:
            connection = await websockets.connect(
                place, open_timeout=limit_s, max_size=MAX_BYTES, proxy=proxied(self._url) or None
            )
        except (OSError, TimeoutError, websockets.WebSocketException) as error:
            raise self._away(f"{type(error).__name__}: {error}") from error
        try:
            yield connection
        finally:
            await connection.close()

    def _away(self, seen: str) -> Unavailable:
        return Unavailable(f"the OpenEnv server {self._url} cannot be used", seen=seen)


class _Session:
    """One connection: sends a message and returns the answer."""

    def __init__(self, connection: Any, url: str, deadline_s: float) -> None:
        self._connection, self._url, self._deadline_s = connection, url, deadline_s

    async def result(self, kind: str, data: Mapping[str, Any]) -> _Result:
        """The answer to reset or step. Raises InvalidInput, Unavailable, and _Full when the server
        has no session for this connection.
        """
        try:
            result = _Result.model_validate(await self._ask(kind, data))
        except ValidationError as error:
            seen = error.errors()[0]["msg"]
            raise InvalidInput(f"{self._url} sent no observation", seen=seen) from error
        if result.reward is not None and not math.isfinite(result.reward):
            raise InvalidInput(f"{self._url} sent a reward that is not finite", seen=result.reward)
        return result

    async def tools(self) -> list[Tool]:
        """The server's tools; none without the protocol of tools."""
        asked = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
        listed = (await self._ask("mcp", asked)).get("result") or {}
        return [
            Tool(one["name"], one.get("description") or "", _input(one), _never)
            for one in listed.get("tools", [])
        ]

    async def close(self) -> None:
        """End the session on the server, if it still listens."""
        with suppress(_websockets().WebSocketException, OSError):
            await self._connection.send(json.dumps({"type": "close"}))

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        message = {"type": kind, "data": dict(data)}
        limit_s = patient(self._deadline_s)
        try:
            async with asyncio.timeout(limit_s):
                await self._connection.send(json.dumps(message))
                answer = json.loads(await self._connection.recv())
        except TimeoutError as error:
            late = f"no answer to {kind} in {limit_s:g} s"
            raise Unavailable(f"the OpenEnv server {self._url} hangs", seen=late) from error
        except (OSError, ValueError, _websockets().WebSocketException) as error:
            seen = f"{type(error).__name__}: {error}"
            raise Unavailable(f"the OpenEnv server {self._url} was lost", seen=seen) from error
        found = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(found, dict):
            raise InvalidInput(
                f"{self._url} answered {kind} in another form", seen=str(answer)[:200]
            )
        if answer.get("type") == "error":
            if found.get("code") == "CAPACITY_REACHED":
                raise _Full
            raise InvalidInput(f"{self._url} refused {kind}", seen=str(found)[:500])
        return found


def _websockets() -> Any:
    """The library. Raises ConfigError without it."""
    try:
        import websockets
    except ImportError as error:
        message, allowed = (
            "openenv:URL needs the library websockets",
            "pip install 'paceline[openenv]'",
        )
        raise ConfigError(message, seen=str(error), allowed=allowed) from error
    return websockets


async def _never(_: object) -> str:
    raise AssertionError("a tool of a server is an action")


def _input(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found = tool.get("input_schema") or tool.get("inputSchema")
    return found if isinstance(found, dict) else {"type": "object", "properties": {}}


def _takes_text(name: str, field: Any) -> bool:
    return (
        name not in ("metadata", "type")
        and isinstance(field, dict)
        and field.get("type") == "string"
    )


def _reset_arguments(task: EpisodeTask) -> dict[str, JsonValue]:
    """The task's arguments of reset. The default seed is the task's own, so siblings begin alike.
    Raises InvalidInput.
    """
    try:
        given = _ARGUMENTS.validate_json(task.metadata.get(RESET, "{}"))
    except ValidationError as error:
        message, seen = f'metadata["{RESET}"] of task {task.task_id}', task.metadata[RESET][:80]
        raise InvalidInput(message, seen=seen, allowed="a JSON object") from error
    return {"seed": zlib.crc32(task.task_id.encode()) >> 1, **given}


def _answer(text: str, call: ToolCall | None) -> Message:
    if call is None:
        return Message("user", text)
    return Message("tool", text or "[no output]", tool_call_id=call.call_id, name=call.name)


def _tool_text(observation: Mapping[str, Any]) -> str:
    """The text of a tool's answer or of its error."""
    if fault := observation.get("error"):
        return f"error: {fault.get('message', fault) if isinstance(fault, dict) else fault}"
    result = observation.get("result")
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        parts = [one for one in result["content"] if isinstance(one, dict)]
        return "\n".join(str(one.get("text", f"[{one.get('type')}]")) for one in parts)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
