"""Bodies of Anthropic's messages API. Owns which fields and blocks exist, and how blocks become
messages.

A history that is sent back has to become the messages that were recorded: an assistant's blocks are
one Message, a user's tool results are one Message each.
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
"""Begins the content of a tool result that is marked as an error: chat templates have no other
place for the mark.
"""


class TextBlock(StrictShape):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(StrictShape):
    """What an assistant thought; its signature is ignored, the gateway signs nothing."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(StrictShape):
    """Thinking that nobody here can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(StrictShape):
    """A call of an assistant."""

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
    """What a tool gave back."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: Texts | None = None
    is_error: Off = False

    def message(self) -> Message:
        """As the gateway knows it."""
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
"""Types of the blocks that each role may say."""


class MessageBody(StrictShape):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    def said(self, index: int) -> list[Message]:
        """As the gateway knows it; `index` is told in errors.

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
    """Tools that Anthropic runs are not served; its field is checked before those of the tool."""

    type: Literal["custom"] | None = None


class AnthropicTool(FunctionShape, CustomKind):
    """A tool with a schema of its own."""

    parameters: JsonObject = Field(alias="input_schema")


class AnthropicToolChoice(StrictShape):
    """Whether the model may, must or must not use a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> ToolChoice:
        """As the gateway knows it. Raises FieldError for a tool without a name."""
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
    """Where the form of the text stands."""

    format: OutputFormat | None = None


class ConversationBody(StrictShape):
    """POST /v1/messages/count_tokens, and what a message needs as well."""

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
        """As the gateway knows it. Raises FieldError for blocks in the wrong place."""
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
    """A user's blocks: tool results one by one, the texts between them joined."""
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
    """Assistant messages in a row are one turn: an answer to a prefill may be sent back behind
    it.
    """
    calls = first.tool_calls + second.tool_calls
    return Message(
        "assistant", first.content + second.content, first.reasoning + second.reasoning, calls
    )
