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
from paceline.services.rollout_gateway.environments.tools import shortened
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
AWAY = "OPENENV_AWAY"
"""Error reason for a server that does not answer."""


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


_Act = tuple[Mapping[str, Any] | _Result, ToolCall | None]
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
            if given.scheme not in ("http", "https") or not given.host:
                raise ValueError(url)
        except (ValueError, httpx.InvalidURL) as error:
            raise ConfigError("no OpenEnv server", seen=name, allowed=ALLOWED) from error
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
            texts = [name for name, one in found.items() if one.get("type") == "string"]
            texts = [name for name in texts if name not in ("metadata", "type")]
        except (httpx.HTTPError, ValueError, KeyError, AttributeError) as error:
            raise _away(self._url, "/schema", error) from error
        if self._options.action and self._options.action not in found:
            message, allowed = f"an action of {self._url} has no such field", ", ".join(found)
            raise ConfigError(message, seen=self._options.action, allowed=allowed)
        self._field = self._options.action or (texts[0] if len(texts) == 1 else "")

    async def run(self, task: EpisodeTask, model: Model) -> Episode:
        """Lead one sample. A server that is away or lost ends it with finish "error".

        Raises InvalidInput for metadata of another form, or when the server refuses an action.
        """
        messages: list[Message] = []
        try:
            async with self._session(_reset_arguments(task)) as begun:
                return await self._lead(begun, task, model, messages)
        except Unavailable as error:
            if error.reason != AWAY:  # of the gateway itself
                raise
            log.warning("an OpenEnv server was lost", task=task.task_id, error=str(error))
            return Episode(task, _last_said(messages), "error", tuple(messages))

    async def _lead(
        self, begun: "_Begun", task: EpisodeTask, model: Model, messages: list[Message]
    ) -> Episode:
        """`messages`: empty; receives the conversation."""
        ask, result = begun
        tools = await ask.tools()
        if not tools and not self._field:
            message = f"{self._url} has neither tools nor one field for text; name it by ?action="
            raise ConfigError(message, seen="several fields, or none", allowed=ALLOWED)
        *before, last = kinds.opening(task)
        seen = self._text(result)
        messages += [*before, Message("user", "\n\n".join(filter(None, (last.content, seen))))]
        rewards: list[float] = []
        finish = "length"
        for _ in range(kinds.turns_of(task)):
            turn = await model.chat(tuple(messages), tools)
            messages.append(turn.message)
            ends = turn.finish not in ("stop", "tool_calls", "length")
            if ends or (tools and not turn.message.tool_calls):
                finish = turn.finish
                break
            for action, call in self._actions(turn.message, tools):
                result = action if isinstance(action, _Result) else await ask.result("step", action)
                rewards += [] if result.reward is None else [result.reward]
                messages.append(_answer(self._text(result), call))
                if result.done:
                    break
            if result.done or turn.finish == "length":
                finish = turn.finish
                break
        reward = sum(rewards) if self._options.reward == "sum" else (rewards or [0.0])[-1]
        text, told = _last_said(messages), reward if rewards else None
        return Episode(task, text, finish, tuple(messages), told)

    def _actions(self, message: Message, tools: Sequence[object]) -> list[_Act]:
        """The actions of a message with their calls; in place of an action that cannot be sent, the
        observation of its error.
        """
        if not tools:
            return [({self._field: message.content}, None)]
        found: list[_Act] = []
        for call in message.tool_calls[: kinds.MAX_CALLS]:
            try:
                arguments = _ARGUMENTS.validate_json(call.arguments)
            except ValidationError as error:
                fault = f"error: the arguments are no JSON object: {error.errors()[0]['msg']}"
                found.append((_Result(observation={"text": fault}), call))
            else:
                named = {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
                found.append((named, call))
        fault = f"error: at most {kinds.MAX_CALLS} calls in one message"
        late = _Result(observation={"text": fault})
        return found + [(late, call) for call in message.tool_calls[kinds.MAX_CALLS :]]

    def _text(self, result: _Result) -> str:
        """The text of an observation: the named field, the result of a tool, the only text, or all
        fields as JSON.
        """
        found = {name: one for name, one in result.observation.items() if name != "metadata"}
        if self._options.observation:
            found = {"text": found.get(self._options.observation, "")}
        elif "tool_name" in found:
            found = {"text": _tool_text(found)}
        told = [one for one in found.values() if one not in (None, "", [], {})]
        if len(told) <= 1 and all(isinstance(one, str) for one in told):
            return shortened("".join(map(str, told)))
        return shortened(json.dumps(found, ensure_ascii=False))

    @asynccontextmanager
    async def _session(self, reset: Mapping[str, Any]) -> AsyncIterator["_Begun"]:
        """A session of the server with the result of its reset; waits while the server is full.
        Raises InvalidInput, Unavailable.
        """
        while True:
            session = await self._connected()
            try:
                with suppress(_Full):
                    begun = await session.result("reset", reset)
                    self._open += 1
                    try:
                        yield session, begun
                    finally:
                        self._open -= 1
                        async with self._ended:
                            self._ended.notify_all()
                    return
            finally:
                await session.close()
            log.info("an OpenEnv server is full", url=self._url, own_sessions=self._open)
            async with self._ended:
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if self._open else patient(FULL_S)):
                        await self._ended.wait()

    async def _connected(self) -> "_Session":
        websockets = _websockets()
        place, limit_s = "ws" + self._url.removeprefix("http") + "/ws", self._options.deadline_s
        options = {"max_size": MAX_BYTES, "proxy": proxied(self._url) or None}
        try:
            found = await websockets.connect(place, open_timeout=patient(limit_s), **options)
        except (OSError, websockets.WebSocketException) as error:
            raise _away(self._url, place, error) from error
        return _Session(found, self._url, limit_s)


