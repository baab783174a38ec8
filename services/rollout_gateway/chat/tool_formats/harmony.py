"""The messages of gpt-oss: reasoning, content and tool calls in channels, each message with its own
header.

A response begins after `<|start|>assistant`. openai-harmony is not used: it reads tokens only, with
a vocabulary that it downloads at start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from paceline.services.rollout_gateway.chat.tool_formats import base, json_text, lark

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN, _CALL, _END, _RETURN = "<|constrain|>", "<|call|>", "<|end|>", "<|return|>"
_ENDS = (_END, _CALL, _RETURN)
_NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.:/-]+)")
_PLAIN = re.compile(r"[^<]+")
_NEXT = f"{_END}{_START}assistant"
Told = Callable[[str, str], None]
"""Receives the kind of the next text, "reasoning" or "content", and the text."""


class Harmony(base.ToolFormat):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`. Channel
    analysis is reasoning; all other text is content.
    """

    name = "harmony"
    special_tokens = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
    markers = (_CHANNEL,)
    frame = base.CallFrame(between=None)  # a call ends the response
    channels = True
    ends = (_CALL, _RETURN)
    reasoning_marks = (f"{_CHANNEL}analysis", _END)
    content_beginning = f"{_CHANNEL}final{_MESSAGE}"

    def read(self, text: base.GrowingText) -> base.Reading[list[base.SpelledCall]]:
        """One call, from its header on."""
        header = yield from text.until(_MESSAGE)
        named = _RECIPIENT.search(header)
        if named is None:
            raise base.Deviation
        return [(yield from _call(text, named[1]))]

    def messages(self, text: base.GrowingText, told: Told) -> base.Reading[list[base.SpelledCall]]:
        """Text up to the next call, and the call; at the end of the response no call.

        Text without a header, or that is no call, is content unchanged.
        """
        before = ""
        while (yield from text.peek()):
            try:
                header = yield from text.until(_MESSAGE)
                named = _RECIPIENT.search(header)
                if named is not None:
                    return [(yield from _call(text, named[1]))]
            except base.Deviation:
                told("content", text.forget())
                yield from _body(text, partial(told, "content"))
                continue
            text.forget()
            channel = _NAMED_CHANNEL.search(header)
            kind = "reasoning" if channel and channel[1] == "analysis" else "content"
            if before == kind:
                told(kind, "\n")
            yield from _body(text, partial(told, kind))
            before = kind

        return []

    def spelled(self, tool: base.Offered, rules: lark.Rules) -> list[base.Piece]:
        return [self.beginning(tool.name), rules.json(tool.parameters)]

    def written(self, calls: Sequence[base.SpelledCall]) -> str:
        return "".join(f"{self.beginning(one.name)}{one.arguments}{_CALL}" for one in calls)

    def woven(
        self, rules: lark.Rules, calls: base.Calls, answer: lark.Lark | None = None
    ) -> lark.Lark:
        """Reasoning and preambles, then a call or the answer."""
        said = rules.either(
            rules.sequence([rules.text(f"{_CHANNEL}{name}{_MESSAGE}"), rules.until(_NEXT, _END)])
            for name in ("analysis", "commentary")
        )
        form = answer or rules.free_text(self.special_tokens).whole
        final = rules.sequence([rules.text(self.content_beginning), form])
        last = rules.either([calls(rules, ""), final])
        return rules.sequence([lark.Lark(f"({said.text})*"), last])

    def beginning(self, name: str = "") -> str:
        """The header, including its end if a name is given; otherwise the model writes the name."""
        head = f"{_CHANNEL}commentary to=functions.{name}"
        return f"{head} {_CONSTRAIN}json{_MESSAGE}" if name else head


def _call(text: base.GrowingText, name: str) -> base.Reading[base.SpelledCall]:
    """Arguments and the end of the message. The response may end there, and not every engine
    returns that end as text.
    """
    yield from text.blanks()
    arguments = yield from json_text.json_arguments(text)
    yield from text.blanks()
    for end in _ENDS:
        if (yield from text.at(end)):
            text.take(len(end))
            return base.SpelledCall(name, arguments)
    if (yield from text.peek()):
        raise base.Deviation
    return base.SpelledCall(name, arguments)


def _body(text: base.GrowingText, told: Callable[[str], None]) -> base.Reading[None]:
    """Text up to the end of its message, passed on as it arrives."""
    while (yield from text.peek()):
        for end in _ENDS:
            if (yield from text.at(end)):
                text.take(len(end))
                text.forget()
                return
        if (yield from text.at(_START)):
            return
        text.take()
        text.take_known(_PLAIN)
        told(text.forget())
