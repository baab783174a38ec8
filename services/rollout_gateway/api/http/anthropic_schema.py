"""Bodies of Anthropic's messages API: their fields and blocks, and the conversion of blocks to
messages.

A history that a client sends back has to become the recorded messages. So an assistant's blocks
become a single Message, and each tool result of a user becomes its own Message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from paceline.services.rollout_gateway.api.http import requests, shapes
from paceline.services.rollout_gateway.api.http.beyond import MESSAGES
from paceline.services.rollout_gateway.chat.messages import (
    ChatRequest,
    Message,
    ToolCall,
    ToolChoice,
)
from paceline.services.rollout_gateway.engines.sampling import MAX_STOPS

FAILED = "Error: "
"""Prefix of a tool result that is marked as an error; chat templates have no other place for the
mark.
"""


class TextBlock(shapes.StrictShape):
    """A block of text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(shapes.StrictShape):
    """An assistant's reasoning. Its signature is ignored, because the gateway signs nothing."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(shapes.StrictShape):
    """Encrypted reasoning; the gateway cannot read it and leaves it out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(shapes.StrictShape):
    """An assistant's call."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: shapes.JsonValue


_Text = Annotated[TextBlock, Tag("<text>")]
Texts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[shapes.Several[Annotated[_Text, shapes.by_type()]], Tag("<other>")],
    shapes.TEXT_OR_OTHER,
]


class ToolResultBlock(shapes.StrictShape):
    """A tool's result."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: Texts | None = None
    is_error: shapes.Off = False

    def message(self) -> Message:
        """The gateway's Message."""
        text = shapes.joined_text(self.content)
        return Message(
            "tool", FAILED + text if self.is_error else text, tool_call_id=self.tool_use_id
        )


Block = Annotated[
    _Text
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    shapes.by_type(),
]
Blocks = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[shapes.Several[Block], Tag("<other>")],
    shapes.TEXT_OR_OTHER,
]


BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Block types that each role may use."""


class MessageBody(shapes.StrictShape):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    def said(self, index: int) -> list[Message]:
        """The gateway's messages; errors show `index`.

        Raises FieldError for blocks of another role.
        """
        blocks = (
            [TextBlock(type="text", text=self.content)]
            if isinstance(self.content, str)
            else self.content
        )
        allowed = BLOCKS[self.role]
        for number, block in enumerate(blocks):
            if block.type not in allowed:
                field = f"messages[{index}].content[{number}].type"
                raise requests.FieldError(
                    field, f"is not {self.role}'s", seen=block.type, allowed=", ".join(allowed)
                )

        if self.role == "user":
            return list(_user(blocks))
        return [
            _assistant(blocks)
            if self.role == "assistant"
            else Message("system", shapes.joined_text(blocks))
        ]


class CustomKind(shapes.StrictShape):
    """The type of a custom tool, checked before the tool's other fields. Tools that run at
    Anthropic are not served.
    """

    type: Literal["custom"] | None = None


class AnthropicTool(shapes.FunctionShape, CustomKind):
    """A tool with its own schema."""

    parameters: shapes.JsonObject = Field(alias="input_schema")


class AnthropicToolChoice(shapes.StrictShape):
    """Whether the model may, must or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> ToolChoice:
        """The gateway's ToolChoice. Raises FieldError for a tool without a name."""
        if self.type == "tool":
            if not self.name:
                raise requests.FieldError(
                    "tool_choice.name", "is missing", seen="null", allowed="the name of a tool"
                )
            return ToolChoice("named", self.name)
        return ToolChoice("required" if self.type == "any" else self.type)


class OutputFormat(shapes.StrictShape):
    """The schema that the text has to match."""

    type: Literal["json_schema"]
    json_schema: shapes.JsonObject = Field(alias="schema")


class OutputConfig(shapes.StrictShape):
    """The format of the text."""

    format: OutputFormat | None = None


class ConversationBody(shapes.StrictShape):
    """POST /v1/messages/count_tokens; also the base of a message request."""

    beyond = MESSAGES
    model: str | None = None
    messages: shapes.Several[MessageBody] = Field(min_length=1, max_length=shapes.MAX_MESSAGES)
    system: Texts | None = None
    tools: shapes.Several[AnthropicTool] | None = Field(None, max_length=shapes.MAX_TOOLS)
    tool_choice: AnthropicToolChoice | None = None

    def unheeded(self) -> Sequence[str]:
        single = bool(self.tool_choice and self.tool_choice.disable_parallel_tool_use)
        one_call = "tool_choice.disable_parallel_tool_use" if single else ""
        return shapes.loose_tools(self.tools, "tools[].strict", one_call)

    def request(self) -> ChatRequest:
        """The gateway's ChatRequest. Raises FieldError for blocks in the wrong place."""
        told = shapes.joined_text(self.system)
        messages = [Message("system", told)] if told else []
        for index, one in enumerate(self.messages):
            said = one.said(index)
            if one.role == "assistant" and messages and messages[-1].role == "assistant":
                said = [_both(messages.pop(), said[0])]
            messages += said

        choice = ToolChoice() if self.tool_choice is None else self.tool_choice.choice()
        prefill = self._prefill(messages.pop(), choice) if messages[-1].role == "assistant" else ""
        if not any(message.role != "system" for message in messages):
            raise requests.FieldError(
                "messages", "has nothing to answer", seen="no user's message", allowed="one or more"
            )

        return ChatRequest(
            tuple(messages),
            tuple(tool.shown() for tool in self.tools or ()),
            choice,
            prefill,
            shapes.strict_names(self.tools or ()),
            one_call=bool(self.tool_choice and self.tool_choice.disable_parallel_tool_use),
        )

    def _prefill(self, message: Message, choice: ToolChoice) -> str:
        field = f"messages[{len(self.messages) - 1}].content"
        if message.tool_calls or message.reasoning:
            raise requests.FieldError(
                field, "of the last assistant message is text alone", seen="tool_use or thinking"
            )
        if message.content and choice.mode in ("required", "named"):
            raise requests.FieldError(
                field,
                "cannot begin an answer that has to be a tool call",
                seen=message.content[:40],
            )
        return message.content


class MessagesBody(ConversationBody, shapes.SampledBody):
    """POST /v1/messages."""

    max_tokens: shapes.Limit
    top_k: shapes.TopK = 0
    stop_sequences: list[str] | None = Field(None, max_length=MAX_STOPS)
    output_config: OutputConfig | None = None

    def limit(self) -> int:
        return self.max_tokens

    def stops(self) -> list[str]:
        return self.stop_sequences or []

    def json_schema(self) -> str:
        form = self.output_config.format if self.output_config is not None else None
        return "" if form is None else json.dumps(form.json_schema)


def _user(blocks: Sequence[Any]) -> Iterator[Message]:
    """A user's blocks: each tool result by itself, the texts between results joined."""
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
            continue
        if texts:
            yield Message("user", "".join(texts))
            texts = []
        yield block.message()
    if texts or not blocks:
        yield Message("user", "".join(texts))


def _assistant(blocks: Sequence[Any]) -> Message:
    said = [block.text for block in blocks if isinstance(block, TextBlock)]
    thought = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return Message("assistant", "".join(said), "".join(thought), tuple(calls))


def _both(first: Message, second: Message) -> Message:
    """Join consecutive assistant messages into one turn: a client may send an answer back after its
    prefill.
    """
    calls = first.tool_calls + second.tool_calls
    return Message(
        "assistant", first.content + second.content, first.reasoning + second.reasoning, calls
    )
