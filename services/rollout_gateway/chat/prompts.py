"""Makes the prompt of a conversation, and the parser of its answer.

A caller passes a request and the turn that it continues, and receives tokens and a parser. Tools,
calls, results and the text beside calls are refused by name if the chat template drops them, or
moved into the default tool prompt. Other dropped parts are reported.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.chat import parse, text
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message, Role, ToolCall
from paceline.services.rollout_gateway.chat.tool_formats import families
from paceline.services.rollout_gateway.chat.tool_formats.form import Harmony, ToolFormat
from paceline.services.rollout_gateway.config import ChatConfig

PROMPT_END = 16
"""Tokens that show whether a prompt ends inside the model's reasoning."""


class Known(NamedTuple):
    """An earlier answer, token for token."""

    messages: int  # messages of the conversation up to this answer
    token_ids: Sequence[int]  # all tokens up to its end
    response_ids: Sequence[int]  # the model's tokens


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt before a model's answer."""

    ids: tuple[int, ...]  # all tokens for the engine
    goes_on: bool  # whether they begin with the recorded turn's tokens
    parser: Callable[[], parse.ChatParser]  # of one answer
    grammar: str = ""  # that the answer's tool calls must follow; empty: unconstrained
    stop_ids: tuple[int, ...] = ()  # tokens that end the answer, besides the model's
    unread: tuple[str, ...] = ()  # parts of messages (name, reasoning) that the template leaves out
    free_until: str = ""  # text behind which an answer of a form begins; empty: at its beginning


_SHOWN = 80
"""Characters of a part that an error shows."""
Tools = tuple[Mapping[str, Any], ...]
_USER = Message("user", "Hello")
_NAMES = ("pacelinetoolprobef", "pacelinetoolprobeg")
_FUNCTIONS = [{"name": name, "parameters": {}} for name in _NAMES]
_TOOLS: Tools = tuple({"type": "function", "function": one} for one in _FUNCTIONS)
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
    "assistant": (_USER,),
    "tool": (_USER, Message("assistant", tool_calls=_CALLS[:1])),
}
"""Messages before one of each role, if any."""
_TOOL_KIND, _CALL_KIND, _RESULT_KIND = "tools", "tool calls", "tool results"
_MORE_KIND, _TEXT_KIND = "more than one tool call of a message", "text beside tool calls"
"""Kinds of parts that a template may drop."""
_ALLOWED = (
    'a chat template that shows them, or gateway.chat.tool_prompt="default" with a '
    "gateway.chat.tool_format"
)


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


class _TemplateParts:
    """The parts of a conversation that one chat template shows, found by probe conversations."""

    def __init__(self, codec: text.TextCodec, spelling: ToolFormat | None) -> None:
        """`spelling`: the format of the default tool prompt; None: no such prompt."""
        self._codec = codec
        self._spelling = spelling
        self._dropped: dict[bool, frozenset[str]] = {}  # kinds of parts, by whether there are tools
        self._read: dict[tuple[str, Role, bool], bool] = {}

    def fit(self, request: ChatRequest, kept: int = 0) -> ChatRequest:
        """The request with all its tools, calls and results where the template shows them. `kept`:
        first messages with recorded tokens.

        Raises InvalidInput for dropped parts without a default prompt.
        """
        parts = [(_TOOL_KIND, ", ".join(request.tool_names()))] if request.tools else []
        parts += [part for message in request.messages[kept:] for part in _parts(message).items()]
        if not parts or not request.messages:
            return request
        with_tools = bool(request.tools)
        if with_tools not in self._dropped:
            self._dropped[with_tools] = self._probed(_TOOLS if with_tools else ())
        dropped = self._dropped[with_tools]
        for kind, seen in parts:
            if kind not in dropped:
                continue
            if self._spelling is not None:
                return _moved(request, dropped, self._spelling)
            field = "tools" if kind == _TOOL_KIND else "messages"
            message = f"{field}: the chat template does not show {kind}"
            raise InvalidInput(message, seen=seen, allowed=_ALLOWED)
        return request

    def unread(self, request: ChatRequest, kept: int = 0) -> tuple[str, ...]:
        """Parts (`name`, `reasoning`) of a message that the template writes for no message of its
        role. `kept`: first messages with recorded tokens.
        """
        tools, found = _TOOLS if request.tools else (), set()
        for message, part in itertools.product(request.messages[kept:], _PARTS):
            if getattr(message, part) and not self._reads(part, message.role, tools):
                found.add(part)
        return tuple(sorted(found))

    def _reads(self, part: str, role: Role, tools: Tools) -> bool:
        """Whether the template writes that part; a refused part counts as written."""
        key = part, role, bool(tools)
        if key not in self._read:
            plain = _RESULTS[0] if role == "tool" else Message(role, "Hello")
            given: dict[str, Any] = {part: _PART}
            begun = (*_BEFORE.get(role, ()), replace(plain, **given))
            shown = self._rendered(tools, begun, (*begun, _USER))
            self._read[key] = not shown or _PART in shown
        return self._read[key]

    def _probed(self, tools: Tools) -> frozenset[str]:
        """The kinds of parts that the template drops from probe conversations. A refused probe
        drops nothing, since the template refuses the request as well.
        """
        called = Message("assistant", tool_calls=_CALLS)
        alone = self._rendered(tools, (_USER,), (Message("system", "Be brief."), _USER))
        both = self._rendered(tools, (_USER, called, *_RESULTS))
        once = replace(called, tool_calls=_CALLS[:1])
        one = both or self._rendered(tools, (_USER, once, _RESULTS[0]))
        calls = _CALLS if both else _CALLS[:1]
        talking = replace(called, content=_TEXT, tool_calls=calls)
        texts = one and self._rendered(tools, (_USER, talking, *_RESULTS[: len(calls)]))
        probes = (
            *((_TOOL_KIND, alone, name) for name in ChatRequest((), tools).tool_names()),
            (_CALL_KIND, one, _CALLS[0].name),
            (_MORE_KIND, both, _CALLS[1].name),
            (_TEXT_KIND, texts, _TEXT),
            (_RESULT_KIND, one, _RESULTS[0].content),
        )
        return frozenset(kind for kind, shown, part in probes if shown and part not in shown)

    def _rendered(self, tools: Tools, *conversations: tuple[Message, ...]) -> str:
        """The first conversation that the template accepts; empty if it refuses all."""
        for messages in conversations:
            try:
                return self._codec.template.render(ChatRequest(messages, tools))
            except InvalidInput:
                continue
        return ""


