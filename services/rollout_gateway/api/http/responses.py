"""Writes answers in the format of OpenAI's responses API, and keeps past responses in memory."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.errors import NotFound, PacelineError, ResourceExhausted
from paceline.services.rollout_gateway.api.http import answers, requests, responses_schema
from paceline.services.rollout_gateway.calls.call import Call, Piece, Plan
from paceline.services.rollout_gateway.chat.messages import Delta, Message, joined
from paceline.services.rollout_gateway.sessions.names import GatewayNames
from paceline.services.rollout_gateway.sessions.session import Caller

MAX_RESPONSES = 4096
MAX_BYTES = 64 << 20
"""Maximum bytes of all stored responses; a conversation counts with each response that ends it."""

OVERHEAD_BYTES = 100
"""Approximate bytes of a message or a call besides its texts."""


class UnknownResponse(NotFound):
    """No response of that id is stored, or the caller may not read it."""

    def __init__(self, response_id: str, field: str | None = None) -> None:
        super().__init__("no such response", reason="RESPONSE_NOT_FOUND", seen=response_id[:100])
        self.field = field


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and the conversation that ends with it."""

    body: dict[str, Any]
    # without instructions: a later request sends its own instructions
    messages: tuple[Message, ...]
    owner: str  # id of the session whose key requested it; empty: no session
    size: int  # approximate bytes


class PastResponses:
    """The newest responses. The key of a session finds that session's responses only."""

    def __init__(self, names: GatewayNames) -> None:
        self._names = names
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def put(self, body: dict[str, Any], messages: tuple[Message, ...], caller: Caller) -> None:
        """Store a response; the oldest responses make room."""
        size = len(json.dumps(body)) + sum(map(_size, messages))
        entry = Stored(body, messages, caller.queue_key, size)
        self._stored[str(body["id"])] = entry
        self._bytes += entry.size
        while len(self._stored) > MAX_RESPONSES or self._bytes > MAX_BYTES:
            _, oldest = self._stored.popitem(last=False)
            self._bytes -= oldest.size

    def get(self, response_id: str, caller: Caller, field: str | None = None) -> Stored:
        """A response by its id; an error shows `field`. Raises UnknownResponse, FailedPrecondition
        for a response of another gateway.
        """
        found = self._stored.get(response_id)
        if found is None:
            self._names.require_own(response_id)
        if found is None or (caller.session is not None and caller.queue_key != found.owner):
            raise UnknownResponse(response_id, field)
        return found

    def drop(self, response_id: str, caller: Caller) -> None:
        """Delete a response. Raises UnknownResponse."""
        self._bytes -= self.get(response_id, caller).size
        del self._stored[response_id]


def past_responses(request: Request) -> PastResponses:
    """The stored responses of the application."""
    past: PastResponses = request.app.state.past_responses
    return past


async def show(request: Request) -> Response:
    """A stored response."""
    caller = await requests.caller_of(request)
    return JSONResponse(past_responses(request).get(request.path_params["id"], caller).body)


async def delete(request: Request) -> Response:
    """Delete a stored response."""
    caller = await requests.caller_of(request)
    response_id = request.path_params["id"]
    past_responses(request).drop(response_id, caller)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _size(message: Message) -> int:
    texts = [message.content, message.reasoning]
    for call in message.tool_calls:
        texts += [call.name, call.arguments]
    return sum(map(len, texts)) + OVERHEAD_BYTES * (1 + len(message.tool_calls))


_TYPES = {"reasoning": "reasoning", "content": "message", "call": "function_call"}
"""Type of a part's item."""
_PREFIXES = {"reasoning": "rs", "content": "msg", "call": "fc"}
"""Prefix of the id of a part's item."""
Body = responses_schema.ResponsesBody


