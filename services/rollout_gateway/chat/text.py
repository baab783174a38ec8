"""Renders conversations by the model's chat template, encodes text as token ids, decodes ids, and
finds the start of each token's text.

Generated text is kept as ids and never tokenised again; its text is for people. Templates are
untrusted Jinja and run in its sandbox.
"""

import itertools
import json
import secrets
import string
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from paceline.errors import ConfigError, InvalidInput
from paceline.models.reading import DEFAULT, TOOL_USE, TextFiles, read_text
from paceline.services.rollout_gateway.chat.messages import ChatRequest
from paceline.services.rollout_gateway.chat.stream import TextStream
from paceline.services.rollout_gateway.engines.requests import stop_texts, tokenizer
from paceline.services.rollout_gateway.engines.sampling import TOO_LONG, check_length

_MARK = "Pacelineturn" + "".join(secrets.choice(string.ascii_lowercase) for _ in range(20))
"""Letters only, so that no template strips or splits it; random per process, so that no message
contains it.
"""
_REFUSALS = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    RecursionError,
)
"""Errors of a template that cannot render its messages."""


class _Generation(Extension):
    """`{% generation %}` marks a model's answer for other trainers' loss masks; here only its
    content matters.
    """

    tags = {"generation"}  # noqa: RUF012  # the base class has it so

    def parse(self, parser: Parser) -> nodes.Node:
        next(parser.stream)
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(inside)  # the block's variables stay inside, as in transformers


