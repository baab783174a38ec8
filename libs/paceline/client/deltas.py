"""A streamed chat answer: chunks in, deltas out, and the joined message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.client.answers import (
    ChatAnswer,
    Json,
    ToolCall,
    Usage,
    documented_shape,
    need,
    reasoning_of,
    text_of,
)
from paceline.client.failures import error_in_stream
from paceline.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """An update of one tool call; joined by index, names and arguments give the whole call."""

    index: int
    id: str = ""  # in the first update of a call
    name: str = ""  # in the first update of a call
    arguments: str = ""  # more of the JSON text


@dataclass(frozen=True, slots=True)
class Delta:
    """An update of an answer. `str(delta)` is its text."""

    completion_id: str
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()  # with return_token_ids
    finish_reason: str = ""  # of the last delta

    def __str__(self) -> str:
        return self.text


class Joined:
    """Joins the chunks of one streamed answer."""

    def __init__(self) -> None:
        self._head: Json = {}
        self._message: Json = {"role": "assistant"}
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ToolCall] = {}
        self._token_ids: list[int] | None = None
        self._finish = ""
        self._usage = Usage()
        self._raw_usage: Any = None

    def add(self, chunk: Json) -> Delta | None:
        """The delta of this chunk; None for a chunk with usage alone.

        Raises the error that the chunk carries, or DataLoss.
        """
        if "error" in chunk:
            raise error_in_stream(chunk)
        with documented_shape():
            return self._add(chunk)

    def _add(self, chunk: Json) -> Delta | None:
        self._head = self._head or {name: chunk.get(name) for name in ("id", "created", "model")}
        if chunk.get("usage"):
            self._usage, self._raw_usage = Usage.read(chunk["usage"]), chunk["usage"]
        choices = need(chunk, "choices", list)
        return self._delta(need(chunk, "id", str), choices[0]) if choices else None

    def _delta(self, completion_id: str, choice: Json) -> Delta:
        news = choice.get("delta") or {}
        delta = Delta(
            completion_id,
            text=text_of(news, "content"),
            reasoning=reasoning_of(news),
            tool_calls=tuple(_call_delta(call) for call in news.get("tool_calls") or ()),
            token_ids=tuple(choice.get("token_ids") or ()),
            finish_reason=text_of(choice, "finish_reason"),
        )
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._finish = delta.finish_reason or self._finish
        if "token_ids" in choice:
            self._token_ids = [*(self._token_ids or []), *delta.token_ids]
        for call in delta.tool_calls:
            known = self._calls.get(call.index, ToolCall("", "", ""))
            self._calls[call.index] = ToolCall(
                known.id or call.id, known.name or call.name, known.arguments + call.arguments
            )

        return delta

    def answer(self) -> ChatAnswer:
        """The whole answer. Raises FailedPrecondition before its end."""
        if not self._finish:
            raise FailedPrecondition(
                "the streamed answer has not ended; iterate to its end first", reason="NOT_ENDED"
            )

        text, reasoning = "".join(self._text), "".join(self._reasoning)
        calls = tuple(self._calls[index] for index in sorted(self._calls))
        message: Json = {"role": "assistant", "content": text or (None if calls else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {
                    "id": one.id,
                    "type": "function",
                    "function": {"name": one.name, "arguments": one.arguments},
                }
                for one in calls
            ]

        choice = {
            "index": 0,
            "message": message,
            "finish_reason": self._finish,
            "token_ids": self._token_ids,
        }
        return ChatAnswer(
            completion_id=str(self._head["id"]),
            text=text,
            message=message,
            finish_reason=self._finish,
            usage=self._usage,
            tool_calls=calls,
            reasoning=reasoning,
            token_ids=None if self._token_ids is None else tuple(self._token_ids),
            raw={
                **self._head,
                "object": "chat.completion",
                "choices": [choice],
                "usage": self._raw_usage,
            },
        )


def _call_delta(data: Json) -> ToolCallDelta:
    function = data.get("function") or {}
    return ToolCallDelta(
        int(data.get("index") or 0),
        text_of(data, "id"),
        text_of(function, "name"),
        text_of(function, "arguments"),
    )
