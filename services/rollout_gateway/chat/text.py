"""Encodes text as token ids and decodes ids.

What the model generated is kept as ids and never tokenised again; text is for people.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.errors import ConfigError, InvalidInput
from paceline.services.rollout_gateway.chat.messages import ChatRequest
from paceline.services.rollout_gateway.chat.places import TextPlaces
from paceline.services.rollout_gateway.chat.stream import TextStream
from paceline.services.rollout_gateway.chat.template import ChatTemplate, read_template
from paceline.services.rollout_gateway.engines.requests.token_bytes import TokenSpelling
from paceline.services.rollout_gateway.engines.requests.tokenizer_file import read_tokenizers
from paceline.services.rollout_gateway.engines.sampling import TOO_LONG, check_length

CHARACTERS_PER_TOKEN = 8
"""More than the tokens of any common text have: a text with more is looked at in parts first."""
SHORTEST_PART = 64
"""Tokens for which a part is made at least."""


class TextCodec:
    """Tokenizer and chat template of one model directory."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                "no tokenizer in the model directory", seen=directory, allowed="tokenizer.json"
            )

        self._tokenizer, self._within = read_tokenizers(path)
        self._adds_up = _adds_up(_read_json(path).get("decoder"))
        settings = _read_json(directory / "tokenizer_config.json")
        tokens = {
            key: _token_text(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token")
        }
        self._template = read_template(directory, settings, tokens)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {
            token_id: token.content for token_id, token in added.items() if token.special
        }
        self._added = frozenset(added)
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        """Tokens beside those of text, by their text: markers, and what begins and ends texts."""
        self._front = _front(self._tokenizer)
        self._bytes: dict[int, bytes] = {}
        try:
            self._spelling: TokenSpelling | None = TokenSpelling(self._tokenizer)
        except InvalidInput:  # a decoder of no bytes: a token is then what is decoded of it alone
            self._spelling = None

    @property
    def template(self) -> ChatTemplate:
        """The chat template. Raises InvalidInput for a model without one."""
        if self._template is None:
            raise InvalidInput("the model has no chat template", allowed="/v1/completions")
        return self._template

    @property
    def template_source(self) -> str:
        """Its text; empty for a model without one."""
        return "" if self._template is None else self._template.source

    def encode(self, text: str, longest: int | None = None) -> tuple[int, ...]:
        """Ids of a text, with the special tokens the model puts around one (bos).

        Raises InvalidInput for more than `longest` of them, without making all of far too many.
        """
        return self._ids(text, bos=True, longest=longest)

    def encode_piece(self, text: str, longest: int | None = None) -> tuple[int, ...]:
        """Ids of a text in the middle of a sequence: no bos, and no space that a tokenizer puts
        before a first word. Raises InvalidInput for more than `longest` of them.
        """
        ids = self._ids(text, longest=longest)
        if self._within is self._tokenizer:
            return ids
        # Words behind a special token keep the space that this tokenizer gives them everywhere.
        first = self._before_added(_encoded(self._within, text))
        return first + ids[len(self._before_added(ids)) :]

    def _before_added(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(itertools.takewhile(lambda one: one not in self._added, ids))

    def _ids(self, text: str, *, bos: bool = False, longest: int | None = None) -> tuple[int, ...]:
        return _encoded(self._tokenizer, text, bos=bos, longest=longest)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without special tokens; broken characters become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Text of one token in the middle of a text, special ones by their name; broken characters
        become U+FFFD.
        """
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token in the middle of a text, half characters as they are; of special
        tokens those of their names.
        """
        found = self._bytes.get(token_id)
        if found is None:
            spelling = self._spelling
            found = self.decode_all([token_id]).encode() if spelling is None else spelling(token_id)
            self._bytes[token_id] = found
        return found

    def places(self, start: int = 0) -> TextPlaces:
        """Counts the characters before each token of a text as `decode` makes it; `start` are
        before the first.
        """
        return self._places(
            lambda one: b"" if one in self._special else self.token_bytes(one), start
        )

    def places_in(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """[T] characters before each token in the text that was encoded as these tokens. Special
        tokens before it that it does not spell (bos) have no width.
        """
        front = itertools.takewhile(self._special.__contains__, token_ids)
        names = [self._special[token] for token in front]
        hidden = next(
            (index for index, name in enumerate(names) if text.startswith(name)), len(names)
        )
        places = self._places(self.token_bytes).take(token_ids[hidden:])
        return [0] * hidden + [min(place, len(text)) for place in places]

    def _places(self, spelled: Callable[[int], bytes], start: int = 0) -> TextPlaces:
        kinds = () if self._spelling is None else self._spelling.kinds
        each_byte = "ByteFallback" in kinds and "ByteLevel" not in kinds
        return TextPlaces(
            spelled, lambda one: self.decode_all([one]), start=start, each_byte=each_byte
        )

    def encode_chat(self, request: ChatRequest, longest: int | None = None) -> tuple[int, ...]:
        """Ids of a conversation under the model's chat template.

        Raises InvalidInput without one, when it refuses, and for more than `longest` ids.
        """
        ids = self._ids(self.template.render(request), longest=longest)
        # A template that does not write bos itself gets it from the tokenizer, once.
        return ids if self._front == ids[: len(self._front)] else self._front + ids

    def encode_after(
        self, request: ChatRequest, index: int, said: Sequence[int], longest: int | None = None
    ) -> tuple[int, ...] | None:
        """Ids that follow the assistant's message `index`, which the model said as `said`; None
        when it is hidden. Raises InvalidInput for more than `longest` of them.
        """
        text = self.template.after(request, index)
        if text is None:
            return None
        end = self._special.get(said[-1], "") if said else ""
        return self.encode_piece(text.removeprefix(end), longest)

    def stream(self, stop: Sequence[str] = (), keep: Collection[str] = ()) -> TextStream:
        """Decoder of one growing response; of the special tokens only those spelled in `keep`
        become text.
        """
        if not keep:
            decode = partial(self._tokenizer.decode, skip_special_tokens=True)
            return TextStream(decode, tuple(stop), adds_up=self._adds_up)
        dropped = {token_id for token_id, text in self._special.items() if text not in keep}
        return TextStream(
            lambda ids: self.decode_all([one for one in ids if one not in dropped]),
            tuple(stop),
            adds_up=self._adds_up,
        )

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens by their names."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _adds_up(decoder: Any) -> bool:
    """Whether the text of ids is that of their parts, cut between whole characters: each token
    stands for its bytes, and nothing is done with the whole. Others move spaces at the front.
    """
    if not isinstance(decoder, dict):
        return False
    stages = decoder.get("decoders", ()) if decoder.get("type") == "Sequence" else (decoder,)
    kinds = [one.get("type") for one in stages]
    return kinds in (["ByteLevel"], ["ByteFallback", "Fuse"])


def _front(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What a tokenizer puts before a text (bos); what it puts behind one is left out."""
    ids, bare = (tokenizer.encode("0", add_special_tokens=special).ids for special in (True, False))
    if not bare:  # the vocabulary lacks it
        return tuple(ids[:1])
    return next(
        (tuple(ids[:size]) for size in range(len(ids)) if ids[size : size + len(bare)] == bare), ()
    )


def _encoded(
    tokenizer: Tokenizer, text: str, *, bos: bool = False, longest: int | None = None
) -> tuple[int, ...]:
    try:
        if longest is not None:
            _refuse_far_too_long(tokenizer, text, longest)
        found = tokenizer.encode(text, add_special_tokens=bos)
    except (TypeError, UnicodeError) as error:  # half of a surrogate pair: no UTF-8 has it
        raise InvalidInput(
            "the text cannot be spelled in UTF-8", allowed="whole characters"
        ) from error
    if longest is not None:
        check_length(max(len(found), 1), longest)  # a list of every id is slow to make
    return tuple(found.ids)


def _refuse_far_too_long(tokenizer: Tokenizer, text: str, longest: int) -> None:
    """Raises InvalidInput when a beginning of the text has twice the tokens that all may have.

    A text has fewer tokens than its parts, but not half as many: only the words at the cuts differ.
    """
    part, tokens = max(longest, SHORTEST_PART) * CHARACTERS_PER_TOKEN, 0
    if len(text) <= part:
        return
    for start in range(0, len(text), part):
        tokens += len(tokenizer.encode(text[start : start + part], add_special_tokens=False))
        if tokens > 2 * longest:
            raise InvalidInput(
                "prompt does not fit",
                reason=TOO_LONG,
                seen=f"{len(text)} characters",
                allowed=f"1 to {longest} tokens",
            )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: object) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")
