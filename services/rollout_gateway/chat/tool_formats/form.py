"""A family's form of tool calls: one text with places for the name and the arguments.

The forced beginning of a call, its grammar and its text in a prompt follow from that text. A reader
of the family reads calls more leniently. Harmony, the form of gpt-oss, also has reasoning and
content in channels. openai-harmony is not used: it reads tokens only, with a vocabulary that it
downloads at start.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from paceline.errors import InternalError, InvalidInput
from paceline.services.rollout_gateway.chat.messages import ToolCall
from paceline.services.rollout_gateway.chat.tool_formats import base, lark, typed_text

MORE_CALLS = 15
"""Most calls after the first one in a response."""
_PLACE = re.compile(r"(\$(?:number|arguments))")
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments by name of the tool; {}: any object."""
Ids = Mapping[str, int]
Reader = Callable[[base.GrowingText, Schemas], base.Reading[list[base.SpelledCall]]]
"""Reads calls from their marker to their end; raises Deviation if they are not calls."""


@dataclass(frozen=True)
class ToolFormat:
    """The form in which a family of models calls tools."""

    name: str
    call: str
    """One call inside its frame. $name and $quoted (in JSON) stand for the tool, $number for the
    call's number, $arguments for its arguments.
    """
    reader: Reader
    special_tokens: tuple[str, ...]
    """Marks of calls that are special tokens in some tokenizers, so decoding must keep them."""
    markers: tuple[str, ...]
    """Texts that begin calls, anywhere in the content."""
    before: str = ""
    between: str | None = "\n"
    after: str = ""
    """Frame of calls in one response; without text between calls, a response has one call."""
    at_start: tuple[str, ...] = ()
    """Texts that begin calls if only white space precedes them."""
    after_calls: tuple[str, ...] = ()
    """Texts that begin calls if only white space separates them from earlier calls."""
    tags: typed_text.Tags | None = None
    """Tags around each argument; None: the arguments are JSON."""
    ends: tuple[str, ...] = ()
    """Tokens that end a response, in addition to the model's own list."""
    content_beginning: str = ""
    """Text before content; if forced, it begins the response."""
    id_prefix: str = "call_"
    id_digits: int = 24
    """Form of a new call's id; the chat templates of some models accept one form only."""
    tools: Schemas = field(default_factory=dict)

    def offering(self, tools: Schemas) -> Self:
        """The format for calls of these tools."""
        return replace(self, tools=tools)

    def read(self, text: base.GrowingText) -> base.Reading[list[base.SpelledCall]]:
        """Reads calls from their marker to their end.

        Raises Deviation after the marker if they are not calls.
        """
        return self.reader(text, self.tools)

    def beginning(self, name: str = "") -> str:
        """Text before the response that makes it call the tool `name`, or any tool.

        It ends where a tokenizer would also cut: after a colon, not after the space of the next
        token.
        """
        stop = r"\$number|\$arguments" if name else r"\$"
        head = re.split(stop, self.before + self.call, maxsplit=1)[0]
        return _named(head, name).rstrip(" ")

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        """Calls in the model's form, so that `read` returns them."""
        written = []
        for number, call in enumerate(calls):
            text = call.arguments or "{}"
            arguments = text if self.tags is None else self.tags.write_arguments(text)
            places = {"$number": str(number), "$arguments": arguments}
            parts = _PLACE.split(self.call)
            written.append("".join(places.get(part, _named(part, call.name)) for part in parts))
        return self.before + (self.between or "").join(written) + self.after

    # ---- grammars

    def required(self, added: Ids, begun: str, *, several: bool = True) -> str:
        """The grammar of a call and nothing else; `begun` is its beginning in the prompt.

        `added`: the model's added tokens by text. `several`: whether a response may have more than
        one call. Raises InvalidInput for a tool that no grammar can hold.
        """
        rules = lark.Rules(added)
        return rules.grammar(self._calls(rules, self.tools, several, begun))

    def allowed(
        self,
        added: Ids,
        strict: Set[str],
        after: str = "",
        answer: str = "",
        *,
        several: bool = True,
    ) -> str:
        """The grammar of any text with calls in it. Calls of `strict` tools match their schemas;
        other calls have any object.

        `after`: text up to which the model reasons first. `answer`: a JSON schema for a response
        without calls; calls are then at its beginning. Raises InvalidInput as `required`.
        """
        rules = lark.Rules(added)
        tools = {name: one if name in strict else {} for name, one in self.tools.items()}
        form = rules.json(json.loads(answer)) if answer else None
        start = self.woven(rules, partial(self._calls, rules, tools, several), form)
        if after:
            start = rules.sequence([rules.until(after, after), rules.space(), start])
        return rules.grammar(start)

    def woven(
        self, rules: lark.Rules, calls: Callable[[str], lark.Lark], answer: lark.Lark | None
    ) -> lark.Lark:
        """Free text with calls in it; with a form for the answer, only calls or that answer.

        `calls` returns the grammar of calls that begin with a text, without that text.
        """
        if answer is not None:
            return rules.either([calls(""), answer])
        free = rules.free_text(self.markers)
        marker = self.markers[0]
        called = rules.sequence([rules.up_to(marker, free), calls(marker)])
        return rules.sequence([rules.any_number(called), free.whole])

    def _calls(self, rules: lark.Rules, tools: Schemas, several: bool, begun: str) -> lark.Lark:
        """Calls up to the end of their frame, without the text already in the prompt."""
        parts = [self._call(rules, tools, self.before, begun)]
        names_a_tool = len(begun) > len(self.beginning())
        if several and self.between is not None and not names_a_tool:
            more = self._call(rules, tools, self.between)
            parts.append(rules.any_number(more, MORE_CALLS))
        return rules.sequence([*parts, rules.text(self.after)])

    def _call(self, rules: lark.Rules, tools: Schemas, before: str, begun: str = "") -> lark.Lark:
        """One call of any of the tools behind the text `before`."""
        found = []
        for name, schema in tools.items():
            if not base.NAME.fullmatch(name):
                message = "tools: a call that follows a grammar needs a plain name"
                allowed = "letters, digits and _ . : / -"
                raise InvalidInput(message, seen=name[:80], allowed=allowed)
            text = _named(before + self.call, name)
            if not text.startswith(begun):
                message = "a forced beginning is not that of the call"
                raise InternalError(message, seen=begun, allowed=text)
            parts = _PLACE.split(text.removeprefix(begun))
            found.append(rules.sequence(self._part(rules, schema, part) for part in parts))
        return rules.either(found)

    def _part(self, rules: lark.Rules, schema: Mapping[str, Any], part: str) -> lark.Lark:
        if part == "$number":
            return rules.regex("[0-9]{1,4}")
        if part != "$arguments":
            return rules.text(part)
        if self.tags is None:
            return rules.json(schema)
        return typed_text.Parameters(schema).grammar(rules, self.tags)


