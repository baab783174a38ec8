"""Declares the interface of an API's answers, and converts errors to answers.

A request becomes calls; an `Answers` turns them into JSON, whole or as events. `MessageParts`
splits a message for APIs that send it in parts.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse

from paceline import errors
from paceline.rpc.http_requests import status_of
from paceline.services.rollout_gateway.api.http import requests, shapes
from paceline.services.rollout_gateway.calls.call import Call, Piece, Plan
from paceline.services.rollout_gateway.calls.planner import CHECKED_FIELDS, Asked
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Delta, ToolCall
from paceline.services.rollout_gateway.sessions import names, session

ANTHROPIC_TYPES = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
ANTHROPIC_TYPES |= {500: "api_error", 504: "api_error"}
PROMPTS = {"/v1/chat/completions": "messages", "/v1/responses": "input"}
"""Each path's name of the prompt field."""
RETRY_STATUSES = (429, 503)
GATEWAY_HEADER = "x-paceline-gateway"
"""Header with the number of the gateway that has a session; a load balancer routes by it."""


def openai_error(error: errors.PacelineError, path: str = "") -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}; param is the wrong field. path: of the
    request; it determines the name of the prompt field.
    """
    field = getattr(error, "field", None)
    if field is None and (first := error.message.partition(" ")[0].rstrip(":")) in CHECKED_FIELDS:
        field = PROMPTS.get(path, first) if first == "prompt" else first
    about = {"type": status_of(error)[1], "param": field, "code": error.reason.lower()}
    return {"error": {"message": str(error), **about}}


def anthropic_error(error: errors.PacelineError) -> dict[str, Any]:
    """{"type": "error", "error": {"type", "message"}}"""
    status, kind = status_of(error)
    about = {"type": ANTHROPIC_TYPES.get(status, kind), "message": str(error)}
    return {"type": "error", "error": about}


def answer(error: errors.PacelineError, request: Request) -> JSONResponse:
    """The response, with retry-after (s) if a retry may help. `x-should-retry` keeps the clients of
    OpenAI and Anthropic from repeating any other request; some of those have begun.
    """
    status, _ = status_of(error)
    headers = {"x-should-retry": "true" if status in RETRY_STATUSES else "false"}
    if status in RETRY_STATUSES:
        headers["retry-after"] = str(max(math.ceil(error.retry_after_s or 1.0), 1))
    if isinstance(error, names.OtherGateway):
        headers[GATEWAY_HEADER] = str(error.gateway)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    path = request.url.path
    anthropic = path.startswith("/v1/messages")
    body = anthropic_error(error) if anthropic else openai_error(error, path)
    spelled = getattr(request.state, "spelled", {})
    if (field := body["error"].get("param")) in spelled:
        message = body["error"]["message"].removeprefix(field)
        body["error"] |= {"param": spelled[field], "message": f"{spelled[field]}{message}"}
    return JSONResponse(body, status_code=status, headers=headers)


Event = dict[str, Any]
"""A server-sent event. Its `type`, if present, is also the event's name."""
B = TypeVar("B", bound=shapes.SampledBody)