def _moved(request: ChatRequest, dropped: frozenset[str], spelling: ToolFormat) -> ChatRequest:
    """The request with dropped parts as text of its messages, tools in the first, a system
    message.
    """
    odd = [bool(dropped & _parts(one).keys()) for one in request.messages]
    pairs = zip(request.messages, odd, strict=True)
    messages = [_as_text(one, spelling) if moves else one for one, moves in pairs]
    if not request.tools or _TOOL_KIND not in dropped:
        return replace(request, messages=tuple(messages))
    tools = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in request.tools)
    example = spelling.write_calls([ToolCall("", "NAME", '{"PARAMETER": "VALUE"}')])
    prompt = (
        f"# Tools\n\nYou may call these functions:\n{tools}\n\n"
        f"To call a function, write its name and arguments in this form:\n{example}"
    )
    first = messages.pop(0) if messages[0].role == "system" else Message("system")
    first = replace(first, content="\n\n".join(filter(None, (first.content, prompt))))
    return replace(request, messages=(first, *messages), tools=())


def _as_text(message: Message, spelling: ToolFormat) -> Message:
    """The message with its calls or result as text."""
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    calls = spelling.write_calls(message.tool_calls)
    content = "\n".join(filter(None, (message.content, calls)))
    return replace(message, content=content, tool_calls=())


def _check_names(request: ChatRequest, rendered: str) -> None:
    """Raises InvalidInput for a tool or past call with a name that is not in the prompt. A template
    may drop them in some conversations only.
    """
    called = [call.name for message in request.messages for call in message.tool_calls]
    for part, names in (("tools: a tool", request.tool_names()), ("messages: a call", called)):
        for name in names:
            spellings = (json.dumps(name, ensure_ascii=escaped)[1:-1] for escaped in (True, False))
            if name not in rendered and not any(one in rendered for one in spellings):
                message = f"{part} does not stand in the prompt that the chat template writes"
                raise InvalidInput(message, seen=name[:_SHOWN], allowed=_ALLOWED)


