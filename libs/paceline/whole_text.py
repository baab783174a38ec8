"""Finds and repairs text that UTF-8 cannot encode.

Such text holds half of a surrogate pair, for example from a JSON escape.
"""

import re

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""A surrogate in a Python string is always unpaired, because a pair is one character."""


def whole_text(text: str) -> str:
    """The text, with U+FFFD in place of each unpaired surrogate."""
    return text if is_whole(text) else LONE_SURROGATE.sub("\ufffd", text)


def is_whole(text: str) -> bool:
    """Whether UTF-8 can encode the text."""
    return text.isascii() or LONE_SURROGATE.search(text) is None
