"""JSON is recognised exactly where the standard library does so, and is emitted as written."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest
from drawn_cases import case_count
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.services.rollout_gateway.chat.tool_formats.base import (
    DEEPEST,
    Deviation,
    GrowingText,
    Reading,
    decode_json,
    json_members,
    json_object,
)


def no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def taken(reading: Reading[Any], text: GrowingText, whole: str) -> Any:
    """Return a reader's result for a whole text; None when the text deviates or is incomplete."""
    text.push(whole)
    text.ended = True
    try:
        next(reading)
    except Deviation:
        return None
    except StopIteration as end:
        return end.value if text.forget() == whole else None
    raise AssertionError("waits for text after the end")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=case_count(300), deadline=None)
@given(JSON, st.booleans(), st.sampled_from([None, 0, 1]))
def test_json_is_taken_whole_and_unchanged(
    value: Any, ascii_only: bool, indent: int | None
) -> None:
    written = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    decode_json(written)
    text = GrowingText()
    assert taken(json_object(text), text, written) == (written if isinstance(value, dict) else None)
    if isinstance(value, dict):
        members = json_members(written)
        assert {key: json.loads(member) for key, member in members.items()} == value


@settings(max_examples=case_count(600), deadline=None)
@given(JSON, st.data())
def test_a_damaged_json_text_is_taken_just_when_it_still_is_json(
    value: Any, data: st.DataObject
) -> None:
    written = json.dumps(value)
    at = data.draw(st.integers(0, len(written)))
    cut = data.draw(st.integers(0, 2))
    put = data.draw(st.text('"\\{}[]:, \n019.-+eEtrufalsn/x\x01é', max_size=2))
    damaged = (written[:at] + put + written[at + cut :]).strip(" \t\r\n")
    try:
        json.loads(damaged, parse_constant=no_constant)
    except ValueError:
        valid = False
    else:
        valid = True
    with nullcontext() if valid else pytest.raises(Deviation):
        decode_json(damaged)
    text = GrowingText()
    valid = valid and damaged.startswith("{")
    assert taken(json_object(text), text, damaged) == (damaged if valid else None)


def test_json_may_be_nested_up_to_a_limit_that_recursive_readers_stand() -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        for depth, allowed in ((DEEPEST, True), (DEEPEST + 1, False)):
            written = opening * depth + ("1" if opening != "[" else "") + closing * depth
            with nullcontext() if allowed else pytest.raises(Deviation):
                decode_json(written)
            if opening != "[":
                text = GrowingText()
                assert taken(json_object(text), text, written) == (written if allowed else None)
