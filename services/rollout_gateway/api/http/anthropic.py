"""Anthropic's messages API: bodies of requests, and answers as content blocks and their events.

A history that a client sends back has to become the recorded messages. So an assistant's blocks
become a single Message, and each tool result of a user becomes its own Message.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from paceline.errors import PacelineError
from paceline.services.rollout_gateway.api.http import answers, beyond, shapes
from paceline.services.rollout_gateway.calls.call import Call, Piece, Plan
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
Texts = shapes.TextOr[shapes.Several[Annotated[_Text, shapes.by_type()]]]


class ToolResultBlock(shapes.Shape):
    """A tool's result."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: Texts | None = None
    is_error: bool = False

    def message(self) -> chat.Message:
        """The gateway's Message."""
        text = (FAILED if self.is_error else "") + shapes.joined_text(self.content)
        return chat.Message("tool", text, tool_call_id=self.tool_use_id)


Block = Annotated[
    _Text
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    shapes.by_type(),
]
Blocks = shapes.TextOr[shapes.Several[Block]]
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
        said = self.content
        blocks = [TextBlock(type="text", text=said)] if isinstance(said, str) else said
        allowed = BLOCKS[self.role]
        for number, block in enumerate(blocks):
            if block.type not in allowed:
                field, wrong = f"messages[{index}].content[{number}].type", f"is not {self.role}'s"
                raise beyond.FieldError(field, wrong, seen=block.type, allowed=", ".join(allowed))

        if self.role == "system":
            return [chat.Message("system", shapes.joined_text(blocks))]
        if self.role == "assistant":
            return [chat.joined([_delta(one) for one in blocks])]
        return list(_user(blocks))


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
                field, allowed = "tool_choice.name", "the name of a tool"
                raise beyond.FieldError(field, "is missing", seen="null", allowed=allowed)
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

    def request(self) -> chat.ChatRequest:
        """The gateway's ChatRequest. Raises FieldError for blocks in the wrong place."""
        system = shapes.joined_text(self.system)
        said = [chat.Message("system", system)] if system else []
        for index, one in enumerate(self.messages):
            news = one.converted(index)
            if one.role == "assistant" and said and said[-1].role == "assistant":
                # a client may send an answer back after its prefill
                news = [chat.joined([said.pop(), news[0]])]
            said += news

        choice = chat.ToolChoice() if self.tool_choice is None else self.tool_choice.choice()
        prefill = self._prefill(said.pop(), choice) if said[-1].role == "assistant" else ""
        if not any(message.role != "system" for message in said):
            wrong, seen = "has nothing to answer", "no user's message"
            raise beyond.FieldError("messages", wrong, seen=seen, allowed="one or more")
        return self.chat_request(said, choice, prefill)

    def _prefill(self, message: chat.Message, choice: chat.ToolChoice) -> str:
        field = f"messages[{len(self.messages) - 1}].content"
        if message.tool_calls or message.reasoning:
            wrong = "of the last assistant message is text alone"
            raise beyond.FieldError(field, wrong, seen="tool_use or thinking")
        if message.content and choice.mode in ("required", "named"):
            wrong, seen = "cannot begin an answer that has to be a tool call", message.content[:40]
            raise beyond.FieldError(field, wrong, seen=seen)
        return message.content


class MessagesBody(ConversationBody, shapes.SampledBody):
    """POST /v1/messages."""

    max_tokens: shapes.Limit
    top_k: shapes.TopK = 0
    stop: list[str] | None = Field(None, alias="stop_sequences", max_length=MAX_STOPS)
    output_config: OutputConfig | None = None

    def structure(self) -> dict[str, Any]:
        form = self.output_config.format if self.output_config is not None else None
        return {} if form is None else {"json_schema": json.dumps(form.json_schema)}


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


def _delta(block: Any) -> chat.Delta:
    """The block's part of an assistant's message."""
    if isinstance(block, ToolUseBlock):
        arguments = json.dumps(block.input, ensure_ascii=False)
        return chat.Delta(tool_calls=(chat.ToolCall(block.id, block.name, arguments),))
    return chat.Delta(getattr(block, "text", ""), getattr(block, "thinking", ""))


STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""Reason of the end by the name of the finish; "end_turn" for any other finish."""
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


class AnthropicAnswers(answers.Answers[MessagesBody]):
    """The answer `message`, whole and as events."""

    body_type = MessagesBody
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
        return self._blocks.add(piece.delta or chat.Delta(piece.text))

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
    return {"stop_reason": STOP_REASONS.get(call.finish, "end_turn"), "stop_sequence": None}


def _usage(call: Call) -> dict[str, Any]:
    """Token counts; input tokens exclude cached tokens."""
    prompt, cached, output, reasoning = answers.usage([call])
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": reasoning},
    }
