"""Finds the parts of a request that a chat template drops.

Tools, calls, results and the text beside calls are refused by name, or moved into the default tool
prompt. Other dropped parts are reported.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

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
_TOOL_KIND, _CALL_KIND, _RESULT_KIND = "tools", "tool calls", "tool results"
_MORE_KIND, _TEXT_KIND = "more than one tool call of a message", "text beside tool calls"
"""Kinds of parts that a template may drop."""
ALLOWED = 'a model whose template does, or gateway.chat.tool_prompt="default"'


def _parts(message: Message) -> dict[str, str]:
    """Parts of a message that a template may drop, by kind, each as an error shows it."""
    calls, found = message.tool_calls, {}
    if calls:
        found[_CALL_KIND] = ", ".join(call.name for call in calls)
        if len(calls) > 1:
            found[_MORE_KIND] = found[_CALL_KIND]
        if message.content.strip():
            found[_TEXT_KIND] = message.content[:_SHOWN]
    if message.role == "tool":
        found[_RESULT_KIND] = message.name or message.tool_call_id or message.content[:_SHOWN]
    return found


class ShownTools:
    """Tools in the prompts of one model."""

    def __init__(
        self, codec: TextCodec, tool_format: ToolFormat | None, tool_prompt: ToolPrompt
    ) -> None:
        self._codec = codec
        self._format = tool_format
        self._default = tool_prompt == "default"
        self._dropped: dict[bool, frozenset[str]] = {}  # kinds of parts, by whether there are tools
        self._read: dict[tuple[str, Role, bool], bool] = {}

    def fitted(self, request: ChatRequest, kept: int = 0) -> tuple[ChatRequest, int]:
        """The request with all its tools, calls and results where the template shows them, and the
        number of messages inserted before it. `kept`: first messages with recorded tokens.

        Raises InvalidInput for dropped parts if there is no default prompt.
        """
        parts = [(_TOOL_KIND, ", ".join(request.tool_names()))] if request.tools else []
        parts += [part for message in request.messages[kept:] for part in _parts(message).items()]
        if not parts or not request.messages:
            return request, 0
        with_tools = bool(request.tools)
        if with_tools not in self._dropped:
            self._dropped[with_tools] = self._probed((_TOOL,) if with_tools else ())
        dropped = self._dropped[with_tools]
        wrong = next(((kind, seen) for kind, seen in parts if kind in dropped), None)
        if wrong is None:
            return request, 0
        if not self._default or self._format is None:
            kind, seen = wrong
            field = "tools" if kind == _TOOL_KIND else "messages"
            raise InvalidInput(
                f"{field}: the chat template does not show {kind}",
                seen=seen,
                allowed="gateway.chat.tool_format set, for the default"
                if self._default
                else ALLOWED,
            )
        return _spelled_out(request, dropped, self._format)

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

    def _probed(self, tools: Tools) -> frozenset[str]:
        """The kinds of parts that the template drops from probe conversations. A refused probe
        drops nothing, since the template refuses the request as well.
        """
        called = Message("assistant", tool_calls=_CALLS)
        alone = self._rendered(tools, (_USER,), (Message("system", "Be brief."), _USER))
        both = self._rendered(tools, (_USER, called, *_RESULTS))
        one = both or self._rendered(
            tools, (_USER, replace(called, tool_calls=_CALLS[:1]), _RESULTS[0])
        )
        calls = _CALLS if both else _CALLS[:1]
        talking = replace(called, content=_TEXT, tool_calls=calls)
        texts = one and self._rendered(tools, (_USER, talking, *_RESULTS[: len(calls)]))
        probes = (
            (_TOOL_KIND, alone if tools else "", _TOOL["function"]["name"]),
            (_CALL_KIND, one, _CALLS[0].name),
            (_MORE_KIND, both, _CALLS[1].name),
            (_TEXT_KIND, texts, _TEXT),
            (_RESULT_KIND, one, _RESULTS[0].content),
        )
        return frozenset(kind for kind, text, part in probes if text and part not in text)

    def _rendered(self, tools: Tools, *conversations: tuple[Message, ...]) -> str:
        """The first conversation that the template accepts; empty if it refuses all."""
        for messages in conversations:
            try:
                return self._codec.template.render(ChatRequest(messages, tools))
            except InvalidInput:
                continue
        return ""


def _spelled_out(
    request: ChatRequest, dropped: frozenset[str], spelling: ToolFormat
) -> tuple[ChatRequest, int]:
    """The request with dropped parts as text of messages, and the number of messages inserted
    before it.
    """
    messages = [
        _as_text(one, spelling) if dropped & _parts(one).keys() else one for one in request.messages
    ]
    if not request.tools or _TOOL_KIND not in dropped:
        return replace(request, messages=tuple(messages)), 0
    prompt = tool_prompt_text(request, spelling)
    inserted = messages[0].role != "system"
    if inserted:
        messages.insert(0, Message("system", prompt))
    else:
        messages[0] = replace(messages[0], content=f"{messages[0].content}\n\n{prompt}")
    return replace(request, messages=tuple(messages), tools=()), int(inserted)


def _as_text(message: Message, spelling: ToolFormat) -> Message:
    """The message, its calls or result as text."""
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    calls = [SpelledCall(one.name, one.arguments or "{}") for one in message.tool_calls]
    content = "\n".join(filter(None, (message.content, spelling.written(calls))))
    return replace(message, content=content, tool_calls=())


def tool_prompt_text(request: ChatRequest, spelling: ToolFormat) -> str:
    """The default tool prompt: every tool as JSON, and the form of a call."""
    tools = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in request.tools)
    example = spelling.written([SpelledCall("NAME", '{"PARAMETER": "VALUE"}')])
    return (
        f"# Tools\n\nYou may call these functions:\n{tools}\n\n"
        f"To call a function, write its name and arguments in this form:\n{example}"
    )


def _holds(rendered: str, name: str) -> bool:
    """Whether a prompt contains a name, directly or in JSON's form."""
    spellings = (name, json.dumps(name)[1:-1], json.dumps(name, ensure_ascii=False)[1:-1])
    return any(one in rendered for one in spellings)
