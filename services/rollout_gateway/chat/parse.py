"""Parses a response's growing text as a message: reasoning, content, tool calls.

No response is refused: text that is not a whole call is content, unchanged.
"""

import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Sequence

from paceline.errors import InternalError
from paceline.services.rollout_gateway.chat.messages import Delta, Message, ToolCall, joined
from paceline.services.rollout_gateway.chat.tool_formats import base
from paceline.services.rollout_gateway.chat.tool_formats.form import END, Harmony, ToolFormat

THINK, THOUGHT = "<think>", "</think>"
"""Marks around reasoning. They are special tokens in some tokenizers, so decoding must
keep them.
"""

_ALL = re.compile(r".+", re.DOTALL)
_THINKING = re.compile(r"[^\n<]+")


def random_digits(count: int) -> str:
    """Unpredictable hexadecimal digits."""
    return secrets.token_hex((count + 1) // 2)[:count]


class ChatParser:
    """Parses one response. The message is the same for any cuts of its text.

    With a format, white space around calls is dropped, and calls are returned when complete.
    Offered tools decide whether there is a format at all, not which names count: the client answers
    a call of an unknown tool.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        *,
        reasoning: bool,
        starts_in_reasoning: bool = False,
        forced: str = "",
        prefill: str = "",
        digits: Callable[[int], str] = random_digits,
    ) -> None:
        """`starts_in_reasoning`: the prompt ends inside <think>. `forced`: the beginning of the
        response in the prompt.

        `prefill`: the prompt's part of the message, which is in no delta. `digits`: source of
        hexadecimal digits for the ids of calls.
        """
        marks = tool_format.special_tokens if tool_format is not None else ()
        self.kept = (*marks, THINK, THOUGHT) if reasoning else marks
        """Special tokens with text that must also be pushed."""
        self._prefill = prefill
        self.deltas: list[Delta] = []
        """Updates so far."""
        self._format = tool_format
        self._digits = digits
        self._text = base.GrowingText()
        self._news: list[Delta] = []  # content of the next delta
        self._only_content = False  # no marker can follow
        self._reading = self._message(reasoning, starts_in_reasoning)
        self._text.push(forced)

    def push(self, text: str) -> Delta:
        """The update from more text of the response, cut anywhere.

        Raises InternalError after `finish`.
        """
        if self._text.ended:
            raise InternalError("text after the end of the response", seen=text[:80])
        if self._only_content:
            delta = Delta(text)
            self.deltas.append(delta)
            return delta
        self._text.push(text)
        return self._next()

    def finish(self) -> Delta:
        """The update at the end of the response: the text held back."""
        self._text.ended = True
        return self._next()

    @property
    def message(self) -> Message:
        """The whole message so far, including the prefill."""
        return joined([Delta(self._prefill), *self.deltas])

    def reasoning_tokens(
        self, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> int:
        """Number of response tokens up to and including the end of reasoning; all if it never ends,
        0 without reasoning.

        `decode` must keep the marks. Decodes the whole, and then log2(tokens) prefixes of it.
        """
        if not any(delta.reasoning for delta in self.deltas):
            return 0
        end = END if isinstance(self._format, Harmony) else THOUGHT
        if end not in decode(token_ids):
            return len(token_ids)
        counts = range(len(token_ids))
        return bisect_left(counts, True, key=lambda count: end in decode(token_ids[:count]))

    def _next(self) -> Delta:
        next(self._reading, None)
        delta = Delta.of(self._news)
        self._news.clear()
        self.deltas.append(delta)
        return delta

    def _message(self, reasoning: bool, started: bool) -> base.Reading[None]:
        if reasoning:
            yield from self._thinking(started)
        if isinstance(self._format, Harmony):
            yield from self._channels(self._format)
        elif self._format is not None:
            yield from self._speech(self._format)
        else:
            if (yield from self._text.peek()):
                self._text.take_known(_ALL)
            self._news.append(Delta(self._text.forget()))
            self._only_content = True

    def _thinking(self, started: bool) -> base.Reading[None]:
        """Reads reasoning at the beginning of a response.

        Newlines that belong to the marks are dropped.
        """
        text = self._text
        if not started:
            yield from text.blanks()
        # also if the prompt has it: some models repeat it
        if not (yield from text.skip(THINK)) and not started:
            return  # the white space is kept for the content

        yield from text.skip("\n")
        text.forget()
        while (yield from text.peek()):
            if (yield from text.skip("\n" + THOUGHT, THOUGHT)):
                yield from text.skip("\n")
                yield from text.skip("\n")
                text.forget()
                return
            text.take()
            text.take_known(_THINKING)
            self._news.append(Delta(reasoning=text.forget()))

    def _channels(self, harmony: Harmony) -> base.Reading[None]:
        """Reads messages in channels, as they arrive."""

        def record(kind: str, text: str) -> None:
            self._news.append(Delta(reasoning=text) if kind == "reasoning" else Delta(text))

        while calls := (yield from harmony.messages(self._text, record)):
            self._add_calls(harmony, calls)

    def _speech(self, tool_format: ToolFormat) -> base.Reading[None]:
        """Reads content and calls. White space is kept until the next text."""
        text = self._text
        plain = _plain(tool_format.markers)
        openings = tool_format.at_start + tool_format.markers
        yield from text.blanks()
        while (yield from text.peek()):
            if not (yield from text.at(*openings)):
                text.take()
                text.take_known(plain)
            elif (yield from self._read_calls(tool_format)):
                yield from text.blanks()
                text.forget()
                openings = tool_format.after_calls + tool_format.markers
                continue
            self._news.append(Delta(text.forget()))
            openings = tool_format.markers
            yield from text.blanks()

        self._news.append(Delta(text.forget()))

    def _read_calls(self, tool_format: ToolFormat) -> base.Reading[bool]:
        """Reads calls; returns False if there are none, and keeps the text for the content."""
        try:
            self._add_calls(tool_format, (yield from tool_format.read(self._text)))
        except base.Deviation:
            return False
        return True

    def _add_calls(self, tool_format: ToolFormat, calls: Sequence[base.SpelledCall]) -> None:
        self._text.forget()
        found = []
        for call in calls:
            drawn = tool_format.id_prefix + self._digits(tool_format.id_digits)
            found.append(ToolCall(call.call_id or drawn, call.name, call.arguments))
        self._news.append(Delta(tool_calls=tuple(found)))


def _plain(markers: Sequence[str]) -> re.Pattern[str]:
    """Pattern of text that ends neither in white space nor at the first character of a marker, so
    that none of it must wait.
    """
    stop = "".join(sorted({re.escape(marker[0]) for marker in markers}))
    return re.compile(rf"[^{stop}]*[^{stop} \t\r\n]")