def _away(url: str, what: str, error: Exception) -> Unavailable:
    seen = f"{type(error).__name__}: {error}".rstrip(": ")
    return Unavailable(f"the OpenEnv server {url} does not answer {what}", reason=AWAY, seen=seen)


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

    async def tools(self) -> list[dict[str, Any]]:
        """The server's tools in OpenAI's form; none without the protocol of tools."""
        asked = {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
        listed = (await self._ask("mcp", asked)).get("result") or {}
        found = []
        for one in listed.get("tools", []):
            form = one.get("input_schema") or one.get("inputSchema") or {"type": "object"}
            about = {"name": one["name"], "description": one.get("description") or ""}
            found.append({"type": "function", "function": {**about, "parameters": form}})
        return found

    async def close(self) -> None:
        """End the session on the server, if it still listens, and the connection."""
        with suppress(_websockets().WebSocketException, OSError):
            await self._connection.send(json.dumps({"type": "close"}))
        await self._connection.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        message = {"type": kind, "data": dict(data)}
        limit_s = patient(self._deadline_s)
        try:
            async with asyncio.timeout(limit_s):
                with suppress(_websockets().ConnectionClosed):  # the reason is yet to be received
                    await self._connection.send(json.dumps(message))
                answer = json.loads(await self._connection.recv())
        except (OSError, ValueError, _websockets().WebSocketException) as error:
            raise _away(self._url, f"{kind} within {limit_s:g} s", error) from error
        found = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(found, dict):
            fault = f"{self._url} answered {kind} in another form"
            raise InvalidInput(fault, seen=str(answer)[:200])
        if answer.get("type") == "error":
            if found.get("code") == "CAPACITY_REACHED":
                raise _Full
            raise InvalidInput(f"{self._url} refused {kind}", seen=str(found)[:500])
        return found


_Begun = tuple[_Session, _Result]
"""A session, and the result of its reset."""


def _websockets() -> Any:
    """The library. Raises ConfigError without it."""
    try:
        import websockets
    except ImportError as error:
        message = "openenv:URL needs the library websockets"
        raise ConfigError(message, allowed="pip install 'paceline[openenv]'") from error
    return websockets


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


def _last_said(messages: Sequence[Message]) -> str:
    """The text of the model's last message; empty without one."""
    return next((one.content for one in reversed(messages) if one.role == "assistant"), "")


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
