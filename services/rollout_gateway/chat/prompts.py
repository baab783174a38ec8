"""Spells the prompt of a conversation and makes what parses its answer.

The one room of the chat template, the tokenizer and the tool format: a caller hands over a request,
and the turn it goes on from, and gets tokens and a parser back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.chat.messages import ChatRequest
from paceline.services.rollout_gateway.chat.parse import (
    THOUGHT,
    ChatParser,
    forced_beginning,
    knows_reasoning,
    opens_reasoning,
)
from paceline.services.rollout_gateway.chat.shown import ShownTools
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.chat.tool_formats import (
    ToolFormat,
    ToolGrammar,
    Vocabulary,
    offered,
    tool_format,
)
from paceline.services.rollout_gateway.config import ChatConfig

PROMPT_END = 16
"""Tokens that show whether a prompt ends inside the model's reasoning."""


class Known(NamedTuple):
    """An answer of before, token for token."""

    messages: int  # of the conversation, up to this one
    token_ids: Sequence[int]  # all up to its end
    response_ids: Sequence[int]  # those that the model said


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Where the model is to speak."""

    ids: tuple[int, ...]  # all tokens that the engine sees first
    goes_on: bool  # they begin with those of the known turn
    parser: Callable[[], ChatParser]  # of one answer
    grammar: str = ""  # that the answer's calls of tools follow; empty: the model is free
    stop_ids: tuple[int, ...] = ()  # tokens that end the answer, besides the model's
    unread: tuple[str, ...] = ()  # parts of messages (name, reasoning) that the template leaves out
    free_until: str = ""  # text behind which an answer of a form begins; empty: at its beginning


class Held(NamedTuple):
    """What an answer is to be held to by a grammar."""

    calls: bool = False  # calls that are asked for, and those of strict tools
    answer: str = ""  # JSON schema that an answer without calls matches; empty: any


class ChatPrompts:
    """Prompts of one model's conversations."""

    def __init__(self, config: ChatConfig, codec: TextCodec) -> None:
        self._codec = codec
        self._format = tool_format(config.tool_format, codec.template_source)
        known = config.reasoning == "auto" and knows_reasoning(codec.template_source)
        self._reasoning = known or config.reasoning == "think"
        self._content_beginning = self._format.content_beginning if self._format else ""
        self._vocabulary = Vocabulary(codec.added_tokens)
        ends = self._format.ends if self._format else ()
        self._tools = ShownTools(codec, self._format, config.tool_prompt)
        self._stop_ids = tuple(codec.added_tokens[end] for end in ends if end in codec.added_tokens)

    def prompt(
        self,
        request: ChatRequest,
        known: Known | None,
        longest: int | None = None,
        held: Held | None = None,
    ) -> ChatPrompt:
        """The prompt of a request; `known` is the turn that it goes on from.

        Raises InvalidInput for what cannot be rendered or forced, and where more than `longest`
        tokens are to be made.
        """
        ids, goes_on = self._history(request, known, longest)
        inside = self._reasoning and opens_reasoning(self._codec.decode_all(ids[-PROMPT_END:]))
        forced = self._forced(request, inside)
        ids += self._codec.encode_piece(forced + request.prefill, longest)
        tools = self._offered(request)

        def parser() -> ChatParser:
            return ChatParser(
                tools,
                reasoning=self._reasoning,
                starts_in_reasoning=inside,
                forced=forced,
                prefill=request.prefill,
            )

        grammar = self._grammar(request, held or Held(), inside=inside)
        thinks = inside and not forced and not request.prefill
        unread = self._tools.unread(request, known.messages if known and goes_on else 0)
        free_until = THOUGHT if thinks else ""
        return ChatPrompt(ids, goes_on, parser, grammar, self._stop_ids, unread, free_until)

    def encode(self, request: ChatRequest, longest: int | None = None) -> tuple[int, ...]:
        """Ids of a whole conversation up to where the model speaks.

        Raises InvalidInput where the template refuses it or drops its tools, and for more than
        `longest` ids.
        """
        fitted, _ = self._tools.fitted(request)
        return self._codec.encode_chat(fitted, longest, partial(self._tools.check, request))

    def _offered(self, request: ChatRequest) -> ToolFormat | None:
        """What the answer is read by; None: it is text."""
        if self._format is None:
            return None
        if request.tools and request.tool_choice.mode != "none":
            return self._format.offering(offered(request.tools))
        return self._format if self._format.channels else None

    def _grammar(self, request: ChatRequest, held: Held, *, inside: bool) -> str:
        mode = request.tool_choice.mode
        if not held.calls or not request.tools or mode == "none" or self._format is None:
            return ""
        tools = offered(request.tools)
        if mode == "named":
            tools = [tool for tool in tools if tool.name == request.tool_choice.name]
        grammar = ToolGrammar(self._format, tools, self._vocabulary, several=not request.one_call)
        if mode != "auto":
            return grammar.required(self._format.beginning(request.tool_choice.name))
        if not request.strict_tools and not held.answer:
            return ""
        after = THOUGHT if inside and not request.prefill else ""
        return grammar.allowed(request.strict_tools, after, held.answer)

    def _history(
        self, request: ChatRequest, known: Known | None, longest: int | None
    ) -> tuple[tuple[int, ...], bool]:
        """All tokens up to where the model speaks, and whether the known turn's begin them."""
        if not request.messages:
            raise InvalidInput("messages is empty", allowed="one message or more")
        if known is not None:
            fitted, shift = self._tools.fitted(request, known.messages)
            before = known.messages - 1 + shift
            rest = self._codec.encode_after(fitted, before, known.response_ids, longest)
            if rest is not None:
                return (*known.token_ids, *rest), True
        return self.encode(request, longest), False

    def _forced(self, request: ChatRequest, inside: bool) -> str:
        """How the answer has to begin; empty when it may be anything.

        With the call that tool_choice asks for; with the end of the model's reasoning, where a
        prefill is to follow.
        """
        choice = request.tool_choice
        if choice.mode in ("auto", "none"):
            if not request.prefill:
                return ""
            return f"\n{THOUGHT}\n\n" if inside else self._content_beginning
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

        if request.prefill:
            raise InvalidInput(
                "an answer that has to be a tool call cannot begin with a prefill",
                allowed="tool_choice auto or none",
            )

        return forced_beginning(
            self._format, choice.name if choice.mode == "named" else "", in_reasoning=inside
        )
