"""Legends of the pictures in README and docs: no name runs under the next swatch."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from doc_pages import ROOT

from benchmarks.picture import picture, text_width
from paceline.report.charts import Series

PICTURES = sorted((ROOT / "docs").glob("*.svg"))
SIZES = {"tick": 11, "s": 12}
"""Pixels of the text classes."""
ENTRY = re.compile(
    r'<rect class="[^"]+" x="([\d.]+)" y="([\d.]+)" width="(9|14)" height="\3" rx="2"/>\s*'
    r'<text class="(tick|s)" x="([\d.]+)" y="[\d.]+">([^<]*)</text>'
)


class Entry(NamedTuple):
    """A swatch and its name."""

    left: float
    top: float
    text: float
    right: float
    name: str


def legend(drawing: str) -> list[Entry]:
    """The entries of a picture's legend, in its order."""
    return [
        Entry(float(x), float(y), float(at), float(at) + text_width(name, SIZES[kind]), name)
        for x, y, _, kind, at, name in ENTRY.findall(drawing)
    ]


def check_apart(drawing: str) -> list[Entry]:
    """Fails where a name runs under the next swatch, out of the picture or under its own swatch."""
    entries = legend(drawing)
    found = re.search(r'viewBox="0 0 (\d+) (\d+)"', drawing)
    assert found
    for one in entries:
        assert one.left + 9 < one.text < one.right < float(found[1]), one
    for one, following in pairwise(entries):
        assert one.top < following.top or one.right < following.left, (one, following)
    return entries


def series(names: list[str]) -> list[Series]:
    points = [(float(x), float(x)) for x in range(4)]
    return [Series(name, points, f"c{i % 8}") for i, name in enumerate(names)]


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_no_name_runs_under_the_next_swatch_in_a_picture_of_the_docs(path: Path) -> None:
    assert len(check_apart(path.read_text(encoding="utf-8"))) >= 2


@pytest.mark.parametrize(
    "names",
    [
        ["none", "ngram", "cotrained"],
        ["WWWWWWWWWWWWWWWW", "MMMMMMMMMMMM", "@@@@@@@@@@@"],
        [f"decoupled, eta {n}, with a name of many words, seed {n}" for n in range(8)],
        ["Größe", "一二三四五六七八九十", "three"],
    ],
    ids=["short", "wide", "long", "other scripts"],
)
def test_entries_of_long_names_go_to_further_rows_above_the_plot(names: list[str]) -> None:
    drawn = picture(series(names), "reward")
    entries = check_apart(drawn)
    assert [one.name for one in entries] == names
    shift = re.search(r'<g transform="translate\(0 (\d+)\)">', drawn)
    assert shift
    assert max(one.top for one in entries) + 9 < float(shift[1])
    assert min(one.top for one in entries) == 8


def test_series_of_one_name_have_one_entry() -> None:
    assert len(legend(picture(series(["a"])[:1] * 2, "reward"))) == 1
