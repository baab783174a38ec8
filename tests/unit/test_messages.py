"""Every field of a noun survives its message; a missing field is an error."""

from __future__ import annotations

from dataclasses import fields, make_dataclass
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from paceline.messages import (
    from_message,
    to_message,
)
from paceline.trajectory import DrawSpan, SpeculationStats, VersionSet, VersionSpan
from paceline.v1 import trajectory_pb2 as pb

PAIRS: list[tuple[type[Any], type[Message]]] = [
    (VersionSet, pb.VersionSet),
    (VersionSpan, pb.VersionSpan),
    (DrawSpan, pb.DrawSpan),
    (SpeculationStats, pb.SpeculationStats),
]
COUNTS = st.integers(1, 2**31)  # never the default of a field, so that one left out is seen


TEXTS = {"arm", "number_format", "profile"}


def noun_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    """The noun with a value in every field that it has today."""
    return st.builds(
        cls,
        **{
            one.name: st.lists(COUNTS, min_size=1, max_size=3).map(tuple)
            if one.name.endswith("_at")
            else st.dictionaries(st.text(), COUNTS, min_size=1, max_size=3)
            if one.type == "Mapping[str, int]"
            else st.text(min_size=1)
            if one.name in TEXTS
            else st.just(True)
            if one.type == "bool"
            else COUNTS
            for one in fields(cls)
        },
    )


@pytest.mark.parametrize(("cls", "kind"), PAIRS)
@given(data=st.data())
def test_every_field_comes_back_from_the_wire(
    cls: type[Any], kind: type[Message], data: st.DataObject
) -> None:
    noun = data.draw(noun_of(cls))
    message = to_message(noun, kind)
    assert {name.name for name, _ in message.ListFields()} == {one.name for one in fields(cls)}
    assert from_message(cls, kind.FromString(message.SerializeToString())) == noun


@pytest.mark.parametrize(("cls", "kind"), PAIRS)
def test_a_field_that_the_message_lacks_is_an_error(cls: type[Any], kind: type[Message]) -> None:
    more = make_dataclass("More", [("new", int, 0)], bases=(cls,), frozen=True)
    with pytest.raises(KeyError, match="new"):
        to_message(more(*(0 for _ in fields(cls))), kind)
    with pytest.raises(KeyError, match="new"):
        from_message(more, kind())


def test_nothing_is_the_noun_of_an_empty_message() -> None:
    assert from_message(VersionSet, pb.VersionSet()) == VersionSet()
    assert from_message(SpeculationStats, pb.SpeculationStats()) == SpeculationStats()
