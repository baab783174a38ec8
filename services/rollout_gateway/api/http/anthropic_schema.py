"""Bodies of Anthropic's messages API: their fields and blocks, and the conversion of blocks to
messages.

A history that a client sends back has to become the recorded messages. So an assistant's blocks
become a single Message, and each tool result of a user becomes its own Message.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from paceline.services.rollout_gateway.api.http import beyond, shapes
from paceline.services.rollout_gateway.chat import messages as chat
from paceline.services.rollout_gateway.engines.sampling import MAX_STOPS

FAILED = "Error: "
"""Prefix of a tool result that is marked as an error; chat templates have no other place for the
mark.
"""


class TextBlock(shapes.Shape):
    """A block of text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(shapes.Shape):
    """An assistant's reasoning. Its signature is ignored, because the gateway signs nothing."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(shapes.Shape):
    """Encrypted reasoning; the gateway cannot read it and leaves it out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(shapes.Shape):
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


class ToolResultBlock(shapes.Shape):
    """A tool's result."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: Texts | None = None
    is_error: shapes.Off = False

    def message(self) -> chat.Message:
        """The gateway's Message."""
        text = shapes.joined_text(self.content)
        return chat.Message(
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


class MessageBody(shapes.Shape):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    def converted(self, index: int) -> list[chat.Message]:
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
                raise beyond.FieldError(
                    field, f"is not {self.role}'s", seen=block.type, allowed=", ".join(allowed)
                )

        if self.role == "user":
            return list(_user(blocks))
        return [
            _assistant(blocks)
            if self.role == "assistant"
            else chat.Message("system", shapes.joined_text(blocks))
        ]


class CustomKind(shapes.Shape):
    """The type of a custom tool, checked before the tool's other fields. Tools that run at
    Anthropic are not served.
    """

    type: Literal["custom"] | None = None


class AnthropicTool(shapes.FunctionShape, CustomKind):
    """A tool with its own schema."""

    parameters: shapes.JsonObject = Field(alias="input_schema")


class AnthropicToolChoice(shapes.Shape):
    """Whether the model may, must or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> chat.ToolChoice:
        """The gateway's ToolChoice. Raises FieldError for a tool without a name."""
        if self.type == "tool":
            if not self.name:
                raise beyond.FieldError(
                    "tool_choice.name", "is missing", seen="null", allowed="the name of a tool"
                )
            return chat.ToolChoice("named", self.name)
        return chat.ToolChoice("required" if self.type == "any" else self.type)


class OutputFormat(shapes.Shape):
    """The schema that the text has to match."""

    type: Literal["json_schema"]
    json_schema: shapes.JsonObject = Field(alias="schema")


class OutputConfig(shapes.Shape):
    """The format of the text."""

    format: OutputFormat | None = None


class ConversationBody(shapes.ToolsShape):
    """POST /v1/messages/count_tokens; also the base of a message request."""

    undeclared = beyond.MESSAGES
    one_call_field = "tool_choice.disable_parallel_tool_use"
    model: str | None = None
    messages: shapes.Several[MessageBody] = Field(min_length=1, max_length=shapes.MAX_MESSAGES)
    system: Texts | None = None
    tools: shapes.Several[AnthropicTool] | None = Field(None, max_length=shapes.MAX_TOOLS)
    tool_choice: AnthropicToolChoice | None = None

    @property
    def one_call(self) -> bool:
        return bool(self.tool_choice and self.tool_choice.disable_parallel_tool_use)

    def functions(self) -> Sequence[shapes.FunctionShape]:
        return self.tools or []

    def request(self) -> chat.ChatRequest:
        """The gateway's ChatRequest. Raises FieldError for blocks in the wrong place."""
        system = shapes.joined_text(self.system)
        said = [chat.Message("system", system)] if system else []
        for index, one in enumerate(self.messages):
            news = one.converted(index)
            if one.role == "assistant" and said and said[-1].role == "assistant":
                news = [_both(said.pop(), news[0])]
            said += news

        choice = chat.ToolChoice() if self.tool_choice is None else self.tool_choice.choice()
        prefill = self._prefill(said.pop(), choice) if said[-1].role == "assistant" else ""
        if not any(message.role != "system" for message in said):
            raise beyond.FieldError(
                "messages", "has nothing to answer", seen="no user's message", allowed="one or more"
            )
        return self.chat_request(said, choice, prefill)

    def _prefill(self, message: chat.Message, choice: chat.ToolChoice) -> str:
        field = f"messages[{len(self.messages) - 1}].content"
        if message.tool_calls or message.reasoning:
            raise beyond.FieldError(
                field, "of the last assistant message is text alone", seen="tool_use or thinking"
            )
        if message.content and choice.mode in ("required", "named"):
            raise beyond.FieldError(
                field,
                "cannot begin an answer that has to be a tool call",
                seen=message.content[:40],
            )
        return message.content


class MessagesBody(ConversationBody, shapes.SampledBody):
    """POST /v1/messages."""

    max_tokens: shapes.Limit
    top_k: shapes.TopK = 0
    stop: list[str] | None = Field(None, alias="stop_sequences", max_length=MAX_STOPS)
    output_config: OutputConfig | None = None

    def json_schema(self) -> str:
        form = self.output_config.format if self.output_config is not None else None
        return "" if form is None else json.dumps(form.json_schema)


def _user(blocks: Sequence[Any]) -> Iterator[chat.Message]:
    """A user's blocks: each tool result by itself, the texts between results joined."""
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
            continue
        if texts:
            yield chat.Message("user", "".join(texts))
            texts = []
        yield block.message()
    if texts or not blocks:
        yield chat.Message("user", "".join(texts))


def _assistant(blocks: Sequence[Any]) -> chat.Message:
    said = [block.text for block in blocks if isinstance(block, TextBlock)]
    thought = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        chat.ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return chat.Message("assistant", "".join(said), "".join(thought), tuple(calls))


def _both(first: chat.Message, second: chat.Message) -> chat.Message:
    """Join consecutive assistant messages into one turn: a client may send an answer back after its
    prefill.
    """
    calls = first.tool_calls + second.tool_calls
    return chat.Message(
        "assistant", first.content + second.content, first.reasoning + second.reasoning, calls
    )
