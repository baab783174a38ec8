"""The page: self-contained, well formed, complete."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from paceline.report.charts import (
    Bar,
    Series,
    duration,
    line_chart,
    stacked_columns,
    ticks,
    timeline,
)
from paceline.report.figures import CHARTS, OtherRun
from paceline.report.html import content, meaning, render, show_value
from paceline.report.journal import RunHistory
from paceline.report.summary import summarize
from paceline.streams import LedgerCount


class Balance(HTMLParser):
    """Fails at a tag that closes another one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(history: RunHistory, run_id: str = "demo-0-1") -> str:
    ledger = LedgerCount(3840, 3840, {}, 0, 0)
    summary = summarize(run_id, history, ledger, {"gateway": 7}, {})
    return render(run_id, content(summary, history))


def test_the_page_is_well_formed_and_has_every_section(history: RunHistory) -> None:
    text = page(history)
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert parser.seen.count("svg") == 12 + 2  # charts, timelines
    for title in (
        "Reward and held-out accuracy",
        "Parts of the reward",
        "Acceptance length",
        "Acceptance by arm",
        "Acceptance by drafter version and arm",
        "Arms chosen",
        "Slots",
        "Counts",
    ):
        assert title in text


def test_each_figure_has_its_meaning_as_a_title(history: RunHistory) -> None:
    text = page(history)
    without = [
        *re.findall(r'<h2 title="">([^<]+)', text),
        *re.findall(r'<div class="tile[^>]*title=""><b>.*?<span>([^<]+)', text),
        *re.findall(r'<tr title=""><td>([^<]+)', text),
        *(one.title for one in CHARTS if not meaning(one.title)),
    ]
    assert without == []
    assert meaning("worker 12") == meaning("worker") != ""


def test_the_page_begins_with_the_reward_and_the_samples(history: RunHistory) -> None:
    titles = re.findall(r"<h2[^>]*>([^<]+)", page(history))
    assert titles[:3] == ["Reward and held-out accuracy", "Parts of the reward", "Samples"]
    assert titles.count("Samples") == 1


def test_another_run_is_dashed_beside_this_one_with_the_settings_that_differ(
    history: RunHistory,
) -> None:
    shorter = replace(history, records=history.records[:4])
    other = OtherRun("<other>", shorter, [("policy_trainer.optimizer.lr", "1e-05", "default")])
    summary = summarize("demo-0-1", history, LedgerCount(0, 0, {}, 0, 0), {}, {})
    text = content(summary, history, (), other)
    alone = content(summary, history)
    assert "Settings that differ" in text
    assert "Settings that differ" not in alone
    assert "<td>policy_trainer.optimizer.lr</td><td>1e-05</td><td>default</td>" in text
    assert "reward of &lt;other&gt;" in text
    assert '<path class="line c0 other" d="M' in text
    assert "c0 other" not in alone
    assert text.count("<svg") == alone.count("<svg")


def test_the_page_loads_nothing(history: RunHistory) -> None:
    text = page(history)
    assert not re.search(r"https?://|src=|href=|@import|url\(|<link|fetch|import\(|Request", text)


def test_text_of_the_run_cannot_become_markup(history: RunHistory) -> None:
    history.records[0].arm_drafted_rounds["<script>x</script>"] = 1
    text = page(history, run_id="<i>run</i>")
    assert text.count("<script>") == 1  # the page's own
    assert "<td>&lt;script&gt;x" in text
    assert "<i>run" not in text


def test_a_run_that_measured_nothing_still_has_a_page(history: RunHistory) -> None:
    bare = RunHistory(served=history.served[:1], began_s=5.0, ended_s=6.0, phase="evaluate")
    summary = summarize("demo-0-1", bare, LedgerCount(0, 0, {}, 0, 0), {}, {})
    text = content(summary, bare)
    assert "Not measured in this run: Reward and held-out accuracy; " in text
    assert "<svg" not in text


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.0, 4.7), (-2.0, 9000.0), (1e-6, 2e-6)])
def test_ticks_are_round_and_within(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 3 <= len(found) <= 11
    assert low - 1e-9 <= found[0] < found[-1] <= high + 1e-9
    steps = {float(f"{b - a:.6g}") for a, b in pairwise(found)}
    assert len(steps) == 1
    assert f"{steps.pop():e}"[0] in "125"


def test_a_line_spans_its_frame_and_breaks_at_a_gap() -> None:
    drawn = line_chart(
        [Series("x", [(0, 0.0), (1, 1.0), (2, float("nan")), (3, 0.5)], "c0")],
        y_label="y",
    )
    path = re.search(r'class="line c0" d="([^"]+)"', drawn)
    assert path is not None
    assert path.group(1) == "M46.0 176.0L213.3 19.4M548.0 97.7"
    assert '<circle class="dot c0" cx="548.0" cy="97.7"' in drawn, (
        "a measurement between two gaps would not be seen otherwise"
    )


def test_a_line_of_zeros_lies_on_the_axis() -> None:
    drawn = line_chart([Series("x", [(1, 0.0), (2, 0.0), (3, 0.0)], "c0")], y_label="y")
    assert 'd="M46.0 176.0L297.0 176.0L548.0 176.0"' in drawn


def test_columns_add_up_to_the_height_of_the_whole() -> None:
    drawn = stacked_columns(
        [Series("a", [(1.0, 0.25)], "c0"), Series("b", [(1.0, 0.75)], "c1")], y_label="y"
    )
    tops = [float(y) for y in re.findall(r"M[\d.]+ ([\d.]+)h", drawn)]
    bottoms = [float(y) for y in re.findall(r"V([\d.]+)h", drawn)]
    assert bottoms[0] == 176.0
    assert tops[0] == bottoms[1]
    assert (176.0 - tops[0]) / (176.0 - tops[1]) == pytest.approx(0.25, abs=0.002)


def test_a_timeline_cuts_bars_at_its_window() -> None:
    bars = [Bar(0, 0.0, 10.0, "c0"), Bar(1, 20.0, 30.0, "c1")]
    drawn = timeline(["a", "b"], bars, 5.0, 15.0, "slots")
    widths = [
        float(w) for w in re.findall(r'<path class="fill c\d" d="M[\d.]+ \d+h([\d.]+)v', drawn)
    ]
    assert widths == [pytest.approx((1140 - 62 - 12) / 2)]


def test_each_bar_has_its_title_and_very_many_bars_of_a_colour_are_one_path() -> None:
    few = [Bar(0, at, at + 1.0, "c0", f"bar <{at}>") for at in range(50)]
    assert "<title>bar &lt;7&gt;</title>" in timeline(["a"], few, 0.0, 50.0, "slots")
    many = [Bar(0, at, at + 1.0, "c0", f"bar {at}") for at in range(2001)]
    assert timeline(["a"], many, 0.0, 2001.0, "slots").count("<title>") == 1


def test_a_value_of_the_summary_is_shown_as_text() -> None:
    assert show_value({"too_few": 1.5, "commit": 0.0}) == "too few 1.5"
    assert [show_value(one) for one in (None, {}, 1234)] == ["not measured", "none", "1,234"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00042, "0.42 ms"), (0.0183, "18 ms"), (1.25, "1.25 s"), (185.0, "3 min 5 s")],
)
def test_durations_have_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
