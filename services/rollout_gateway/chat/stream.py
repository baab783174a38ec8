"""Decodes the ids of a growing response, each once where that is enough, up to the last whole
character.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from paceline.services.rollout_gateway.engines.requests.stop_texts import (
    TokenNames,
    find_stop,
    is_inside,
    name_spans,
)

CHARACTER_BYTES = 4
"""A character of UTF-8 is at most four byte tokens long."""
BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What bytes that are no character, or not yet, are decoded to."""
LONGEST_BROKEN = 16
"""Tokens held back at most while no whole character appears; broken bytes are given out after that.
"""


class TextStream:
    """Text of a growing response; holds back incomplete characters and what may become a stop
    string.

    Only a window of ids is decoded at a time: those of the last text given out, for what depends on
    them (spaces, bytes of one character), and those after it. Where texts add up nothing depends on
    them once a character is whole, and every id is decoded once.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: tuple[str, ...],
        *,
        adds_up: bool = False,
        names: TokenNames | None = None,
    ) -> None:
        """adds_up: the text of ids is that of their parts, wherever the cut lies between two whole
        characters. names: of the tokens inside whose names no stop string counts.
        """
        self._token_names = names
        self._names: frozenset[str] = frozenset()  # of the tokens that came
        self._decode = decode
        self._stop = stop
        self._adds_up = adds_up
        self._window: list[int] = []
        self._known = 0  # ids of the window whose text is known
        self._held = ""

    def push(self, token_ids: Sequence[int], *, early: bool = False) -> str:
        """Text that became certain with these ids. early: a stop string that is whole does not end
        the response yet.
        """
        self._window += token_ids
        news = self._whole() or self._advance(final=False)
        if not self._stop:
            return news
        if self._token_names is not None:
            self._names |= self._token_names.among(token_ids)
        self._held += news
        overlap = _beginning if early else _overlap
        keep = max((overlap(self._held, stop, self._names) for stop in self._stop), default=0)
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return text

    def finish(self, matched_stop: str = "", *, keep: bool = False) -> str:
        """What `push` held back, cut before the stop string that ended the response; keep: behind
        it.
        """
        text, self._held = self._held + self._advance(final=True), ""
        if not matched_stop:
            return text
        at = find_stop(text, matched_stop, self._names)
        if at < 0:  # the engine's tokens spell a name that is no token there
            at = text.rfind(matched_stop)
        return text if at < 0 else text[: at + len(matched_stop) * keep]

    def _whole(self) -> str:
        """Text of all ids where nothing depends on others and all characters are whole, as nearly
        always; else empty.
        """
        if not self._adds_up or self._known:
            return ""
        text = self._decode(self._window)
        if text.endswith(BROKEN):
            return ""
        self._window = []
        return text

    def _advance(self, *, final: bool) -> str:
        """Text of the ids up to the last whole character; of all ids when final or when none is in
        sight.
        """
        before = self._decode(self._window[: self._known]) if self._known else ""
        pending = len(self._window) - self._known
        for left_out in range(min(pending, CHARACTER_BYTES)):
            size = len(self._window) - left_out
            after = self._decode(self._window[:size])
            if after.startswith(before) and not after.endswith(BROKEN):
                rest = self._give(size, after[len(before) :], whole=self._adds_up)
                return rest + self._advance(final=True) if final and left_out else rest
        if final or pending > LONGEST_BROKEN:
            return self._give(len(self._window), self._decode(self._window[self._known :]))
        return ""

    def _give(self, size: int, text: str, *, whole: bool = False) -> str:
        """Ids below `size` have had their text given out; only the newest of them stay, as
        context. whole: none, for nothing depends on them.
        """
        gone = size if whole else self._known
        self._window, self._known = self._window[gone:], size - gone
        return text


def _overlap(text: str, stop: str, names: Collection[str]) -> int:
    """Characters at the end of `text` to hold back: from a whole `stop` inside, or a beginning of
    one at the end.
    """
    at = find_stop(text, stop, names)
    return len(text) - at if at >= 0 else _beginning(text, stop, names)


def _beginning(text: str, stop: str, names: Collection[str]) -> int:
    """Characters at the end of `text` that a stop string begins with, but for a whole one."""
    sizes = [
        size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])
    ]
    spans = name_spans(text, names) if sizes else []
    return next((size for size in sizes if not is_inside(len(text) - size, spans)), 0)
