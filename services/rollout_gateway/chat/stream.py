"""Decodes the ids of a growing response up to the last whole character, each id once if
possible.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from paceline.services.rollout_gateway.engines.requests import stop_texts

CHARACTER_BYTES = 4
"""A UTF-8 character has at most four byte tokens."""
BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Result of decoding bytes that are no character, or not yet."""
LONGEST_BROKEN = 16
"""Most tokens held back without a whole character; broken bytes are returned after that."""


@dataclass(eq=False)
class TextStream:
    """Text of a growing response. It holds back incomplete characters and possible beginnings of a
    stop string.

    Only a window of ids is decoded at a time. It starts with the ids of the last returned text,
    which may affect the next ids (spaces, bytes of one character). In a tokenizer with additive
    texts, nothing depends on them once a character is whole, and every id is decoded once.
    """

    _decode: Callable[[list[int]], str]
    _stop: tuple[str, ...]
    adds_up: bool = False
    """The text of ids is the concatenation of its parts' texts, for any cut between whole
    characters.
    """
    names: stop_texts.TokenNames | None = None
    """Tokens with names in which no stop string counts."""
    _names: frozenset[str] = frozenset()  # of the received tokens
    _window: list[int] = field(default_factory=list)
    _known: int = 0  # ids of the window with returned text
    _held: str = ""

    def push(self, token_ids: Sequence[int], *, early: bool = False) -> str:
        """Text that became certain with these ids. `early`: a complete stop string does not end the
        response yet.
        """
        self._window += token_ids
        news = self._advance(final=False)
        if not self._stop:
            return news
        if self.names is not None:
            self._names |= self.names.among(token_ids)
        self._held += news
        overlap = _beginning if early else _overlap
        keep = max((overlap(self._held, stop, self._names) for stop in self._stop), default=0)
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return text

    def finish(self, matched_stop: str = "", *, keep: bool = False) -> str:
        """The text held back by `push`, cut before the stop string that ended the response; `keep`:
        after it.
        """
        text, self._held = self._held + self._advance(final=True), ""
        if not matched_stop:
            return text
        at = stop_texts.find_stop(text, matched_stop, self._names)
        if at < 0:  # the engine's tokens spell a name that is no token there
            at = text.rfind(matched_stop)
        return text if at < 0 else text[: at + len(matched_stop) * keep]

    def _advance(self, *, final: bool) -> str:
        """Text of the ids up to the last whole character; of all ids if final, or if no whole
        character is in sight.
        """
        before = self._decode(self._window[: self._known]) if self._known else ""
        pending = len(self._window) - self._known
        for left_out in range(min(pending, CHARACTER_BYTES)):
            size = len(self._window) - left_out
            after = self._decode(self._window[:size])
            if after.startswith(before) and not after.endswith(BROKEN):
                rest = self._give(size, after[len(before) :], whole=self.adds_up)
                return rest + self._advance(final=True) if final and left_out else rest
        if final or pending > LONGEST_BROKEN:
            return self._give(len(self._window), self._decode(self._window[self._known :]))
        return ""

    def _give(self, size: int, text: str, *, whole: bool = False) -> str:
        """Marks the text of ids below `size` as returned. Only the newest of these ids stay as
        context; with `whole` none.
        """
        gone = size if whole else self._known
        self._window, self._known = self._window[gone:], size - gone
        return text


def _overlap(text: str, stop: str, names: Collection[str]) -> int:
    """Characters at the end of `text` to hold back: from a complete `stop` inside, or a beginning
    of `stop` at the end.
    """
    at = stop_texts.find_stop(text, stop, names)
    return len(text) - at if at >= 0 else _beginning(text, stop, names)


def _beginning(text: str, stop: str, names: Collection[str]) -> int:
    """Length of the longest proper beginning of a stop string at the end of `text`."""
    longest = min(len(stop) - 1, len(text))
    sizes = [size for size in range(longest, 0, -1) if text.endswith(stop[:size])]
    spans = stop_texts.name_spans(text, names) if sizes else []
    return next((size for size in sizes if not stop_texts.is_inside(len(text) - size, spans)), 0)
