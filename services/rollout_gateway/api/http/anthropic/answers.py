"""Answers of Anthropic's messages API.

Owns content blocks, the order of their events, and the message.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.errors import PacelineError
from rollout_gateway.api.http.errors import anthropic_error
from rollout_gateway.api.http.streaming import AnswerChoice, Event
from rollout_gateway.calls.call import Piece
from rollout_gateway.chat.messages import Delta, ToolCallDelta

STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "abort": "end_turn",
}
EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
"""Blocks before anything is said in them."""
DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}


class ContentBlocks:
    """The blocks of one message as they grow. One is open at a time; opening the next closes it."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._kind = ""  # of the open block; empty: none is open
        self._call = -1  # index of the open call
        self._arguments = ""  # of the open call, as text

    def add(self, delta: Delta) -> list[Event]:
        """Events of what was said."""
        events: list[Event] = []
        if delta.reasoning:
            events += self._text("thinking", delta.reasoning)
        if delta.content:
            events += self._text("text", delta.content)
        for call in delta.tool_calls:
            events += self._called(call)
        return events

    def end(self) -> list[Event]:
        """Events of the end."""
        return self._close()

    def _text(self, kind: str, text: str) -> list[Event]:
        events = [] if self._kind == kind else self._begin(kind, dict(EMPTY[kind]))
        self.blocks[-1][kind] += text
        return [*events, self._delta({"type": DELTAS[kind], kind: text})]

    def _called(self, call: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if self._kind != "tool_use" or self._call != call.index:
            block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
            events = self._begin("tool_use", block)
            self._call, self._arguments = call.index, ""
        self._arguments += call.arguments
        if call.arguments:
            events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def _begin(self, kind: str, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self._kind = kind
        self.blocks.append(block)
        start = {
            "type": "content_block_start",
            "index": len(self.blocks) - 1,
            "content_block": dict(block),
        }
        return [*events, ("content_block_start", start)]

    def _close(self) -> list[Event]:
        if not self._kind:
            return []
        if self._kind == "tool_use":
            self.blocks[-1]["input"] = input_value(self._arguments)
        self._kind = ""
        return [
            ("content_block_stop", {"type": "content_block_stop", "index": len(self.blocks) - 1})
        ]

    def _delta(self, delta: dict[str, Any]) -> Event:
        body = {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}
        return "content_block_delta", body


class AnthropicAnswers:
    """`message`, whole and as events."""

    end = ""

    def __init__(self, model: str, message_id: str, prompt_tokens: int) -> None:
        self._model = model
        self._id = message_id
        self._prompt_tokens = prompt_tokens
        self._blocks = ContentBlocks()

    def whole(self, choices: list[AnswerChoice]) -> dict[str, Any]:
        (choice,) = choices
        for delta in choice.deltas:
            self._blocks.add(delta)
        self._blocks.end()
        return {
            **self._message(),
            "content": self._blocks.blocks,
            **_stop(choice),
            "usage": _usage(choice),
        }

    def first(self) -> list[Event]:
        return [
            ("message_start", {"type": "message_start", "message": self._message()}),
            ("ping", {"type": "ping"}),
        ]

    def piece(self, index: int, choice: AnswerChoice, piece: Piece) -> list[Event]:
        return self._blocks.add(piece.delta or Delta(piece.text))

    def last(self, choices: list[AnswerChoice]) -> list[Event]:
        (choice,) = choices
        news = {"type": "message_delta", "delta": _stop(choice), "usage": _usage(choice)}
        return [
            *self._blocks.end(),
            ("message_delta", news),
            ("message_stop", {"type": "message_stop"}),
        ]

    def failed(self, error: PacelineError) -> list[Event]:
        return [("error", anthropic_error(error))]

    def _message(self) -> dict[str, Any]:
        """The message before anything is said; what of the prompt was cached is known at the
        end.
        """
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._prompt_tokens, "output_tokens": 0},
        }


def input_value(arguments: str) -> Any:
    """A call's arguments as a JSON value.

    What cannot be one, or not be sent, is told as its text in `arguments`.
    """
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (
        ValueError,
        RecursionError,
    ):  # also half of a surrogate pair, or a number too large to be one
        return {"arguments": arguments.encode("utf-8", "replace").decode()}
    return value


def _stop(choice: AnswerChoice) -> dict[str, Any]:
    matched = choice.whole.matched_stop if choice.finish == "stop" else ""
    if matched:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": STOP_REASONS[choice.finish], "stop_sequence": None}


def _usage(choice: AnswerChoice) -> dict[str, Any]:
    """Input tokens are those that the cache did not have."""
    cached = min(choice.whole.cached_prompt_tokens, choice.prompt_tokens)
    return {
        "input_tokens": choice.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(choice.whole.token_ids),
        "output_tokens_details": {"thinking_tokens": choice.reasoning_tokens},
    }