class OutputItems(answers.MessageParts):
    """The growing items of one response."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name  # suffix of the items' ids

    def end(self, status: str = "completed") -> list[answers.Event]:
        """Events of the end; a response without output has an empty message."""
        news = [] if self.parts else self._grow("content", "")
        return news + super().end(status)

    def _began(self, part: answers.MessagePart) -> list[answers.Event]:
        kind, item = "response.output_item.added", self._item(part)
        added = {"type": kind, "output_index": part.index, "item": item}
        if part.kind == "call":
            return [added]
        item["content"] = []
        return [added, self._of_content(part, "response.content_part.added")]

    def _grew(self, part: answers.MessagePart, text: str) -> answers.Event:
        if part.kind == "call":
            kind = "response.function_call_arguments.delta"
            return {"type": kind, **self._at(part), "delta": text}
        return self._of_text(part, "delta", {"delta": text})

    def _ended(self, part: answers.MessagePart) -> list[answers.Event]:
        item = self._item(part)
        done = {"type": "response.output_item.done", "output_index": part.index, "item": item}
        if part.kind == "call":
            kind = "response.function_call_arguments.done"
            said = {"name": item["name"], "arguments": part.text}
            return [{"type": kind, **self._at(part), **said}, done]
        text = self._of_text(part, "done", {"text": part.text})
        return [text, self._of_content(part, "response.content_part.done"), done]

    def _of_text(self, part: answers.MessagePart, what: str, said: dict[str, Any]) -> answers.Event:
        kind = f"response.{_content(part)['type']}.{what}"
        event = {"type": kind, **self._at(part), "content_index": 0, **said}
        return event | ({"logprobs": []} if part.kind == "content" else {})

    def _of_content(self, part: answers.MessagePart, kind: str) -> answers.Event:
        return {"type": kind, **self._at(part), "content_index": 0, "part": _content(part)}

    def _at(self, part: answers.MessagePart) -> dict[str, Any]:
        """The item that an event belongs to."""
        return {"item_id": self._id(part), "output_index": part.index}

    def _id(self, part: answers.MessagePart) -> str:
        return f"{_PREFIXES[part.kind]}_{self._name}_{part.index}"

    def _item(self, part: answers.MessagePart) -> dict[str, Any]:
        item = {"id": self._id(part), "type": _TYPES[part.kind], "status": part.status}
        if part.call is not None:
            call = {"call_id": part.call.call_id, "name": part.call.name}
            return {**item, **call, "arguments": part.text}
        key, value = ("role", "assistant") if part.kind == "content" else ("summary", [])
        return {**item, key: value, "content": [_content(part)]}


class ResponsesAnswers(answers.Answers[Body]):
    """The answer `response`, whole and as events."""

    body_type = Body
    prefix = "resp_"

    def __init__(self, request: Request, body: Body, caller: Caller) -> None:
        super().__init__(request, body, caller)
        self._past = past_responses(request)
        self._before: tuple[Message, ...] = ()
        self._items = OutputItems(self.id.removeprefix(self.prefix))
        self._sent = 0

    async def plans(self) -> list[Plan]:
        if (before := self.body.previous_response_id) is not None:
            stored = self._past.get(before, self._caller, "previous_response_id")
            self._before = stored.messages
            self.size += stored.size
        return await self._chat(lambda: self.body.request(self._before))

    def whole(self, calls: Sequence[Call]) -> dict[str, Any]:
        (call,) = calls
        for delta in call.deltas:
            self._items.add(delta)
        self._items.end(_status(call))
        return self._finished(call)

    def first(self) -> list[answers.Event]:
        begun = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": begun} for kind in kinds])

    def piece(self, index: int, call: Call, piece: Piece) -> list[answers.Event]:
        return self._numbered(self._items.add(piece.delta or Delta(piece.text)))

    def last(self, calls: Sequence[Call]) -> list[answers.Event]:
        (call,) = calls
        news = self._items.end(_status(call))
        response = self._finished(call)
        ended = {"type": f"response.{response['status']}", "response": response}
        return self._numbered([*news, ended])

    def failed(self, error: PacelineError) -> answers.Event:
        code = "rate_limit_exceeded" if isinstance(error, ResourceExhausted) else "server_error"
        response = {**self._response("failed"), "error": {"code": code, "message": str(error)}}
        return self._numbered([{"type": "response.failed", "response": response}])[0]

    def _finished(self, call: Call) -> dict[str, Any]:
        """The whole response; it is stored unless the client forbids it."""
        response = self._response(_status(call))
        if call.finish == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = _usage(call)
        if self.body.store:
            messages = (*self._before, *self.body.new_messages(), joined(call.deltas))
            self._past.put(response, messages, self._caller)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body = self.body
        choice = body.tool_choice or "auto"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._gateway.model,
            "output": self._items.items,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": None,
            "store": body.store,
            "temperature": body.temperature,
            "text": {"format": _format(body)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _numbered(self, news: list[answers.Event]) -> list[answers.Event]:
        first, self._sent = self._sent, self._sent + len(news)
        return [{**one, "sequence_number": first + index} for index, one in enumerate(news)]


def _status(call: Call) -> str:
    """Status of the response and of its last item."""
    return "completed" if call.finish in ("stop", "tool_calls") else "incomplete"


def _format(body: Body) -> dict[str, Any]:
    form = body.text.format if body.text is not None else None
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)


def _usage(call: Call) -> dict[str, Any]:
    prompt, cached, output, reasoning = answers.usage([call])
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + output,
    }


def _content(part: answers.MessagePart) -> dict[str, Any]:
    """The content of a reasoning or message item."""
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
