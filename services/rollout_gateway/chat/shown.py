"""Finds the parts of a request that a chat template drops.

Tools, calls, results and the text beside calls are refused by name, or moved into the default tool
prompt. Other dropped parts are reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message, Role, ToolCall
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.chat.tool_formats.base import SpelledCall
from paceline.services.rollout_gateway.chat.tool_formats.form import ToolFormat

_SHOWN = 80
"""Characters of a part that an error shows."""
ToolPrompt = Literal["refuse", "default"]
Tools = tuple[Mapping[str, Any], ...]
_USER = Message("user", "Hello")
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "pacelinetoolprobe",
        "description": "Nothing.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
_CALLS = tuple(ToolCall(f"a{one}b2c3d4e", f"pacelinecallprobe{one}", "{}") for one in "fg")
"""Ids of nine letters and digits, the only form that Mistral's templates accept."""
_RESULTS = tuple(
    Message("tool", f"pacelineresultprobe{one}", tool_call_id=call.call_id)
    for one, call in zip("fg", _CALLS, strict=True)
)
_TEXT = "pacelinetextprobe"
_PART = "pacelinepartprobe"
_PARTS = ("name", "reasoning")
_BEFORE: Mapping[Role, tuple[Message, ...]] = {
    "system": (),
    "user": (),
    "assistant": (_USER,),
    "tool": (_USER, Message("assistant", tool_calls=_CALLS[:1])),
}
"""Messages before one of each role."""
ALLOWED = 'a model whose template does, or gateway.chat.tool_prompt="default"'


class Shown(NamedTuple):
    """Parts of a conversation that a template writes into the prompt."""

    tools: bool
    calls: bool
    several: bool  # calls of one message behind the first
    beside: bool  # text of a message with calls
    results: bool

    def dropped(self, message: Message) -> tuple[str, str]:
        """The kind of part of a message with calls that is not written, and the part; or empty."""
        calls = message.tool_calls
        names = ", ".join(call.name for call in calls)
        if calls and not self.calls:
            return "tool calls", names
        if len(calls) > 1 and not self.several:
            return "more than one tool call of a message", names
        if calls and message.content.strip() and not self.beside:
            return "text beside tool calls", message.content[:_SHOWN]
        return "", ""


