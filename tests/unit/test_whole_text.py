"""Text that UTF-8 cannot spell goes no further."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidInput, is_whole, whole_text


@given(st.text(st.characters()))
def test_mended_text_can_be_spelled_and_whole_text_stays_itself(text: str) -> None:
    mended = whole_text(text)
    mended.encode()
    assert (len(mended), is_whole(mended)) == (len(text), True)
    assert (mended is text) == is_whole(text)


def test_an_error_about_half_a_character_can_be_sent_and_logged() -> None:
    error = InvalidInput("cut \ud83d", seen="\ud83d", allowed="no \udc00").within("\ud83d")
    assert str(error) == "\ufffd: cut \ufffd; seen: \ufffd; allowed: no \ufffd"