class ChatPrompts:
    """Prompts of one model's conversations."""

    def __init__(self, config: ChatConfig, codec: text.TextCodec) -> None:
        self._codec = codec
        self._format = families.tool_format(config.tool_format, codec.template.source)
        marked = config.reasoning == "auto" and parse.THINK in codec.template.source
        self._reasoning = marked or config.reasoning == "think"
        ends = self._format.ends if self._format else ()
        spelling = self._format if config.tool_prompt == "default" else None
        self._parts = _TemplateParts(codec, spelling)
        self._stop_ids = tuple(codec.added_tokens[end] for end in ends if end in codec.added_tokens)

    def prompt(
        self,
        request: ChatRequest,
        known: Known | None,
        longest: int | None = None,
        answer: str | None = None,
    ) -> ChatPrompt:
        """The prompt of a request; `known` is the recorded turn that it continues.

        `answer`: JSON schema of an answer without calls, empty for any answer, if a grammar may
        hold required calls and calls of strict tools; None: no grammar.

        Raises InvalidInput for a request that cannot be rendered or forced, and for more than
        `longest` new tokens.
        """
        ids, goes_on = self._history(request, known, longest)
        prompt_end = self._codec.decode_all(ids[-PROMPT_END:]).rstrip()
        inside = self._reasoning and prompt_end.endswith(parse.THINK)
        forced = self._forced(request, inside)
        ids += self._codec.encode_piece(forced + request.prefill, longest)
        parser = partial(
            parse.ChatParser,
            self._offered(request),
            reasoning=self._reasoning,
            starts_in_reasoning=inside,
            forced=forced,
            prefill=request.prefill,
        )
        grammar = "" if answer is None else self._grammar(request, answer, inside=inside)
        thinks = inside and not forced and not request.prefill
        unread = self._parts.unread(request, known.messages if known and goes_on else 0)
        free_until = parse.THOUGHT if thinks else ""
        return ChatPrompt(ids, goes_on, parser, grammar, self._stop_ids, unread, free_until)

    def encode(self, request: ChatRequest, longest: int | None = None) -> tuple[int, ...]:
        """Ids of a whole conversation up to the model's answer.

        Raises InvalidInput if the template refuses it or drops parts of it, and for more than
        `longest` ids.
        """
        rendered = self._codec.template.render(self._parts.fit(request))
        _check_names(request, rendered)
        return self._codec.encode(rendered, longest, special=False)

    def _offered(self, request: ChatRequest) -> ToolFormat | None:
        """The format for reading the answer; None: plain text."""
        if self._format and request.tools and request.tool_choice.mode != "none":
            return self._format.offering(families.offered_schemas(request.tools))
        return self._format if isinstance(self._format, Harmony) else None

    def _grammar(self, request: ChatRequest, answer: str, *, inside: bool) -> str:
        choice = request.tool_choice
        if not request.tools or choice.mode == "none" or self._format is None:
            return ""
        tools = families.offered_schemas(request.tools)
        if choice.mode == "named":
            tools = {choice.name: tools[choice.name]}
        offered, added = self._format.offering(tools), self._codec.added_tokens
        if choice.mode != "auto":
            begun = self._format.beginning(choice.name)
            return offered.required(added, begun, several=not request.one_call)
        if not request.strict_tools and not answer:
            return ""
        after = parse.THOUGHT if inside and not request.prefill else ""
        strict, several = request.strict_tools, not request.one_call
        return offered.allowed(added, strict, after, answer, several=several)

    def _history(
        self, request: ChatRequest, known: Known | None, longest: int | None
    ) -> tuple[tuple[int, ...], bool]:
        """All tokens up to the model's answer, and whether they begin with the recorded turn's."""
        if not request.messages:
            raise InvalidInput("messages is empty", allowed="one message or more")
        if known is not None:
            fitted = self._parts.fit(request, known.messages)
            last = known.messages - 1 + len(fitted.messages) - len(request.messages)
            rest = self._codec.encode_after(fitted, last, known.response_ids, longest)
            if rest is not None:
                return (*known.token_ids, *rest), True
        return self.encode(request, longest), False

    def _forced(self, request: ChatRequest, inside: bool) -> str:
        """The forced beginning of the answer; empty if it is free.

        It is the call that tool_choice requires, or the end of the model's reasoning before a
        prefill.
        """
        choice, end_of_reasoning = request.tool_choice, f"\n{parse.THOUGHT}\n\n" * inside
        if choice.mode in ("auto", "none"):
            begun = end_of_reasoning or (self._format.content_beginning if self._format else "")
            return begun if request.prefill else ""
        names = list(request.tool_names())
        if not names or (choice.mode == "named" and choice.name not in names):
            seen, allowed = choice.name or choice.mode, ", ".join(names)
            raise InvalidInput("tool_choice names no tool", seen=seen, allowed=allowed)

        if self._format is None:
            message = "tool_choice: the model's chat template shows no tool format"
            allowed = "auto, none, or gateway.chat.tool_format set"
            raise InvalidInput(message, seen=choice.mode, allowed=allowed)

        if request.prefill:
            message = "an answer that has to be a tool call cannot begin with a prefill"
            raise InvalidInput(message, allowed="tool_choice auto or none")

        return end_of_reasoning + self._format.beginning(choice.name)
