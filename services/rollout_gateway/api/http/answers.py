"""Declares the interface of an API's answers, and the parts shared by all APIs.

A request becomes calls; an `Answers` turns them into JSON, whole or as events. `MessageParts`
splits a message for APIs that send it in parts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import orjson
from starlette.requests import Request

from paceline.errors import PacelineError
from paceline.services.rollout_gateway.api.http.keys import gateway_of
from paceline.services.rollout_gateway.api.http.shapes import SampledBody
from paceline.services.rollout_gateway.calls.call import Call, Piece, Plan
from paceline.services.rollout_gateway.calls.planner import Asked
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Delta, ToolCallDelta
from paceline.services.rollout_gateway.sessions.session import Caller

Event = dict[str, Any]
"""A server-sent event. Its `type`, if present, is also the event's name."""
B = TypeVar("B", bound=SampledBody)


class Answers(ABC, Generic[B]):
    """One request in the format of an API, from its plans to its answer."""

    prefix = ""
    """Prefix of the answer's id."""
    id_headers: tuple[str, ...] = ("x-request-id",)
    end = b""
    """Bytes at the end of a stream."""

    def __init__(self, request: Request, body: B, caller: Caller) -> None:
        self.body = body
        self.size: int = request.state.body_bytes
        self._gateway = gateway_of(request)
        self.id = self._gateway.names.draw(self.prefix)
        self._caller = caller
        self._created = int(time.time())

    @abstractmethod
    async def plans(self) -> list[Plan]:
        """The generations of the request. Raises InvalidInput for an unsupported request."""

    @abstractmethod
    def whole(self, calls: Sequence[Call]) -> dict[str, Any]:
        """The answer of a request without streaming."""

    def _asked(self, count: int = 1) -> Asked:
        return Asked(
            self._caller,
            self.body.sampling,
            self.id,
            count,
            size=self.size,
            special=self.body.with_special_tokens(),
            kept=self.body.kept_prompt_tokens(),
        )

    async def _chat(self, read: Callable[[], ChatRequest], count: int = 1) -> list[Plan]:
        """Plans of the conversation that `read` returns."""
        request = await self._gateway.aside.run(self.size, read)
        return await self._gateway.planner.chat(self._asked(count), request)

    def first(self) -> Iterable[Event]:
        """Events before the first piece."""
        return ()

    @abstractmethod
    def piece(self, index: int, call: Call, piece: Piece) -> Iterable[Event]:
        """Events of one piece; `call` already includes it."""

    def told(self, index: int, call: Call, piece: Piece) -> bytes:
        """The bytes of the events of `piece`."""
        return framed(self.piece(index, call, piece))

    @abstractmethod
    def last(self, calls: Sequence[Call]) -> Iterable[Event]:
        """Events after the choices."""

    @abstractmethod
    def failed(self, error: PacelineError) -> Event:
        """The event of a stream that failed."""


def framed(events: Iterable[Event]) -> bytes:
    """Encode events in the format of server-sent events."""
    return b"".join([_framed(event) for event in events])


def _framed(event: Event) -> bytes:
    data = b"data: %b\n\n" % orjson.dumps(event)
    return b"event: %b\n%b" % (event["type"].encode(), data) if "type" in event else data


class TokenCounts(NamedTuple):
    """Token counts of an answer."""

    prompt: int
    cached: int  # of the prompt
    said: int
    thought: int  # reasoning tokens among the output tokens


def usage(calls: Sequence[Call], siblings: int = 1) -> TokenCounts:
    """Sum over all calls; a prompt shared by `siblings` choices counts once."""
    prompt = sum(len(call.plan.prompt) for call in calls) // siblings
    return TokenCounts(
        prompt,
        min(sum(call.whole.cached_prompt_tokens for call in calls), prompt),
        sum(len(call.whole.token_ids) for call in calls),
        sum(call.reasoning_tokens for call in calls),
    )


Kind = Literal["reasoning", "content", "call"]


@dataclass(slots=True)
class MessagePart:
    """A stretch of a message of a single kind."""

    kind: Kind
    index: int
    call: ToolCallDelta | None  # of a call: its first delta
    text: str = ""  # of a call: its arguments
    status: str = "in_progress"


class MessageParts(ABC):
    """The growing parts of one message. A single part is open; opening the next part closes it."""

    def __init__(self) -> None:
        self.parts: list[MessagePart] = []
        self._open: MessagePart | None = None

    def add(self, delta: Delta) -> list[Event]:
        """Events of a delta."""
        return [event for news in _news(delta) for event in self._grow(*news)]

    def end(self, status: str = "completed") -> list[Event]:
        """Events of the end; the last part gets `status`."""
        return self._close(status)

    def _close(self, status: str) -> list[Event]:
        part, self._open = self._open, None
        if part is None:
            return []
        part.status = status
        return self._ended(part)

    @abstractmethod
    def _began(self, part: MessagePart) -> list[Event]: ...

    @abstractmethod
    def _grew(self, part: MessagePart, text: str) -> Event: ...

    @abstractmethod
    def _ended(self, part: MessagePart) -> list[Event]: ...

    def _grow(self, kind: Kind, text: str, call: ToolCallDelta | None = None) -> list[Event]:
        events: list[Event] = []
        part = self._open
        known = None if part is None or part.call is None else part.call.index
        if part is None or part.kind != kind or (call is not None and call.index != known):
            events = self._close("completed")
            part = self._open = MessagePart(kind, len(self.parts), call)
            self.parts.append(part)
            events += self._began(part)
        if text:
            part.text += text
            events.append(self._grew(part, text))
        return events


def _news(delta: Delta) -> Iterator[tuple[Any, ...]]:
    if delta.reasoning:
        yield "reasoning", delta.reasoning
    if delta.content:
        yield "content", delta.content
    for call in delta.tool_calls:
        yield "call", call.arguments, call