def _named(text: str, name: str) -> str:
    """The text with the name of a tool in its places."""
    quoted = json.dumps(name, ensure_ascii=False)
    return text.replace("$name", name).replace("$quoted", quoted)


_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN, _CALL, END, _RETURN = "<|constrain|>", "<|call|>", "<|end|>", "<|return|>"
_ENDS = (END, _CALL, _RETURN)
_NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.:/-]+)")
_PLAIN = re.compile(r"[^<]+")
_NEXT = f"{END}{_START}assistant"
Record = Callable[[str, str], None]
"""Receives the kind of the next text, "reasoning" or "content", and the text."""


class Harmony(ToolFormat):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`. Channel
    analysis is reasoning; all other text is content. Every response has this form, with tools or
    without.
    """

    def messages(
        self, text: base.GrowingText, record: Record
    ) -> base.Reading[list[base.SpelledCall]]:
        """Text up to the next call, and the call; at the end of the response no call.

        Text without a header, or that is no call, is content unchanged.
        """
        before = ""
        while (yield from text.peek()):
            try:
                header = yield from text.until(_MESSAGE)
                if named := _RECIPIENT.search(header):
                    return [(yield from _read_call(text, named[1]))]
            except base.Deviation:
                record("content", text.forget())
                yield from _body(text, partial(record, "content"))
                continue
            text.forget()
            channel = _NAMED_CHANNEL.search(header)
            kind = "reasoning" if channel and channel[1] == "analysis" else "content"
            if before == kind:
                record(kind, "\n")
            yield from _body(text, partial(record, kind))
            before = kind

        return []

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        """Calls, each with the token at the end of its response."""
        write = super().write_calls
        return "".join(f"{write([one])}{_CALL}" for one in calls)

    def woven(
        self, rules: lark.Rules, calls: Callable[[str], lark.Lark], answer: lark.Lark | None
    ) -> lark.Lark:
        """Reasoning and preambles, then a call or the answer."""
        before = rules.either(
            rules.sequence([rules.text(f"{_CHANNEL}{name}{_MESSAGE}"), rules.until(_NEXT, END)])
            for name in ("analysis", "commentary")
        )
        form = answer or rules.free_text(self.special_tokens).whole
        final = rules.sequence([rules.text(self.content_beginning), form])
        last = rules.either([calls(""), final])
        return rules.sequence([rules.any_number(before), last])


def _read_call(text: base.GrowingText, name: str) -> base.Reading[base.SpelledCall]:
    """Arguments and the end of the message. The response may end there, and not every engine
    returns that end as text.
    """
    arguments = yield from base.json_arguments(text)
    yield from text.blanks()
    if not (yield from text.skip(*_ENDS)) and (yield from text.peek()):
        raise base.Deviation
    return base.SpelledCall(name, arguments)


def _body(text: base.GrowingText, record: Callable[[str], None]) -> base.Reading[None]:
    """Text up to the end of its message, passed on as it arrives."""
    while (yield from text.peek()):
        if (yield from text.skip(*_ENDS)):
            text.forget()
            return
        if (yield from text.at(_START)):
            return
        text.take()
        text.take_known(_PLAIN)
        record(text.forget())


HARMONY: Harmony = Harmony(
    "harmony",
    call=f"{_CHANNEL}commentary to=functions.$name {_CONSTRAIN}json{_MESSAGE}$arguments",
    reader=lambda text, tools: HARMONY.messages(text, lambda kind, content: None),
    special_tokens=(_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS),
    markers=(_CHANNEL,),
    between=None,  # a call ends the response
    ends=(_CALL, _RETURN),
    content_beginning=f"{_CHANNEL}final{_MESSAGE}",
)
