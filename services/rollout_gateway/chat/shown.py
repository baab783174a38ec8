"""Finds the tools, calls and results that a chat template drops, and refuses them by name or puts
them into the default tool prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message, ToolCall
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.chat.tool_formats import SpelledCall, ToolFormat

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
ALLOWED = 'a model whose template does, or gateway.chat.tool_prompt="default"'


class Shown(NamedTuple):
    """Parts of a conversation that a template writes into the prompt."""

    tools: bool
    calls: bool
    several: bool  # calls of one message behind the first
    results: bool

    def writes(self, message: Message) -> bool:
        """Whether all calls of a message are written."""
        return not message.tool_calls or (
            self.calls and (self.several or len(message.tool_calls) == 1)
        )


class ShownTools:
    """Tools in the prompts of one model."""

    def __init__(
        self, codec: TextCodec, tool_format: ToolFormat | None, tool_prompt: ToolPrompt
    ) -> None:
        self._codec = codec
        self._format = tool_format
        self._default = tool_prompt == "default"
        self._known: dict[bool, Shown] = {}  # by whether there are tools

    def fitted(self, request: ChatRequest) -> tuple[ChatRequest, int]:
        """The request with all its tools, calls and results where the template shows them, and the
        number of messages that were put before it.

        Raises InvalidInput for dropped parts if there is no default prompt.
        """
        if not request.messages or not holds_tools(request):
            return request, 0
        wrong = next(self._dropped(request), None)
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
                    seen=missing[:80],
                    allowed=ALLOWED,
                )

    def _dropped(self, request: ChatRequest) -> Iterator[tuple[str, str]]:
        """(the fault, names) of each kind of part that the template drops."""
        shown = self._shown(request)
        if request.tools and not shown.tools:
            yield "tools: the chat template does not show tools", ", ".join(request.tool_names())
        for index, message in enumerate(request.messages):
            calls = message.tool_calls
            if calls and not shown.writes(message):
                kind = "tool calls" if not shown.calls else "more than one tool call of a message"
                names = ", ".join(call.name for call in calls)
                yield f"messages: the chat template does not show {kind}", names
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
        return Shown(
            tools=not tools or not alone or _holds(alone, _TOOL["function"]["name"]),
            calls=not one or _CALLS[0].name in one,
            several=not both or _CALLS[1].name in both,
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
    if not shown.writes(message):
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
