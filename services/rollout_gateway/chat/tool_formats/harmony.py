"""The messages of gpt-oss: reasoning, content and tool calls in channels, each message with its own
header.

A response begins after `<|start|>assistant`. openai-harmony is not used: it reads tokens only, with
a vocabulary that it downloads at start.
"""

import re
from collections.abc import Callable
from functools import partial

from paceline.services.rollout_gateway.chat.tool_formats import base, json_text, lark
from paceline.services.rollout_gateway.chat.tool_formats.form import ToolFormat

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
                    return [(yield from _call(text, named[1]))]
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


def _call(text: base.GrowingText, name: str) -> base.Reading[base.SpelledCall]:
    """Arguments and the end of the message. The response may end there, and not every engine
    returns that end as text.
    """
    arguments = yield from json_text.json_arguments(text)
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
