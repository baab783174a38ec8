"""Bodies of OpenAI's responses API: their fields and items, and the conversion of items to
messages.

A model's turn has several items (reasoning, message, function calls) but is a single Message. A
history that a client sends back has to become the recorded messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Field, Tag

from paceline.services.rollout_gateway.api.http import requests, shapes
from paceline.services.rollout_gateway.api.http.beyond import RESPONSES
from paceline.services.rollout_gateway.chat.messages import (
    ChatRequest,
    Message,
    Role,
    ToolCall,
    ToolChoice,
)

NOT_SERVED = ("background", "conversation", "prompt")
"""Fields that change the meaning of a request, so they cannot be ignored."""


class MessageItem(shapes.StrictShape):
    """A message; an assistant's message is part of a turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: shapes.Content


class CallItem(shapes.StrictShape):
    """An assistant's function call."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: shapes.Arguments


class OutputItem(shapes.StrictShape):
    """A function's result."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: shapes.Content


class ReasoningText(shapes.StrictShape):
    """A piece of reasoning."""

    text: str


class ReasoningItem(shapes.StrictShape):
    """An assistant's reasoning; a summary is used only without other content."""

    type: Literal["reasoning"]
    content: shapes.Several[ReasoningText] | None = None
    summary: shapes.Several[ReasoningText] = Field(default=[])

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[OutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    shapes.by_type("message"),
]
Items = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[shapes.Several[Item], Tag("<other>"), Field(max_length=shapes.MAX_MESSAGES)],
    shapes.TEXT_OR_OTHER,
]


class FunctionKind(shapes.StrictShape):
    """The type of a function, checked before the function's other fields. Only functions are
    supported.
    """

    type: Literal["function"]


class FlatTool(shapes.FunctionShape, FunctionKind):
    """A function that the model may call."""


class NamedFunctionTool(FunctionKind):
    """A choice of one tool."""

    name: str = Field(min_length=1)


class TextFormat(shapes.StrictShape):
    """The required form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    named: str | None = Field(None, alias="name")
    json_schema: shapes.JsonObject | None = Field(None, alias="schema")


class TextConfig(shapes.StrictShape):
    """The format of the text."""

    format: TextFormat | None = None


class ResponsesBody(shapes.SampledBody):
    """POST /v1/responses."""

    beyond = RESPONSES
    input: Items
    instructions: str | None = None
    previous_response_id: str | None = None
    store: shapes.On = True
    tools: shapes.Several[FlatTool] | None = Field(None, max_length=shapes.MAX_TOOLS)
    tool_choice: (
        Annotated[
            Annotated[Literal["auto", "none", "required"], Tag("<text>")]
            | Annotated[NamedFunctionTool, Tag("<other>")],
            shapes.TEXT_OR_OTHER,
        ]
        | None
    ) = None
    parallel_tool_calls: shapes.On = True
    max_output_tokens: shapes.Limit | None = None
    text: TextConfig | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    stop: shapes.Stop | None = None  # extension
    background: shapes.JsonValue = None
    conversation: shapes.JsonValue = None
    prompt: shapes.JsonValue = None

    def unheeded(self) -> Sequence[str]:
        one_call = "" if self.parallel_tool_calls else "parallel_tool_calls"
        return shapes.loose_tools(self.tools, "tools[].strict", one_call)

    def check(self) -> None:
        """Raises FieldError for fields that are not served."""
        for field in NOT_SERVED:
            if seen := getattr(self, field):
                raise requests.FieldError(field, "is not served", seen=str(seen)[:40])

    def limit(self) -> int | None:
        return self.max_output_tokens

    def stops(self) -> list[str]:
        return shapes.stop_list(self.stop)

    def json_schema(self) -> str:
        form = self.text.format if self.text is not None else None
        if form is None or form.type == "text":
            return ""
        if form.type == "json_schema" and form.json_schema is None:
            raise requests.FieldError(
                "text.format.schema", "is missing", seen="null", allowed="a JSON schema"
            )
        return json.dumps(form.json_schema or {})

    def messages(self) -> tuple[Message, ...]:
        """The messages that the input adds to the conversation. Raises FieldError for an empty
        input.
        """
        if isinstance(self.input, str):
            return (Message("user", self.input),)
        if not self.input:
            raise requests.FieldError(
                "input", "is empty", seen="[]", allowed="text, or one item or more"
            )
        return tuple(grouped(self.input))

    def request(self, before: Sequence[Message]) -> ChatRequest:
        """The gateway's ChatRequest. `before`: the conversation up to the previous response,
        without instructions.
        """
        system = (Message("system", self.instructions),) if self.instructions else ()
        choice = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            asked = ToolChoice("named", choice.name)
        else:
            asked = ToolChoice(choice or "auto")
        tools = tuple(tool.shown() for tool in self.tools or ())
        return ChatRequest(
            (*system, *before, *self.messages()),
            tools,
            asked,
            strict_tools=shapes.strict_names(self.tools or ()),
            one_call=not self.parallel_tool_calls,
        )


class _Turn:
    """Items of one assistant turn."""

    def __init__(self) -> None:
        self.items: list[MessageItem | CallItem | ReasoningItem] = []

    def continues(self, item: MessageItem | CallItem | ReasoningItem) -> bool:
        """Whether the item belongs to this turn. Reasoning begins a turn, and so does a message
        directly after another message.
        """
        if not self.items or isinstance(item, CallItem):
            return True
        return isinstance(item, MessageItem) and not isinstance(self.items[-1], MessageItem)

    def message(self) -> Message:
        said = [
            shapes.joined_text(item.content) for item in self.items if isinstance(item, MessageItem)
        ]
        thought = [item.text for item in self.items if isinstance(item, ReasoningItem)]
        calls = [
            ToolCall(one.call_id, one.name, one.arguments)
            for one in self.items
            if isinstance(one, CallItem)
        ]
        return Message("assistant", "".join(said), "".join(thought), tuple(calls))


def grouped(items: Sequence[Any]) -> Iterator[Message]:
    """Convert items to messages; the items of one assistant turn become one message."""
    turn = _Turn()
    for item in items:
        spoken = isinstance(item, CallItem | ReasoningItem) or (
            isinstance(item, MessageItem) and item.role == "assistant"
        )
        if turn.items and not (spoken and turn.continues(item)):
            yield turn.message()
            turn = _Turn()
        if spoken:
            turn.items.append(item)
        elif isinstance(item, OutputItem):
            yield Message("tool", shapes.joined_text(item.output), tool_call_id=item.call_id)
        else:
            role = "system" if item.role == "developer" else item.role
            yield Message(cast("Role", role), shapes.joined_text(item.content))

    if turn.items:
        yield turn.message()