class ShownTools:
    """Tools in the prompts of one model."""

    def __init__(
        self, codec: TextCodec, tool_format: ToolFormat | None, tool_prompt: ToolPrompt
    ) -> None:
        self._codec = codec
        self._format = tool_format
        self._default = tool_prompt == "default"
        self._known: dict[bool, Shown] = {}  # by whether there are tools
        self._read: dict[tuple[str, Role, bool], bool] = {}

    def fitted(self, request: ChatRequest, kept: int = 0) -> tuple[ChatRequest, int]:
        """The request with all its tools, calls and results where the template shows them, and the
        number of messages inserted before it. `kept`: first messages with recorded tokens.

        Raises InvalidInput for dropped parts if there is no default prompt.
        """
        if not request.messages or not holds_tools(request):
            return request, 0
        wrong = next(self._dropped(request, kept), None)
        if wrong is None:
            return request, 0
        if not self._default:
            raise InvalidInput(wrong[0], seen=wrong[1], allowed=ALLOWED)
        if self._format is None:
            raise InvalidInput(
                wrong[0], seen=wrong[1], allowed="gateway.chat.tool_format set, for the default"
            )
        return self._told(request, self._format)

    def check(self, request: ChatRequest, rendered: str) -> None:
        """Raises InvalidInput for a tool or past call with a name that is not in the prompt."""
        called = [call.name for message in request.messages for call in message.tool_calls]
        parts = (("tools: a tool", request.tool_names()), ("messages: a tool call", called))
        for part, names in parts:
            missing = next((one for one in names if not _holds(rendered, one)), None)
            if missing is not None:
                raise InvalidInput(
                    f"{part} does not stand in the prompt that the chat template writes",
                    seen=missing[:_SHOWN],
                    allowed=ALLOWED,
                )

    def unread(self, request: ChatRequest, kept: int = 0) -> tuple[str, ...]:
        """Parts (`name`, `reasoning`) of a message that the template writes for no message of its
        role. `kept`: first messages with recorded tokens.
        """
        given = {
            (part, message.role)
            for message in request.messages[kept:]
            for part in _PARTS
            if getattr(message, part)
        }
        tools = (_TOOL,) if request.tools else ()
        return tuple(sorted({part for part, role in given if not self._reads(part, role, tools)}))

    def _reads(self, part: str, role: Role, tools: Tools) -> bool:
        """Whether the template writes that part; a refused part counts as written."""
        key = part, role, bool(tools)
        if key not in self._read:
            plain = _RESULTS[0] if role == "tool" else Message(role, "Hello")
            given: dict[str, Any] = {part: _PART}
            begun = (*_BEFORE[role], replace(plain, **given))
            text = self._rendered(tools, begun, (*begun, _USER))
            self._read[key] = not text or _PART in text
        return self._read[key]

    def _dropped(self, request: ChatRequest, kept: int) -> Iterator[tuple[str, str]]:
        """(the fault, names) of each kind of part that the template drops."""
        shown = self._shown(request)
        if request.tools and not shown.tools:
            yield "tools: the chat template does not show tools", ", ".join(request.tool_names())
        for index, message in enumerate(request.messages[kept:], kept):
            kind, seen = shown.dropped(message)
            if kind:
                yield f"messages: the chat template does not show {kind}", seen
            if message.role == "tool" and not shown.results:
                seen = message.name or message.tool_call_id or f"messages[{index}]"
                yield "messages: the chat template does not show tool results", seen

    def _shown(self, request: ChatRequest) -> Shown:
        """The parts that the template writes for a conversation with tools, or without."""
        tools = (_TOOL,) if request.tools else ()
        with_tools = bool(tools)
        if with_tools not in self._known:
            self._known[with_tools] = self._probed(tools)
        return self._known[with_tools]

    def _probed(self, tools: Tools) -> Shown:
        """The parts that the template writes for probe conversations. A refused probe counts as
        shown, since the template refuses the request as well.
        """
        said = Message("assistant", tool_calls=_CALLS)
        alone = self._rendered(tools, (_USER,), (Message("system", "Be brief."), _USER))
        both = self._rendered(tools, (_USER, said, *_RESULTS))
        one = both or self._rendered(
            tools, (_USER, replace(said, tool_calls=_CALLS[:1]), _RESULTS[0])
        )
        calls = _CALLS if both else _CALLS[:1]
        talking = replace(said, content=_TEXT, tool_calls=calls)
        texts = one and self._rendered(tools, (_USER, talking, *_RESULTS[: len(calls)]))
        return Shown(
            tools=not tools or not alone or _holds(alone, _TOOL["function"]["name"]),
            calls=not one or _CALLS[0].name in one,
            several=not both or _CALLS[1].name in both,
            beside=not texts or _TEXT in texts,
            results=not one or _RESULTS[0].content in one,
        )

    def _rendered(self, tools: Tools, *conversations: tuple[Message, ...]) -> str:
        """The first conversation that the template accepts; empty if it refuses all."""
        for messages in conversations:
            try:
                return self._codec.template.render(ChatRequest(messages, tools))
            except InvalidInput:
                continue
        return ""

    def _told(self, request: ChatRequest, spelling: ToolFormat) -> tuple[ChatRequest, int]:
        """The request with dropped parts as text of messages."""
        shown = self._shown(request)
        messages = [_as_text(one, shown, spelling) for one in request.messages]
        if shown.tools:
            return replace(request, messages=tuple(messages)), 0
        prompt = tool_prompt_text(request, spelling)
        first = messages[0] if messages[0].role == "system" else None
        if first is None:
            messages.insert(0, Message("system", prompt))
        else:
            messages[0] = replace(first, content=f"{first.content}\n\n{prompt}")
        return replace(request, messages=tuple(messages), tools=()), int(first is None)


def _as_text(message: Message, shown: Shown, spelling: ToolFormat) -> Message:
    """The message, its calls or result as text where the template does not write them."""
    if shown.dropped(message)[0]:
        calls = [SpelledCall(one.name, one.arguments or "{}") for one in message.tool_calls]
        content = "\n".join(filter(None, (message.content, spelling.written(calls))))
        return replace(message, content=content, tool_calls=())
    if message.role == "tool" and not shown.results:
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    return message


def tool_prompt_text(request: ChatRequest, spelling: ToolFormat) -> str:
    """The default tool prompt: every tool as JSON, and the form of a call."""
    tools = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in request.tools)
    example = spelling.written([SpelledCall("NAME", '{"PARAMETER": "VALUE"}')])
    return (
        f"# Tools\n\nYou may call these functions:\n{tools}\n\n"
        f"To call a function, write its name and arguments in this form:\n{example}"
    )


def holds_tools(request: ChatRequest) -> bool:
    """Whether a conversation offers tools or contains calls or results."""
    return bool(request.tools) or any(
        message.tool_calls or message.role == "tool" for message in request.messages
    )


def _holds(rendered: str, name: str) -> bool:
    """Whether a prompt contains a name, directly or in JSON's form."""
    spellings = (name, json.dumps(name)[1:-1], json.dumps(name, ensure_ascii=False)[1:-1])
    return any(one in rendered for one in spellings)
