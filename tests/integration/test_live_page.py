"""The live page of a real run, as a browser requests it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from demo_runs import SMALL, demo, wait_for

from paceline.local.patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = "12"
"""Enough steps for the page to begin during the run, also on a machine that stalls for seconds."""


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
            state = until_finished(browser)
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


def until_finished(browser: httpx.Client) -> dict[str, Any]:
    """The first state of an ended run. Its drawing follows the state."""
    figures: set[str] = set()
    deadline = time.monotonic() + patient(300)
    while time.monotonic() < deadline:
        state: dict[str, Any] = browser.get("/state").json()
        if state["phase"] == "finished" and state["drawings"]:
            assert figures >= {"serving", "promoted", "policy_trainer"}
            return state
        figures |= set(browser.get("/figures").json())
        time.sleep(0.1)
    pytest.fail("the page never showed the end of the run")
