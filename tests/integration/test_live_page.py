"""The live page of a real run, as a browser asks for it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from demo_runs import SMALL, demo, wait_for

from paceline.local.patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = "12"
"""Enough for the page to begin while they go on, on a machine that stands still for seconds too."""


def test_the_page_shows_a_run_that_goes_on_and_outlives_it(tmp_path: Path) -> None:
    run = demo(tmp_path, "--steps", STEPS, *SMALL)
    wait_for(run, "step 1/")
    page = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli.main", "page", str(tmp_path / "demo-0-1")],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert page.stderr is not None
        printed = re.search(r"http://[^;]+", page.stderr.readline())
        assert printed is not None
        address = httpx.URL(printed.group())
        with httpx.Client(base_url=address.join("/"), timeout=patient(30)) as browser:
            opened = browser.get(printed.group(), follow_redirects=True)
            assert opened.status_code == 200
            with browser.stream("GET", "/events") as stream:
                state = until_finished(stream.iter_lines())
            assert (state["phase"], state["complete"]) == ("finished", int(STEPS))
            assert state["slots"]
            assert run.wait(patient(60)) == 0
            drawn = browser.get("/content").text
        for title in ("Run demo-0-1", "Reward and held-out accuracy", "Groups solved", "Slots"):
            assert title in drawn
        page.send_signal(signal.SIGINT)
        assert page.wait(patient(20)) == 130
    finally:
        for process in (page, run):
            process.kill()
            process.communicate()


def until_finished(lines: Iterator[str]) -> dict[str, object]:
    """The first state in which the run has ended."""
    kinds, kind = set(), ""
    for line in lines:
        if line.startswith("event: "):
            kinds.add(kind := line.removeprefix("event: "))
        elif line.startswith("data: ") and kind == "state":
            state: dict[str, object] = json.loads(line.removeprefix("data: "))
            if state["phase"] == "finished":
                assert kinds >= {"content", "state"}
                return state
    pytest.fail("the events ended before the run")
