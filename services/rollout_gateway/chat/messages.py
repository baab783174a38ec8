"""The nouns of a conversation, equal for every API, and the equality of messages.

OpenAI's chat completions and responses and Anthropic's messages all become a ChatRequest.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

Role = Literal["system", "user", "assistant", "tool"]
_SPELLED = json.JSONEncoder(ensure_ascii=False)
_LARGEST_EXACT = 2**53
"""Integers up to this one are equal as int and as float."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's call of a tool."""

    call_id: str
    name: str
    arguments: str  # JSON text as the model wrote it

    def shown(self, *, parsed: bool = False) -> dict[str, Any]:
        """In the form of OpenAI's chat completions. `parsed`: see Message.shown."""
        arguments: Any = self.arguments
        if parsed:
            with suppress(ValueError, RecursionError):  # no JSON, or nested too deeply
                arguments = json.loads(self.arguments)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Message:
    """One message."""

    role: Role
    content: str = ""
    reasoning: str = ""  # an assistant's reasoning before its content
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant
    tool_call_id: str = ""  # of a tool: the call that it answers
    name: str = ""

    def shown(self, *, parsed: bool = False) -> dict[str, Any]:
        """In the form of OpenAI's chat completions. `parsed`: arguments of tool calls as an object
        if they are one, as chat templates want them; otherwise they stay the model's text.
        """
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.shown(parsed=parsed) for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        return message

    def digest(self, before: bytes) -> bytes:
        """Identity of the conversation up to this message, from the identity of the messages before
        it.

        Everything that a client sends back counts. Arguments of tool calls count as JSON values,
        since clients parse and write them anew.
        """
        calls = [[call.call_id, call.name, _canonical(call.arguments)] for call in self.tool_calls]
        parts = [self.role, self.content, self.reasoning, calls, self.tool_call_id, self.name]
        return hashlib.sha256(
            before + _SPELLED.encode(parts).encode("utf-8", "surrogatepass")
        ).digest()


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or must not call a tool."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""  # of the tool, with "named"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to continue with one assistant message."""

    messages: tuple[Message, ...]
    # {"type": "function", "function": {name, description, parameters}}
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    prefill: str = ""  # beginning of the message, which the model continues
    strict_tools: frozenset[str] = frozenset()  # tools with arguments that must match their schema
    one_call: bool = False  # a message has at most one call

    def digests(self) -> list[bytes]:
        """[messages + 1] identity of the conversation before the first message and after each
        message.
        """
        digest = hashlib.sha256(json.dumps(list(self.tools), sort_keys=True).encode()).digest()
        found = [digest]
        for message in self.messages:
            digest = message.digest(digest)
            found.append(digest)
        return found

    def tool_names(self) -> Iterator[str]:
        """Names of the tools offered."""
        return (str(tool["function"]["name"]) for tool in self.tools)


@dataclass(frozen=True, slots=True)
class Delta:
    """An update of an assistant's message. A call is in one update."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, deltas: Sequence[Self]) -> Self:
        """Joins several updates into one update."""
        if len(deltas) == 1:
            return deltas[0]
        whole = joined(deltas)
        return cls(whole.content, whole.reasoning, whole.tool_calls)


def joined(parts: Sequence[Delta | Message]) -> Message:
    """The assistant's message built from its updates, or from consecutive messages."""
    content = "".join([one.content for one in parts])
    reasoning = "".join([one.reasoning for one in parts])
    calls = tuple(call for one in parts for call in one.tool_calls)
    return Message("assistant", content, reasoning, calls)


def _canonical(arguments: str) -> str:
    """Equal for equal JSON values; 1.0 and 1 are equal, since JavaScript writes both as 1."""
    try:
        return json.dumps(json.loads(arguments, parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if abs(value) <= _LARGEST_EXACT and value.is_integer() else value
