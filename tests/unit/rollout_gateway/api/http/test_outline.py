"""The values of a JSON body are counted as its bytes arrive, for any texts in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.api.http.requests import LEAST_VALUES, MAX_OBJECTS, Outline

VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a",{[\\]}:\u00e9 '),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\{,'), inner, max_size=4)
    ),
)


def counted(value: Any) -> tuple[int, int]:
    """(objects, values) as an outline counts: an empty list counts one, commas count the rest."""
    if isinstance(value, dict | list):
        inner = list(value.values()) if isinstance(value, dict) else value
        pairs = [counted(one) for one in inner]
        objects = isinstance(value, dict) + sum(one for one, _ in pairs)
        return objects, 1 + max(len(inner) - 1, 0) + sum(other for _, other in pairs)
    return 0, 0


@given(value=VALUES, ascii_only=st.booleans(), data=st.data())
def test_texts_do_not_count_wherever_the_bytes_are_cut(
    value: Any, ascii_only: bool, data: st.DataObject
) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    outline, start = Outline(0), 0
    while start < len(raw):
        size = data.draw(st.integers(1, len(raw)))
        outline.add(raw[start : start + size])
        start += size
    assert (outline._objects, outline._values) == counted(value)


def test_too_many_values_are_refused_while_they_come() -> None:
    outline = Outline(100)
    outline.add(b'{"prompt":[' + b"1," * (LEAST_VALUES + 198))
    with pytest.raises(InvalidInput, match="too many values") as caught:
        outline.add(b"1,")
    assert caught.value.reason == "BODY_TOO_LARGE"
    with pytest.raises(InvalidInput, match="too many objects"):
        Outline(10**6).add(b"{" * (MAX_OBJECTS + 1))


def test_a_text_of_any_length_is_one_value() -> None:
    outline = Outline(0)
    outline.add(b'{"prompt":"')
    for _ in range(100):
        outline.add(b',{[\\"' * 10_000)
    outline.add(b'"}')
    assert (outline._objects, outline._values) == (1, 1)