class Answers(ABC, Generic[B]):
    """One request in the format of an API, from its plans to its answer."""

    body_type: type[B]
    prefix = ""
    """Prefix of the answer's id."""
    id_headers: tuple[str, ...] = ("x-request-id",)
    end = b""
    """Bytes at the end of a stream."""

    def __init__(self, request: Request, body: B, caller: session.Caller) -> None:
        self.body = body
        self.size: int = request.state.body_bytes
        self._gateway = requests.gateway_of(request)
        self.id = self._gateway.names.draw(self.prefix)
        self._caller = caller
        self._created = int(time.time())

    @abstractmethod
    async def plans(self) -> list[Plan]:
        """The generations of the request. Raises InvalidInput for an unsupported request."""

    @abstractmethod
    def whole(self, calls: Sequence[Call]) -> dict[str, Any]:
        """The answer of a request without streaming."""

    def _asked(self) -> Asked:
        return Asked(self._caller, self.body.sampling, self.id, size=self.size)

    async def _chat(self, read: Callable[[], ChatRequest]) -> list[Plan]:
        """Plans of the conversation that `read` returns."""
        asked = self._asked()
        request = await self._gateway.aside.run(self.size, read)
        return await self._gateway.planner.chat(asked, request)

    def first(self) -> Iterable[Event]:
        """Events before the first piece."""
        return ()

    @abstractmethod
    def piece(self, index: int, call: Call, piece: Piece) -> Iterable[Event]:
        """Events of one piece; `call` already includes it."""

    def encode_piece(self, index: int, call: Call, piece: Piece) -> bytes:
        """The bytes of the events of `piece`."""
        return framed(self.piece(index, call, piece))

    @abstractmethod
    def last(self, calls: Sequence[Call]) -> Iterable[Event]:
        """Events after the choices."""

    @abstractmethod
    def failed(self, error: errors.PacelineError) -> Event:
        """The event of a stream that failed."""


def framed(events: Iterable[Event]) -> bytes:
    """Encode events in the format of server-sent events."""
    parts: list[bytes] = []
    for event in events:
        if "type" in event:
            parts.append(b"event: %b\n" % event["type"].encode())
        parts.append(b"data: %b\n\n" % orjson.dumps(event))
    return b"".join(parts)


def usage(calls: Sequence[Call], siblings: int = 1) -> tuple[int, int, int, int]:
    """Tokens of the prompts, of these the cached ones, tokens of the outputs, of these the
    reasoning. Sums over all calls; a prompt shared by `siblings` choices counts once.
    """
    prompt = sum(len(call.plan.prompt) for call in calls) // siblings
    cached = min(sum(call.whole.cached_prompt_tokens for call in calls), prompt)
    output = sum(len(call.whole.token_ids) for call in calls)
    return prompt, cached, output, sum(call.reasoning_tokens for call in calls)


Kind = Literal["reasoning", "content", "call"]


@dataclass(slots=True)
class MessagePart:
    """A stretch of a message of a single kind."""

    kind: Kind
    index: int
    call: ToolCall | None
    text: str = ""  # of a call: its arguments
    status: str = "in_progress"


class MessageParts(ABC):
    """The growing parts of one message. A single part is open; opening the next part closes it."""

    def __init__(self) -> None:
        self.parts: list[MessagePart] = []
        self._open: MessagePart | None = None

    @property
    def items(self) -> list[dict[str, Any]]:
        """All parts so far in the API's format."""
        return [self._item(part) for part in self.parts]

    def add(self, delta: Delta) -> list[Event]:
        """Events of a delta."""
        events = self._grow("reasoning", delta.reasoning) if delta.reasoning else []
        events += self._grow("content", delta.content) if delta.content else []
        for call in delta.tool_calls:
            events += self._grow("call", call.arguments, call)
        return events

    def end(self, status: str = "completed") -> list[Event]:
        """Events of the end of the open part, which gets `status`."""
        part, self._open = self._open, None
        if part is None:
            return []
        part.status = status
        return self._ended(part)

    @abstractmethod
    def _item(self, part: MessagePart) -> dict[str, Any]: ...

    @abstractmethod
    def _began(self, part: MessagePart) -> list[Event]: ...

    @abstractmethod
    def _grew(self, part: MessagePart, text: str) -> Event: ...

    @abstractmethod
    def _ended(self, part: MessagePart) -> list[Event]: ...

    def _grow(self, kind: Kind, text: str, call: ToolCall | None = None) -> list[Event]:
        events: list[Event] = []
        part = self._open
        if part is None or part.kind != kind or call is not None:
            events = MessageParts.end(self)
            part = self._open = MessagePart(kind, len(self.parts), call)
            self.parts.append(part)
            events += self._began(part)
        if text:
            part.text += text
            events.append(self._grew(part, text))
        return events
