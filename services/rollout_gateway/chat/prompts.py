"""Makes the prompt of a conversation, and the parser of its answer.

Chat template, tokenizer and tool format are used here only. A caller passes a request and the turn
that it continues, and receives tokens and a parser.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.chat import parse, shown, text
from paceline.services.rollout_gateway.chat.messages import ChatRequest
from paceline.services.rollout_gateway.chat.tool_formats import families
from paceline.services.rollout_gateway.chat.tool_formats.form import ToolFormat
from paceline.services.rollout_gateway.chat.tool_formats.harmony import Harmony
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


class ChatPrompts:
    """Prompts of one model's conversations."""

    def __init__(self, config: ChatConfig, codec: text.TextCodec) -> None:
        self._codec = codec
        self._format = families.tool_format(config.tool_format, codec.template.source)
        marked = config.reasoning == "auto" and parse.THINK in codec.template.source
        self._reasoning = marked or config.reasoning == "think"
        ends = self._format.ends if self._format else ()
        self._tools = shown.ShownTools(codec, self._format, config.tool_prompt)
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
        unread = self._tools.unread(request, known.messages if known and goes_on else 0)
        free_until = parse.THOUGHT if thinks else ""
        return ChatPrompt(ids, goes_on, parser, grammar, self._stop_ids, unread, free_until)

    def encode(self, request: ChatRequest, longest: int | None = None) -> tuple[int, ...]:
        """Ids of a whole conversation up to the model's answer.

        Raises InvalidInput if the template refuses it or drops its tools, and for more than
        `longest` ids.
        """
        fitted, _ = self._tools.fitted(request)
        rendered = self._codec.template.render(fitted)
        self._tools.check(request, rendered)
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
        return offered.allowed(
            added, request.strict_tools, after, answer, several=not request.one_call
        )

    def _history(
        self, request: ChatRequest, known: Known | None, longest: int | None
    ) -> tuple[tuple[int, ...], bool]:
        """All tokens up to the model's answer, and whether they begin with the recorded turn's."""
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
        """The forced beginning of the answer; empty if it is free.

        It is the call that tool_choice requires, or the end of the model's reasoning before a
        prefill.
        """
        choice, end_of_reasoning = request.tool_choice, f"\n{parse.THOUGHT}\n\n" * inside
        if choice.mode in ("auto", "none"):
            if not request.prefill:
                return ""
            content_beginning = self._format.content_beginning if self._format else ""
            return end_of_reasoning or content_beginning
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

        return end_of_reasoning + self._format.beginning(choice.name)
