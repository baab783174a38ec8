"""Gives llguidance the bytes of a model's tokens, as the tokenizer's own decoder spells them.

Imports no torch. llguidance is part of the engine's installation, and is imported only where tokens
are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from paceline.errors import ConfigError, InvalidInput
from paceline.models.reading import read_text
from paceline.services.rollout_gateway.engines.requests.token_bytes import (
    TokenSpelling,
    decoder_name,
    lost_at_front,
    token_bytes,
)
from paceline.services.rollout_gateway.engines.requests.tokenizer_file import read_tokenizers

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_BY_PLACE = {"WordPiece", "BPEDecoder"}
"""Decoders that place spaces between words by position. No grammar of characters can follow them.
"""


class GrammarTokens:
    """The tokens of a tokenizer.json in the form that a grammar needs."""

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Reads the file, in about a second for 100 000 tokens.

        Raises InvalidInput naming a decoder that does not map tokens to bytes.
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        try:
            _, self._within = read_tokenizers(read_text(path.parent))
        except ConfigError as error:
            raise InvalidInput(
                f"structured output needs another tokenizer: {error}", seen=path
            ) from error
        kinds = _checked_decoder(self._within, path)
        found = token_bytes(self._within)
        lost = [] if kinds == ("ByteLevel",) else lost_at_front(self._within, found)
        self._special = {
            token.content: token_id
            for token_id, token in self._within.get_added_tokens_decoder().items()
            if token.special
        }
        self._within.encode_special_tokens = True  # the name of a special token is text here
        # A model's vocabulary is often padded beyond its tokenizer's.
        self.tokens = found + [b""] * (vocab_size - len(found))
        kept = np.ones(len(self.tokens), dtype=np.bool_)
        kept[lost] = False
        kept[list(eos_token_ids)] = True
        self.kept_at_front: npt.NDArray[np.uint8] = np.packbits(kept, bitorder="little")
        """[ceil(V / 8)] bitmask, lowest bit first: tokens that keep all bytes at the start of a
        response. Other tokens lose bytes there, mostly a space.
        """
        self.special_token_ids = sorted({*self._special.values(), *eos_token_ids})
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.guide: LLTokenizer = LLTokenizer(
            TokenizerWrapper(self),
            eos_token=list(eos_token_ids),
            slices=LLTokenizer.json_slices(),
        )
        """The tokens for a matcher; llguidance calls `__call__` to tokenize a text."""

    def special(self, text: str) -> int | None:
        """The special token with this name, or None."""
        return self._special.get(text)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a UTF-8 text in the middle of another text, as the tokenizer splits it.

        Where the tokenizer changes the text, or uses special tokens, the longest tokens that fit
        are returned.
        """
        try:
            ids: list[int] = self._within.encode(text.decode(), add_special_tokens=False).ids
        except Exception:  # noqa: BLE001 - tokenizers has no class of its own for unknown words
            ids = []
        same = b"".join(self.tokens[token] for token in ids) == text
        kept = same and not any(token in self.special_token_ids for token in ids)
        if kept or not hasattr(self, "guide"):
            return ids
        return self.guide.greedy_tokenize(text.decode())


def _checked_decoder(tokenizer: Tokenizer, path: Path) -> tuple[str, ...]:
    """Stages of a decoder that only joins its tokens' bytes. Raises InvalidInput for another
    decoder.
    """
    kinds = TokenSpelling(tokenizer).kinds
    if not kinds or _BY_PLACE & set(kinds):
        raise InvalidInput(
            f"structured output needs another tokenizer than {path}: its decoder "
            f"{decoder_name(kinds)} puts spaces between tokens by their place",
            seen=decoder_name(kinds),
            allowed="ByteLevel, ByteFallback, Metaspace, or Replace and Strip around them",
        )
    return kinds
