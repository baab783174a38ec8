"""Answers of OpenAI's responses API.

Owns output items, the order of the events that build them, and the response.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.errors import PacelineError, ResourceExhausted
from rollout_gateway.api.http.responses.schema import ResponsesBody
from rollout_gateway.api.http.streaming import AnswerChoice, Event
from rollout_gateway.calls.call import Piece
from rollout_gateway.chat.messages import Delta, Message, ToolCallDelta

News = dict[str, Any]
"""An event without its number."""


class OutputItems:
    """The items of one response as they grow. One is open at a time; opening the next closes it."""

    def __init__(self, name: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._name = name  # what the ids of the items end in
        self._open: dict[str, Any] | None = None
        self._call = -1  # index of the open function call

    def add(self, delta: Delta) -> list[News]:
        """Events of what was said."""
        news: list[News] = []
        if delta.reasoning:
            news += self._text("reasoning", delta.reasoning)
        if delta.content:
            news += self._text("message", delta.content)
        for call in delta.tool_calls:
            news += self._called(call)
        return news

    def end(self, status: str) -> list[News]:
        """Events of the end: the last item gets `status`.

        A response that said nothing has an empty message.
        """
        news = [] if self.items else self._begin(_message_item(self._id("msg")))
        return news + self._close(status)

    def _text(self, kind: str, text: str) -> list[News]:
        news: list[News] = []
        if self._open is None or self._open["type"] != kind:
            news = self._begin(
                _message_item(self._id("msg"))
                if kind == "message"
                else _reasoning_item(self._id("rs"))
            )
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        delta: News = {
            "type": f"response.{part['type']}.delta",
            **self._at(part=True),
            "delta": text,
        }
        return [*news, delta | ({"logprobs": []} if kind == "message" else {})]

    def _called(self, call: ToolCallDelta) -> list[News]:
        news: list[News] = []
        if self._open is None or self._open["type"] != "function_call" or self._call != call.index:
            self._call = call.index
            news = self._begin(_call_item(self._id("fc"), call))
        assert self._open is not None
        if call.arguments:
            self._open["arguments"] += call.arguments
            news.append(
                {
                    "type": "response.function_call_arguments.delta",
                    **self._at(),
                    "delta": call.arguments,
                },
            )
        return news

    def _begin(self, item: dict[str, Any]) -> list[News]:
        news = self._close("completed")
        self.items.append(item)
        self._open = item
        shown = {**item, "content": []} if "content" in item else dict(item)
        news.append(
            {
                "type": "response.output_item.added",
                "output_index": len(self.items) - 1,
                "item": shown,
            }
        )
        if "content" in item:
            part = dict(item["content"][0])
            news.append(
                {"type": "response.content_part.added", **self._at(part=True), "part": part}
            )
        return news

    def _close(self, status: str) -> list[News]:
        item = self._open
        if item is None:
            return []
        news: list[News] = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            news.append({"type": "response.function_call_arguments.done", **self._at(), **done})
        else:
            part = dict(item["content"][0])
            said: News = {
                "type": f"response.{part['type']}.done",
                **self._at(part=True),
                "text": part["text"],
            }
            news.append(said | ({"logprobs": []} if item["type"] == "message" else {}))
            news.append({"type": "response.content_part.done", **self._at(part=True), "part": part})
        item["status"] = status
        index = len(self.items) - 1
        self._open = None
        return [
            *news,
            {"type": "response.output_item.done", "output_index": index, "item": dict(item)},
        ]

    def _at(self, *, part: bool = False) -> News:
        """Where an event belongs: to the open item, or to its part."""
        place: News = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {**place, "content_index": 0} if part else place

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._name}_{len(self.items)}"


class ResponsesAnswers:
    """`response`, whole and as events."""

    end = ""

    def __init__(
        self,
        model: str,
        body: ResponsesBody,
        response_id: str,
        finished: Callable[[dict[str, Any], Message], None],
    ) -> None:
        """`finished` is told of the response and of what the model said, once both are whole."""
        self._model = model
        self._body = body
        self._id = response_id
        self._created = int(time.time())
        self._finished = finished
        self._items = OutputItems(response_id.removeprefix("resp_"))
        self._sent = 0

    def whole(self, choices: list[AnswerChoice]) -> dict[str, Any]:
        (choice,) = choices
        for delta in choice.deltas:
            self._items.add(delta)
        self._items.end(_item_status(choice.finish))
        return self._ended(choice)

    def first(self) -> list[Event]:
        begun = self._response("in_progress")
        return self._numbered(
            [
                {"type": "response.created", "response": begun},
                {"type": "response.in_progress", "response": begun},
            ]
        )

    def piece(self, index: int, choice: AnswerChoice, piece: Piece) -> list[Event]:
        news = self._items.add(piece.delta or Delta(piece.text))
        return self._numbered(news)

    def last(self, choices: list[AnswerChoice]) -> list[Event]:
        (choice,) = choices
        news = self._items.end(_item_status(choice.finish))
        response = self._ended(choice)
        return self._numbered(
            [*news, {"type": f"response.{response['status']}", "response": response}]
        )

    def failed(self, error: PacelineError) -> list[Event]:
        code = "rate_limit_exceeded" if isinstance(error, ResourceExhausted) else "server_error"
        response = {**self._response("failed"), "error": {"code": code, "message": str(error)}}
        return self._numbered([{"type": "response.failed", "response": response}])

    def _ended(self, choice: AnswerChoice) -> dict[str, Any]:
        response = self._response(
            "completed" if choice.finish in ("stop", "tool_calls") else "incomplete"
        )
        if choice.finish == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = _usage(choice)
        self._finished(response, choice.message)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        choice = body.tool_choice or "auto"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": [dict(item) for item in self._items.items],
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
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

    def _numbered(self, news: list[News]) -> list[Event]:
        events: list[Event] = []
        for one in news:
            events.append((one["type"], {**one, "sequence_number": self._sent}))
            self._sent += 1
        return events


def _item_status(finish: str) -> str:
    return "completed" if finish in ("stop", "tool_calls") else "incomplete"


def _format(body: ResponsesBody) -> dict[str, Any]:
    form = body.text.format if body.text is not None else None
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)


def _usage(choice: AnswerChoice) -> dict[str, Any]:
    said = len(choice.whole.token_ids)
    return {
        "input_tokens": choice.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": min(choice.whole.cached_prompt_tokens, choice.prompt_tokens),
            "cache_write_tokens": 0,
        },
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
        "total_tokens": choice.prompt_tokens + said,
    }


def _message_item(item_id: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {
        "id": item_id,
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [part],
    }


def _reasoning_item(item_id: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": ""}
    return {
        "id": item_id,
        "type": "reasoning",
        "status": "in_progress",
        "summary": [],
        "content": [part],
    }


def _call_item(item_id: str, call: ToolCallDelta) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "status": "in_progress",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": "",
    }
