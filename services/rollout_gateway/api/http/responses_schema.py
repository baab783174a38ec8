"""Bodies of OpenAI's responses API: their fields and items, and the conversion of items to
messages.

A model's turn has several items (reasoning, message, function calls) but is a single Message. A
history that a client sends back has to become the recorded messages.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from paceline.services.rollout_gateway.api.http import beyond, shapes
from paceline.services.rollout_gateway.chat import messages as chat


class MessageItem(shapes.Shape):
    """A message; an assistant's message is part of a turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: shapes.Content


class CallItem(shapes.Shape):
    """An assistant's function call."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: shapes.Arguments


class OutputItem(shapes.Shape):
    """A function's result."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: shapes.Content


class ReasoningText(shapes.Shape):
    """A piece of reasoning."""

    type: str = ""
    text: str


class ReasoningItem(shapes.Shape):
    """An assistant's reasoning; a summary is used only without other content."""

    type: Literal["reasoning"]
    content: shapes.Several[ReasoningText] | None = None
    summary: shapes.Several[ReasoningText] = Field(default=[])


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[OutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    shapes.by_type("message"),
]
Items = shapes.TextOr[Annotated[shapes.Several[Item], Field(max_length=shapes.MAX_MESSAGES)]]


class FunctionKind(shapes.Shape):
    """The type of a function, checked before the function's other fields. Only functions are
    supported.
    """

    type: Literal["function"]


class FlatTool(shapes.FunctionShape, FunctionKind):
    """A function that the model may call."""


class NamedFunctionTool(FunctionKind):
    """A choice of one tool."""

    name: str = Field(min_length=1)


class TextFormat(shapes.Shape):
    """The required form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    named: str | None = Field(None, alias="name")
    json_schema: shapes.JsonObject | None = Field(None, alias="schema")


class TextConfig(shapes.Shape):
    """The format of the text."""

    format: TextFormat | None = None


class ResponsesBody(shapes.ToolsShape, shapes.SampledBody):
    """POST /v1/responses."""

    undeclared = beyond.RESPONSES
    input: Items
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    tools: shapes.Several[FlatTool] | None = Field(None, max_length=shapes.MAX_TOOLS)
    tool_choice: shapes.ChoiceOr[NamedFunctionTool] | None = None
    parallel_tool_calls: bool = True
    max_tokens: shapes.Limit | None = Field(None, alias="max_output_tokens")
    text: TextConfig | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)

    def structure(self) -> dict[str, Any]:
        form = self.text.format if self.text is not None else None
        if form is None or form.type == "text":
            return {}
        if form.type == "json_schema" and form.json_schema is None:
            field, allowed = "text.format.schema", "a JSON schema"
            raise beyond.FieldError(field, "is missing", seen="null", allowed=allowed)
        return {"json_schema": json.dumps(form.json_schema or {})}

    def new_messages(self) -> tuple[chat.Message, ...]:
        """The messages that the input adds to the conversation. Raises FieldError for an empty
        input.
        """
        if isinstance(self.input, str):
            return (chat.Message("user", self.input),)
        if not self.input:
            allowed = "text, or one item or more"
            raise beyond.FieldError("input", "is empty", seen="[]", allowed=allowed)
        return tuple(grouped(self.input))

    def request(self, before: Sequence[chat.Message]) -> chat.ChatRequest:
        """The gateway's ChatRequest. `before`: the conversation up to the previous response,
        without instructions.
        """
        system = [chat.Message("system", self.instructions)] if self.instructions else []
        said = [*system, *before, *self.new_messages()]
        return self.chat_request(said, shapes.tool_choice(self.tool_choice))


def grouped(items: Sequence[Any]) -> Iterator[chat.Message]:
    """Convert items to messages; the items of one assistant turn become one message."""
    turn: list[Any] = []
    for item in items:
        own = not isinstance(item, OutputItem) and getattr(item, "role", "assistant") == "assistant"
        if turn and not (own and _continues(turn, item)):
            yield chat.joined([_delta(one) for one in turn])
            turn = []
        if own:
            turn.append(item)
        elif isinstance(item, OutputItem):
            yield chat.Message("tool", shapes.joined_text(item.output), tool_call_id=item.call_id)
        else:
            role: chat.Role = "system" if item.role == "developer" else item.role
            yield chat.Message(role, shapes.joined_text(item.content))

    if turn:
        yield chat.joined([_delta(one) for one in turn])


def _continues(turn: Sequence[Any], item: Any) -> bool:
    """Whether the item belongs to the turn. Reasoning begins a turn, and so does a message directly
    after another message.
    """
    if isinstance(item, MessageItem):
        return not isinstance(turn[-1], MessageItem)
    return isinstance(item, CallItem)


def _delta(item: Any) -> chat.Delta:
    """The item's part of an assistant's message."""
    if isinstance(item, CallItem):
        return chat.Delta(tool_calls=(chat.ToolCall(item.call_id, item.name, item.arguments),))
    if isinstance(item, ReasoningItem):
        return chat.Delta(reasoning=shapes.joined_text(item.content or item.summary))
    return chat.Delta(shapes.joined_text(item.content))
