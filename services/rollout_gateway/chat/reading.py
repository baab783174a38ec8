"""What a model says in a conversation, read as a message.

Owns the choice of the tool format; parsing is parse.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.errors import InvalidInput
from rollout_gateway.chat.messages import ChatRequest, Delta, Message, joined
from rollout_gateway.chat.parse import (
    THINK,
    THOUGHT,
    ChatParser,
    forced_beginning,
    knows_reasoning,
    opens_reasoning,
    reasoning_tokens,
)
from rollout_gateway.chat.tool_formats import tool_format
from rollout_gateway.config import ChatConfig


class Reader:
    """Reads one answer."""

    def __init__(
        self, parser: ChatParser, kept: Sequence[str], prefill: str, *, thinking: bool
    ) -> None:
        self.kept = tuple(kept)  # special tokens whose text the parser needs
        self._parser = parser
        self._prefill = prefill
        self._thinking = thinking  # the prompt ends inside <think>
        self._deltas: list[Delta] = []

    def push(self, text: str) -> Delta:
        """News that became certain with this text."""
        delta = self._parser.push(text)
        self._deltas.append(delta)
        return delta

    def finish(self, delta: Delta) -> Delta:
        """The end: `delta` and what was held back, in one."""
        rest = self._parser.finish()
        self._deltas.append(rest)
        return Delta(
            delta.content + rest.content,
            delta.reasoning + rest.reasoning,
            delta.tool_calls + rest.tool_calls,
        )

    @property
    def message(self) -> Message:
        """The whole message, the prefill included."""
        return joined([Delta(self._prefill), *self._deltas])

    def reasoning_tokens(
        self, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> int:
        """How many of the tokens were thought, not said."""
        if not any(delta.reasoning for delta in self._deltas):
            return 0
        return reasoning_tokens(token_ids, decode, starts_in_reasoning=self._thinking)


class Readers:
    """What one model's answers look like."""

    def __init__(self, config: ChatConfig, template_source: str) -> None:
        self._format = tool_format(config.tool_format, template_source)
        known = config.reasoning == "auto" and knows_reasoning(template_source)
        self._reasoning = known or config.reasoning == "think"

    def forced(self, request: ChatRequest, prompt_end: str) -> str:
        """How the answer has to begin; empty when it may be anything.

        With the call that tool_choice asks for; with the end of the model's reasoning, where a
        prefill is to follow.

        `prompt_end`: how the rendered prompt ends.

        Raises InvalidInput when there is no such tool, or no format to spell a call in.
        """
        choice = request.tool_choice
        inside = self._reasoning and opens_reasoning(prompt_end)
        if choice.mode in ("auto", "none"):
            return f"\n{THOUGHT}\n\n" if inside and request.prefill else ""
        names = list(request.tool_names())
        if not names or (choice.mode == "named" and choice.name not in names):
            raise InvalidInput(
                "tool_choice names no tool",
                seen=choice.name or choice.mode,
                allowed=", ".join(names),
            )
        if self._format is None:
            raise InvalidInput(
                "tool_choice: the model's chat template shows no tool format",
                seen=choice.mode,
                allowed="auto, none, or gateway.chat.tool_format set",
            )
        return forced_beginning(
            self._format, choice.name if choice.mode == "named" else "", in_reasoning=inside
        )

    def reader(self, request: ChatRequest, prompt_end: str, forced: str) -> Callable[[], Reader]:
        """A factory of readers for answers to this request; `prompt_end`: how the rendered prompt
        ends.
        """
        tools = self._format if request.tools and request.tool_choice.mode != "none" else None
        inside = self._reasoning and opens_reasoning(prompt_end)
        kept = tools.special_tokens if tools is not None else ()
        if self._reasoning:
            kept = (*kept, THINK, THOUGHT)

        def make() -> Reader:
            parser = ChatParser(
                tools, reasoning=self._reasoning, starts_in_reasoning=inside, forced=forced
            )
            return Reader(parser, kept, request.prefill, thinking=inside and not forced)

        return make