class ChatTemplates:
    """The templates of one model."""

    def __init__(self, files: TextFiles) -> None:
        """Raises ConfigError for an unreadable template."""
        self._files = files
        self.source = files.templates.get(TOOL_USE) or files.templates.get(DEFAULT, "")
        """Text of the template for conversations with tools; empty without one."""
        blocks = {"trim_blocks": True, "lstrip_blocks": True}
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        environment = ImmutableSandboxedEnvironment(**blocks, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        sources = [files.templates[name] for name in (DEFAULT, TOOL_USE) if name in files.templates]
        try:
            self._read = {source: environment.from_string(source) for source in sources}
        except TemplateError as error:
            message = f"the chat template of {files.directory} cannot be read: {error}"
            raise ConfigError(message) from error

    def render(self, request: ChatRequest) -> str:
        """The conversation up to the model's answer, by the template that transformers would
        choose: tool_use if there are tools and such a template, else default.

        Raises InvalidInput without a template, and when the template refuses the conversation.
        """
        template = self._read[self._files.template(tools=bool(request.tools))]
        given = {"tools": list(request.tools) or None, "documents": None, **self._files.named}
        write = partial(template.render, given, add_generation_prompt=True)
        try:
            try:
                return write(messages=[one.shown(parsed=True) for one in request.messages])
            except TypeError:  # DeepSeek's templates concatenate arguments as text
                return write(messages=[one.shown() for one in request.messages])
        except _REFUSALS as error:
            raise InvalidInput(f"messages: the chat template refused them: {error}") from error

    def after(self, request: ChatRequest, index: int) -> str | None:
        """The template's text after the content of the assistant's message `index`; None if it
        hides the message.

        A mark replaces the message: the answer's tokens are recorded, and only the text after it is
        needed. The end of the turn (such as `<|im_end|>`) is first; a caller with that token in the
        answer skips it. A template may refuse a message without its tool calls; the result is then
        also None.
        """
        messages = list(request.messages)
        messages[index] = replace(messages[index], content=_MARK, reasoning="", tool_calls=())
        try:
            text = self.render(replace(request, messages=tuple(messages)))
        except InvalidInput:
            return None
        return text.partition(_MARK)[2] if text.count(_MARK) == 1 else None


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    form = partial(json.dumps, ensure_ascii=ensure_ascii, indent=indent, separators=separators)
    return form(value, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


class TextPlaces:
    """Counts the characters before each token of a growing text. Tokens that share a character have
    the same place, and places never decrease.
    """

    def __init__(self, stream: TextStream, start: int = 0) -> None:
        """`start`: characters before the first token."""
        self._stream = stream
        self._at = start

    def take(self, token_ids: Iterable[int]) -> list[int]:
        """The place of each of the next tokens, in characters."""
        found = []
        for token in token_ids:
            found.append(self._at)
            self._at += len(self._stream.push([token]))
        return found


CHARACTERS_PER_TOKEN = 8
"""More characters per token than any common text has: a text with more is first checked
in parts.
"""
SHORTEST_PART = 64
"""Least number of tokens of a part."""


class TextCodec:
    """Tokenizer and chat template of one model directory."""

    def __init__(self, directory: Path, end_ids: Collection[int] = ()) -> None:
        """`end_ids`: tokens that end an answer, beside the tokenizer's own end token. Raises
        ConfigError.
        """
        self.files = files = read_text(directory)
        self._tokenizer, self._within = tokenizer.read_tokenizers(files)
        self.template = ChatTemplates(files)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content for token in [*files.added, *added.values()] if token.special}
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = {one: name for one, name in self._added.items() if name in special}
        self.added_tokens = {name: token_id for token_id, name in self._added.items()}
        """Tokens outside ordinary text, by their text: marks, beginnings and ends."""
        self._bytes: dict[int, bytes] = {}
        self._spelling: tokenizer.TokenSpelling | None = None
        with suppress(InvalidInput):  # of a decoder without bytes: see token_bytes
            self._spelling = tokenizer.TokenSpelling(self._tokenizer)
        self._stages = () if self._spelling is None else self._spelling.kinds
        own_end = self._tokenizer.token_to_id(files.named.get("eos_token", ""))
        self.end_ids = frozenset([*end_ids, *([] if own_end is None else [own_end])])
        """Tokens that end an answer; content never shows them."""
        ends = {token_id: self.token_text(token_id) for token_id in self.end_ids}
        self._plain_ends = ends.keys() - self._special.keys()
        self._silent = {**ends, **self._special}  # names of the tokens that content never shows
        self._names = stop_texts.TokenNames(self._tokenizer, self.end_ids)

    def encode(
        self, text: str, longest: int | None = None, *, special: bool = True
    ) -> tuple[int, ...]:
        """Ids of a text. `special`: with the special tokens that the tokenizer adds around it
        (bos), otherwise only the special tokens spelled in the text.

        Raises InvalidInput for more than `longest` ids, without making all of far too many.
        """
        return _encoded(self._tokenizer, text, special=special, longest=longest)

    def encode_piece(self, text: str, longest: int | None = None) -> tuple[int, ...]:
        """Ids of a text in the middle of a sequence: without bos, and without the space that a
        tokenizer adds before a first word. Raises InvalidInput for more than `longest` ids.
        """
        ids = self.encode(text, longest, special=False)
        if self._within is self._tokenizer:
            return ids
        # Words after a special token keep the space that this tokenizer always gives them.
        first = self._before_added(_encoded(self._within, text))
        return first + ids[len(self._before_added(ids)) :]

    def _before_added(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(itertools.takewhile(lambda one: one not in self._added, ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without special and end tokens; broken characters become U+FFFD."""
        shown = list(token_ids)
        if self._plain_ends:
            shown = [one for one in shown if one not in self._plain_ends]
        return str(self._tokenizer.decode(shown, skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Text of one token in the middle of a text, a special one by its name; broken characters
        become U+FFFD.
        """
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token in the middle of a text, with partial characters unchanged; the name's
        bytes for a special token.
        """
        found = self._bytes.get(token_id)
        if found is None:
            if self._spelling is not None:
                found = self._spelling(token_id)
            else:
                alone, twice = (self.decode_all([token_id] * count) for count in (1, 2))
                in_text = "" if token_id in self._added else twice.removeprefix(alone)
                found = (in_text or alone).encode()
            self._bytes[token_id] = found
        return found

    def places(self, start: int = 0) -> TextPlaces:
        """Counts the characters before each token of `decode`'s text; `start` are before the first
        one.
        """
        return TextPlaces(self.stream(), start)

    def places_in(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """[T] characters before each token in the text that was encoded as these tokens. Special
        tokens before it that it does not spell (bos) have no width.
        """
        front = itertools.takewhile(self._special.__contains__, token_ids)
        names = [self._special[token] for token in front]
        shown = (index for index, name in enumerate(names) if text.startswith(name))
        hidden = next(shown, len(names))
        places = TextPlaces(self.stream(keep=self._silent.values())).take(token_ids[hidden:])
        return [0] * hidden + [min(place, len(text)) for place in places]

    def encode_chat(self, request: ChatRequest) -> tuple[int, ...]:
        """Ids of a conversation under the model's chat template, which writes bos where needed, as
        in transformers' apply_chat_template.

        Raises InvalidInput without a template, and if the template refuses.
        """
        return self.encode(self.template.render(request), special=False)

    def encode_after(
        self, request: ChatRequest, index: int, said: Sequence[int], longest: int | None = None
    ) -> tuple[int, ...] | None:
        """Ids after the assistant's message `index`, which the model drew as `said`; None if it is
        hidden. Raises InvalidInput for more than `longest` ids.
        """
        text = self.template.after(request, index)
        if text is None:
            return None
        end = self._silent.get(said[-1], "") if said else ""
        return self.encode_piece(text.removeprefix(end), longest)

    def stream(self, stop: Sequence[str] = (), keep: Collection[str] = ()) -> TextStream:
        """Decoder of one growing response. Special and end tokens become text only if `keep`
        contains them.
        """
        decode: Callable[[list[int]], str] = self.decode
        if keep:
            dropped = {token_id for token_id, text in self._silent.items() if text not in keep}

            def decode(ids: list[int]) -> str:
                return self.decode_all([one for one in ids if one not in dropped])

        # The text of ids is then the concatenation of its parts' texts, for any cut between whole
        # characters; other tokenizers move spaces at the front.
        adds_up = self._stages in (("ByteLevel",), ("ByteFallback", "Fuse"))
        return TextStream(decode, tuple(stop), adds_up=adds_up, names=self._names)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens by their names."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _encoded(
    tokenizer: Tokenizer, text: str, *, special: bool = False, longest: int | None = None
) -> tuple[int, ...]:
    try:
        if longest is not None:
            _refuse_far_too_long(tokenizer, text, longest)
        found = tokenizer.encode(text, add_special_tokens=special)
    except (TypeError, UnicodeError) as error:  # half of a surrogate pair, which UTF-8 cannot hold
        message = "the text cannot be spelled in UTF-8"
        raise InvalidInput(message, allowed="whole characters") from error
    if longest is not None:
        check_length(max(len(found), 1), longest)  # a list of every id is slow to make
    return tuple(found.ids)


def _refuse_far_too_long(tokenizer: Tokenizer, text: str, longest: int) -> None:
    """Raises InvalidInput when a beginning of the text already has twice the permitted tokens.

    A text has fewer tokens than its parts together, but more than half as many, since only the
    words at the cuts differ.
    """
    part, tokens = max(longest, SHORTEST_PART) * CHARACTERS_PER_TOKEN, 0
    if len(text) <= part:
        return
    for start in range(0, len(text), part):
        tokens += len(tokenizer.encode(text[start : start + part], add_special_tokens=False))
        if tokens > 2 * longest:
            seen, allowed = f"{len(text)} characters", f"1 to {longest} tokens"
            raise InvalidInput("prompt does not fit", reason=TOO_LONG, seen=seen, allowed=allowed)
