"""Tagged JSON: every value decodes as it was encoded, and any other object is rejected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataLoss
from paceline.tagged_json import TaggedJson, from_object, to_object


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(Enum):
    LOW = 0
    HIGH = 1


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    label: str | None


@dataclass(frozen=True, slots=True)
class Everything:
    flag: bool
    count: int
    ratio: float
    text: str
    nothing: None
    colour: Colour
    level: Level
    point: Point
    perhaps: Point | None
    points: tuple[Point, ...]
    names: list[str]
    pair: tuple[str, int]
    pairs: list[tuple[str, int]]
    colours: frozenset[Colour]
    by_name: dict[str, Point]
    figures: Mapping[
        str, float | int | str | Mapping[str, float] | tuple[int, ...] | tuple[float, ...] | None
    ] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bare:
    pass


CODEC = TaggedJson[Everything | Bare](Everything, Bare)
FIGURES = st.one_of(
    st.floats(),
    st.integers(),
    st.text(),
    st.dictionaries(st.text(), st.floats()),
    st.lists(st.integers()).map(tuple),
    st.lists(st.floats()).map(tuple),
    st.none(),
)
VALUES = st.builds(
    Everything,
    colours=st.frozensets(st.sampled_from(Colour), max_size=1),  # repr leaves their order open
    figures=st.dictionaries(st.text(), FIGURES),
) | st.builds(Bare)
SAMPLE = Everything(
    flag=True,
    count=3,
    ratio=0.5,
    text="é",
    nothing=None,
    colour=Colour.RED,
    level=Level.HIGH,
    point=Point(1, None),
    perhaps=Point(2, "b"),
    points=(Point(3, "c"),),
    names=["d"],
    pair=("e", 4),
    pairs=[("f", 5)],
    colours=frozenset({Colour.BLUE}),
    by_name={"g": Point(6, None)},
    figures={"h": (1, 2), "i": (1.5,), "j": {"k": 1.0}, "l": "m", "n": None},
)


@given(VALUES)
def test_every_value_comes_back_with_the_types_it_had(value: Everything | Bare) -> None:
    # repr: NaN equals itself there, and (1,) differs from [1] and from (1.0,).
    assert repr(CODEC.decode(CODEC.encode(value))) == repr(value)


@given(VALUES)
def test_the_object_names_its_class_and_its_fields(value: Everything | Bare) -> None:
    found = json.loads(CODEC.encode(value))
    assert found.pop("type") == type(value).__name__
    assert list(found) == list(type(value).__dataclass_fields__)


@pytest.mark.parametrize("name", Everything.__dataclass_fields__)
def test_a_missing_field_is_refused_by_name(name: str) -> None:
    found = json.loads(CODEC.encode(SAMPLE))
    del found[name]
    with pytest.raises(DataLoss, match=rf"Everything lacks fields; seen: {name};"):
        CODEC.decode(json.dumps(found))


@pytest.mark.parametrize("nested", [(), ("point",), ("points", 0), ("perhaps",), ("by_name", "g")])
def test_an_extra_field_is_refused_by_name_at_every_depth(nested: tuple[str | int, ...]) -> None:
    found = json.loads(CODEC.encode(SAMPLE))
    inner = found
    for step in nested:
        inner = inner[step]
    inner["more"] = 1
    with pytest.raises(DataLoss, match="not known here; seen: more; allowed: "):
        CODEC.decode(json.dumps(found))


@pytest.mark.parametrize(
    ("name", "wrong", "where"),
    [
        ("flag", 1, "Everything.flag"),
        ("count", True, "Everything.count"),
        ("count", 1.0, "Everything.count"),
        ("ratio", "1", "Everything.ratio"),
        ("ratio", True, "Everything.ratio"),
        ("text", None, "Everything.text"),
        ("nothing", 0, "Everything.nothing"),
        ("colour", "green", "Everything.colour"),
        ("level", True, "Everything.level"),
        ("level", [1], "Everything.level"),
        ("point", None, "Everything.point"),
        ("point", {"x": "1", "label": None}, "Everything.point.x"),
        ("perhaps", {"x": 1, "label": 2}, "Everything.perhaps.label"),
        ("points", {}, "Everything.points"),
        ("points", [{"x": 1, "label": None}, 7], r"Everything.points\[1\]"),
        ("names", "abc", "Everything.names"),
        ("pair", ["e"], "Everything.pair"),
        ("pair", [4, "e"], r"Everything.pair\[0\]"),
        ("pairs", [["f", None]], r"Everything.pairs\[0\]\[1\]"),
        ("colours", ["red", "green"], r"Everything.colours\[1\]"),
        ("colours", "red", "Everything.colours"),
        ("by_name", [], "Everything.by_name"),
        ("by_name", {"g": {"x": None, "label": None}}, "Everything.by_name.g.x"),
        ("figures", {"h": True}, "Everything.figures.h"),
        ("figures", {"h": ["a"]}, "Everything.figures.h"),
    ],
)
def test_a_wrong_type_is_refused_with_the_place_where_it_stands(
    name: str, wrong: object, where: str
) -> None:
    found = json.loads(CODEC.encode(SAMPLE)) | {name: wrong}
    with pytest.raises(DataLoss, match=rf"^{where} (has another type|is not an object); seen: "):
        CODEC.decode(json.dumps(found))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[]", "has no type"),
        (b"{}", "has no type"),
        (b'{"type": 3}', "type of a message is not known here; seen: 3; allowed: Everything, Bare"),
        (b'{"type": "Point", "x": 1, "label": null}', "seen: Point; allowed: Everything, Bare"),
    ],
)
def test_a_message_without_a_known_class_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(DataLoss, match=reason):
        CODEC.decode(data)


def test_an_int_given_for_a_float_is_written_again_as_the_same_bytes() -> None:
    written = CODEC.encode(from_object(Everything, to_object(SAMPLE) | {"ratio": 3}))
    assert b'"ratio":3,' in written
    assert CODEC.encode(CODEC.decode(written)) == written


def test_a_class_that_the_codec_was_not_made_with_is_not_written() -> None:
    with pytest.raises(TypeError, match="Point is not one of Everything, Bare"):
        CODEC.encode(Point(1, None))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Hiding:
    type: str


@dataclass(frozen=True, slots=True)
class Unwritable:
    names: set[str]


@dataclass(frozen=True, slots=True)
class Keyed:
    by_number: dict[int, str]


@pytest.mark.parametrize("cls", [Hiding, Unwritable, Keyed])
def test_a_class_that_json_cannot_carry_is_refused_when_the_codec_is_made(cls: type[Any]) -> None:
    with pytest.raises(TypeError):
        TaggedJson(cls)


@pytest.mark.parametrize("bits", [2048, 40_000])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_of_any_length_comes_back(bits: int, sign: int) -> None:
    number = sign << bits
    value = replace(SAMPLE, count=number, figures={"closed": number})
    assert CODEC.decode(CODEC.encode(value)) == value


def test_a_number_of_2048_bits_is_a_number_of_json() -> None:
    for number in ((1 << 2048) - 1, 0, -5):
        assert to_object(Point(number, None))["x"] == number


@pytest.mark.parametrize("text", ["0x5", "ff", "0x" + "g" * 600, 7, None])
def test_hexadecimal_digits_that_nobody_would_write_are_refused(text: object) -> None:
    with pytest.raises(DataLoss, match=r"Point.x has another type"):
        from_object(Point, {"x": {"hex": text}, "label": None})
