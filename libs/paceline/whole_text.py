"""Finds and mends text that UTF-8 cannot spell: it holds half of a surrogate pair, which an escape
of JSON can bring.
"""

from __future__ import annotations

import re

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""In a Python text every surrogate is a lone one: a pair is one character."""


def whole_text(text: str) -> str:
    """The text itself where UTF-8 can spell it, else with U+FFFD for each half of a pair."""
    return text if is_whole(text) else LONE_SURROGATE.sub("\ufffd", text)


def is_whole(text: str) -> bool:
    """Whether UTF-8 can spell the text."""
    return text.isascii() or LONE_SURROGATE.search(text) is None
