"""Finds stop strings in decoded text, and never inside the name of a token such as <|im_end|>."""

import re
from collections.abc import Collection, Iterable

from tokenizers import Tokenizer

BYTES_PER_CHARACTER = 4
WINDOW_SLACK = 8
_MARK = re.compile(r"<.+>|\[.+\]", re.DOTALL)
"""Pattern of an added token that is a mark; other added tokens are words or white space."""


class TokenNames:
    """Names of a tokenizer's special tokens, end tokens and other marks."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int] = ()) -> None:
        """`end_ids`: tokens that end a response."""
        self._texts: dict[int, str] = {}
        for token_id, token in tokenizer.get_added_tokens_decoder().items():
            if token.special or token_id in end_ids or _MARK.fullmatch(token.content):
                self._texts[token_id] = token.content

    def among(self, token_ids: Iterable[int]) -> frozenset[str]:
        """Names of the given tokens."""
        return frozenset(self._texts[one] for one in token_ids if one in self._texts)


def find_stop(text: str, stop: str, names: Collection[str], start: int = 0) -> int:
    """Index of the first `stop` from `start` on that neither begins nor ends inside a name.

    -1 for none.
    """
    at = text.find(stop, start)
    spans = name_spans(text, names) if at >= 0 else []
    while at >= 0 and (is_inside(at, spans) or is_inside(at + len(stop), spans)):
        at = text.find(stop, at + 1)
    return at


def name_spans(text: str, names: Collection[str]) -> list[tuple[int, int]]:
    """(start, end) of the names in a text."""
    if not names:
        return []
    longest_first = sorted(names, key=len, reverse=True)
    return [found.span() for found in re.finditer("|".join(map(re.escape, longest_first)), text)]


def is_inside(at: int, spans: Iterable[tuple[int, int]]) -> bool:
    """Whether an index is behind the first character of a span and before its end."""
    return any(start < at < end for start, end in spans)


class StopText:
    """Finds stop strings in a growing response by decoding a window of its last tokens."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], names: TokenNames) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._names = names
        # A token holds at least one byte. This number of tokens therefore holds every stop string
        # that ends in the last token.
        self._window = max(len(stop) for stop in stops) * BYTES_PER_CHARACTER + WINDOW_SLACK

    def match(self, tokens: list[int], least: int = 0) -> str:
        """The stop string near the end of the tokens' text; empty when there is none.

        least: minimum number of tokens; stop strings that end in earlier tokens do not count.
        """
        if len(tokens) < least:
            return ""
        window = tokens[-self._window :]
        text, names = self._text(window), self._names.among(window)
        before = tokens[-self._window : max(least - 1, 0)]
        early = len(self._text(before)) if least and before else 0
        for stop in self._stops:
            if find_stop(text, stop, names, max(early - len(stop) + 1, 0)) >= 0:
                return stop
        return ""

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))
