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

from paceline.services.rollout_gateway.api.http.beyond import MESSAGES
from paceline.services.rollout_gateway.api.http.bodies import FieldError
from paceline.services.rollout_gateway.api.http.shapes import (
    MAX_MESSAGES,
    MAX_TOOLS,
    TEXT_OR_OTHER,
    FunctionShape,
    JsonObject,
    JsonValue,
    Limit,
    Off,
    SampledBody,
    Several,
    StrictShape,
    TopK,
    by_type,
    joined_text,
    loose_tools,
    strict_names,
)
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


class TextBlock(StrictShape):
    """A block of text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(StrictShape):
    """An assistant's reasoning. Its signature is ignored, because the gateway signs nothing."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(StrictShape):
    """Encrypted reasoning; the gateway cannot read it and leaves it out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(StrictShape):
    """An assistant's call."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: JsonValue


_Text = Annotated[TextBlock, Tag("<text>")]
Texts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Several[Annotated[_Text, by_type()]], Tag("<other>")],
    TEXT_OR_OTHER,
]


class ToolResultBlock(StrictShape):
    """A tool's result."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: Texts | None = None
    is_error: Off = False

    def message(self) -> Message:
        """The gateway's Message."""
        text = joined_text(self.content)
        return Message(
            "tool", FAILED + text if self.is_error else text, tool_call_id=self.tool_use_id
        )


Block = Annotated[
    _Text
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    by_type(),
]
Blocks = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Several[Block], Tag("<other>")],
    TEXT_OR_OTHER,
]


BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Block types that each role may use."""


class MessageBody(StrictShape):
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
                raise FieldError(
                    field, f"is not {self.role}'s", seen=block.type, allowed=", ".join(allowed)
                )

        if self.role == "user":
            return list(_user(blocks))
        return [
            _assistant(blocks)
            if self.role == "assistant"
            else Message("system", joined_text(blocks))
        ]


class CustomKind(StrictShape):
    """The type of a custom tool, checked before the tool's other fields. Tools that run at
    Anthropic are not served.
    """

    type: Literal["custom"] | None = None


class AnthropicTool(FunctionShape, CustomKind):
    """A tool with its own schema."""

    parameters: JsonObject = Field(alias="input_schema")


class AnthropicToolChoice(StrictShape):
    """Whether the model may, must or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> ToolChoice:
        """The gateway's ToolChoice. Raises FieldError for a tool without a name."""
        if self.type == "tool":
            if not self.name:
                raise FieldError(
                    "tool_choice.name", "is missing", seen="null", allowed="the name of a tool"
                )
            return ToolChoice("named", self.name)
        return ToolChoice("required" if self.type == "any" else self.type)


class OutputFormat(StrictShape):
    """The schema that the text has to match."""

    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(StrictShape):
    """The format of the text."""

    format: OutputFormat | None = None


class ConversationBody(StrictShape):
    """POST /v1/messages/count_tokens; also the base of a message request."""

    beyond = MESSAGES
    model: str | None = None
    messages: Several[MessageBody] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Texts | None = None
    tools: Several[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnthropicToolChoice | None = None

    def unheeded(self) -> Sequence[str]:
        single = bool(self.tool_choice and self.tool_choice.disable_parallel_tool_use)
        one_call = "tool_choice.disable_parallel_tool_use" if single else ""
        return loose_tools(self.tools, "tools[].strict", one_call)

    def request(self) -> ChatRequest:
        """The gateway's ChatRequest. Raises FieldError for blocks in the wrong place."""
        told = joined_text(self.system)
        messages = [Message("system", told)] if told else []
        for index, one in enumerate(self.messages):
            said = one.said(index)
            if one.role == "assistant" and messages and messages[-1].role == "assistant":
                said = [_both(messages.pop(), said[0])]
            messages += said

        choice = ToolChoice() if self.tool_choice is None else self.tool_choice.choice()
        prefill = self._prefill(messages.pop(), choice) if messages[-1].role == "assistant" else ""
        if not any(message.role != "system" for message in messages):
            raise FieldError(
                "messages", "has nothing to answer", seen="no user's message", allowed="one or more"
            )

        return ChatRequest(
            tuple(messages),
            tuple(tool.shown() for tool in self.tools or ()),
            choice,
            prefill,
            strict_names(self.tools or ()),
            one_call=bool(self.tool_choice and self.tool_choice.disable_parallel_tool_use),
        )

    def _prefill(self, message: Message, choice: ToolChoice) -> str:
        field = f"messages[{len(self.messages) - 1}].content"
        if message.tool_calls or message.reasoning:
            raise FieldError(
                field, "of the last assistant message is text alone", seen="tool_use or thinking"
            )
        if message.content and choice.mode in ("required", "named"):
            raise FieldError(
                field,
                "cannot begin an answer that has to be a tool call",
                seen=message.content[:40],
            )
        return message.content


class MessagesBody(ConversationBody, SampledBody):
    """POST /v1/messages."""

    max_tokens: Limit
    top_k: TopK = 0
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
