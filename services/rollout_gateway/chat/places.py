"""Finds the start of each token's text in a text."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable


class TextPlaces:
    """Counts the characters before each token of a growing text. Tokens that share a character have
    the same place, and places never decrease.
    """

    def __init__(
        self,
        spelled: Callable[[int], bytes],
        alone: Callable[[int], str],
        *,
        start: int = 0,
        each_byte: bool = False,
    ) -> None:
        """`spelled`: bytes of a token in the middle of a text, empty for a token without text.
        `alone`: text of a token at the beginning of a text. `start`: characters before the first
        token. `each_byte`: the text has a U+FFFD for every byte of a broken character, not one for
        all.
        """
        self._spelled = spelled
        self._alone = alone
        self._at = start
        self._each_byte = each_byte
        self._begun = False
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def take(self, token_ids: Iterable[int]) -> list[int]:
        """The place of each of the next tokens, in characters."""
        return [self._take(token) for token in token_ids]

    def _take(self, token: int) -> int:
        data = self._spelled(token)
        if not self._begun and data:
            self._begun = True
            text = self._alone(token)
            data = text.encode() if data.endswith(text.encode()) else data
        pending = self._decoder.getstate()[0]
        if pending and data and not _joins(pending, data[:1]):  # a broken character ends here
            self._at += len(pending) if self._each_byte else 1
            self._decoder.reset()
        found = self._at
        self._at += len(self._decoder.decode(data))
        return found


def _joins(pending: bytes, byte: bytes) -> bool:
    """Whether a byte continues the beginning of a character."""
    try:
        getincrementaldecoder("utf-8")().decode(pending + byte)
    except UnicodeDecodeError:
        return False
    return True
