"""Writes answers in Anthropic's format: content blocks and their events."""

import json
from collections.abc import Sequence
from typing import Any

from paceline.errors import PacelineError
from paceline.services.rollout_gateway.api.http import answers, anthropic_schema
from paceline.services.rollout_gateway.calls.call import Call, Piece, Plan
from paceline.services.rollout_gateway.chat.messages import Delta

STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "abort": "end_turn",
}
_FIELDS = {"reasoning": "thinking", "content": "text"}
"""Type of a part's block, and the name of its text field."""


class ContentBlocks(answers.MessageParts):
    """The growing blocks of one message."""

    def _item(self, part: answers.MessagePart) -> dict[str, Any]:
        if part.call is not None:
            call = {"id": part.call.call_id, "name": part.call.name}
            return {"type": "tool_use", **call, "input": input_value(part.text)}
        field = _FIELDS[part.kind]
        signature = {"signature": ""} if part.kind == "reasoning" else {}
        return {"type": field, field: part.text, **signature}

    def _began(self, part: answers.MessagePart) -> list[answers.Event]:
        return [_of(part, "content_block_start") | {"content_block": self._item(part)}]

    def _grew(self, part: answers.MessagePart, text: str) -> answers.Event:
        if part.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            delta = {"type": f"{_FIELDS[part.kind]}_delta", _FIELDS[part.kind]: text}
        return _of(part, "content_block_delta") | {"delta": delta}

    def _ended(self, part: answers.MessagePart) -> list[answers.Event]:
        return [_of(part, "content_block_stop")]


class AnthropicAnswers(answers.Answers[anthropic_schema.MessagesBody]):
    """The answer `message`, whole and as events."""

    body_type = anthropic_schema.MessagesBody
    prefix = "msg_"
    id_headers = ("x-request-id", "request-id")

    async def plans(self) -> list[Plan]:
        self._blocks = ContentBlocks()
        plans = await self._chat(self.body.request)
        self._prompt_tokens = len(plans[0].prompt)
        return plans

    def whole(self, calls: Sequence[Call]) -> dict[str, Any]:
        (call,) = calls
        for delta in call.deltas:
            self._blocks.add(delta)
        content = {"content": self._blocks.items, **_stop(call), "usage": _usage(call)}
        return self._message() | content

    def first(self) -> list[answers.Event]:
        return [{"type": "message_start", "message": self._message()}, {"type": "ping"}]

    def piece(self, index: int, call: Call, piece: Piece) -> list[answers.Event]:
        return self._blocks.add(piece.delta or Delta(piece.text))

    def last(self, calls: Sequence[Call]) -> list[answers.Event]:
        (call,) = calls
        news = {"type": "message_delta", "delta": _stop(call), "usage": _usage(call)}
        return [*self._blocks.end(), news, {"type": "message_stop"}]

    def failed(self, error: PacelineError) -> answers.Event:
        return answers.anthropic_error(error)

    def _message(self) -> dict[str, Any]:
        """The message before any output. The count of cached prompt tokens follows at the end."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._gateway.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._prompt_tokens, "output_tokens": 0},
        }


def _of(part: answers.MessagePart, kind: str) -> answers.Event:
    return {"type": kind, "index": part.index}


def input_value(arguments: str) -> Any:
    """A call's arguments as a JSON value.

    Arguments that are invalid JSON, or cannot be encoded, become a text in `arguments`.
    """
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    # also half of a surrogate pair, or a number out of range
    except (ValueError, RecursionError):
        return {"arguments": arguments.encode("utf-8", "replace").decode()}
    return value


def _stop(call: Call) -> dict[str, Any]:
    matched = call.whole.matched_stop if call.finish == "stop" else ""
    if matched:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": STOP_REASONS[call.finish], "stop_sequence": None}


def _usage(call: Call) -> dict[str, Any]:
    """Token counts; input tokens exclude cached tokens."""
    counted = answers.usage([call])
    return {
        "input_tokens": counted.prompt - counted.cached,
        "cache_read_input_tokens": counted.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counted.output,
        "output_tokens_details": {"thinking_tokens": counted.reasoning},
    }
