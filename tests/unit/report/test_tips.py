"""The tips of a value under the pointer and the finger, in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import CHROMIUM, Tab

from paceline.report.html import content, read_asset, render
from paceline.report.journal import RunHistory
from paceline.report.samples import ShownSample
from paceline.report.summary import summarize
from paceline.streams import LedgerCount

REWARD = "document.querySelector('svg.chart .hover:nth-last-of-type(5)')"
BAR = "document.querySelector('svg.wide .c2')"
TOKEN = "document.querySelector('.said [title]')"


@pytest.fixture
def tab(tmp_path: Path, history: RunHistory) -> Iterator[Tab]:
    """The report of the made-up run, all of it in view."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    parts = (("s1", "-0.25 off", "4"), ("s1 accepted", "-0.50 ngram:4_1_5", "2"))
    sample = ShownSample("gcd-1", 3, 3, 1.0, "69:25=", parts)
    summary = summarize("demo-0-1", history, LedgerCount(0, 0, {}, 0, 0), {}, {})
    page = tmp_path / "report.html"
    page.write_text(render("run", content(summary, history, [sample])))
    with Tab(tmp_path / "profile", 390, 24_000) as found:
        found.ask("Emulation.setTouchEmulationEnabled", enabled=True)
        found.open(page.as_uri(), "document.querySelector('.tip')")
        yield found


def middle(tab: Tab, element: str) -> list[float]:
    box = f"(({element}).getBoundingClientRect())"
    place: list[float] = tab.value(f"[{box}.x + {box}.width / 2, {box}.y + {box}.height / 2]")
    return place


def told(tab: Tab, place: list[float], by: str) -> str:
    """Return the tip at a place under finger or pointer; it must not be empty."""
    at = dict(zip("xy", place, strict=True))
    if by == "finger":
        tab.ask("Input.dispatchTouchEvent", type="touchStart", touchPoints=[at])
        tab.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    else:
        tab.ask("Input.dispatchMouseEvent", type="mouseMoved", **at)
    tip = "document.querySelector('.tip')"
    said: str = tab.value(f"{tip}.hidden ? '' : {tip}.textContent")
    box = json.loads(tab.value(f"JSON.stringify({tip}.getBoundingClientRect())"))
    assert not said or (box["left"] >= 0 and box["right"] <= 390), box
    return said


@pytest.mark.parametrize("by", ["finger", "pointer"])
def test_a_value_of_a_chart_a_bar_of_the_slots_and_a_token_are_told(tab: Tab, by: str) -> None:
    title = tab.value(f"{REWARD}.querySelector('title').textContent")
    assert re.match(r"RL step \d+\nreward", title)
    assert told(tab, middle(tab, REWARD), by) == title
    # The browser shows no tooltip of its own.
    assert tab.value(f"{REWARD}.querySelector('title')") is None
    assert told(tab, middle(tab, REWARD), by) == title
    bar = told(tab, middle(tab, BAR), by)
    assert bar == "slot 0: drafter training, 750 ms, step 1"
    assert told(tab, middle(tab, TOKEN), by) == "-0.25 off"
    assert told(tab, middle(tab, "document.querySelector('h1')"), by) == ""
    # A part of a tile has the meaning of its tile.
    assert told(tab, middle(tab, "document.querySelector('.tile b')"), by).startswith("Share of")
    assert told(tab, middle(tab, "document.querySelector('h2')"), by).startswith("Whether the")


def test_the_script_is_a_few_kilobytes() -> None:
    assert len(read_asset("tips.js").encode()) < 4_000
