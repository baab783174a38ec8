"""The live page of a real run in a real browser, on a desk and on a phone."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import CHROMIUM, Tab
from demo_runs import SMALL, demo, wait_for

from paceline.local.patience import patient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]
DRAWN = (
    "document.querySelector('#queues b') && document.querySelector('details .said')"
    " && document.getElementById('state').textContent.startsWith('step')"
)
WAITS = r"No step has ended yet: (no answer of the coordinator since [\d:]+, at .*|coordinator.*)"
LARGEST_BYTES, LONGEST_MS = 400_000, 5_000.0


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_charts_queues_versions_the_audit_and_samples_while_a_run_goes_on(
    tmp_path: Path, width: int
) -> None:
    run = demo(tmp_path, "--steps", "40", *SMALL, "policy_trainer.audit.share=1.0")
    page = None
    try:
        wait_for(run, "run demo-0-1")
        page = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli.main", "page", str(tmp_path / "demo-0-1")],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert page.stderr is not None
        printed = re.search(r"http://[^;]+", page.stderr.readline())
        assert printed is not None
        with Tab(tmp_path / "profile", width) as tab:
            tab.open(printed.group(), "document.getElementById('waits')?.textContent")
            waits = tab.value("document.getElementById('waits').textContent")
            assert re.fullmatch(WAITS, waits), waits
            tab.screenshot(tmp_path / f"waiting-{width}.png")
            wait_for(run, "step 2/40")
            tab.open(printed.group(), DRAWN)
            check(tab, width)
            tab.screenshot(tmp_path / f"page-{width}.png")
    finally:
        for process in (page, run):
            if process is not None:
                process.send_signal(signal.SIGINT)
        for process in (page, run):
            if process is not None:
                process.communicate(timeout=patient(60))


def check(tab: Tab, width: int) -> None:
    state = tab.value("document.getElementById('state').textContent")
    assert re.match(r"step \d+ of 40  ·  .*slot 0: \w+", state), state
    queues = tab.value("document.getElementById('queues').innerText")
    titles = tab.value("[...document.querySelectorAll('h2')].map((one) => one.textContent)")
    assert titles[0] == "Reward and held-out accuracy"
    assert "Samples" in titles[1:3]
    assert tab.value("document.querySelectorAll('.first details[open] .s0, .s1').length") > 0
    assert tab.value("document.getElementById('waits').textContent") == ""
    assert tab.value("[...document.querySelectorAll('#queues span')].every((one) => one.title)")
    for name in ("serving", "promoted", "policy trainer"):
        assert name in queues
    assert re.search(r"serving p\d+\.d\d+", queues), queues
    for title in (
        *("Reward and held-out accuracy", "Exactness audit", "Exactness audit by path"),
        *("Acceptance by arm", "Acceptance by drafter version and arm"),
        *("The drafter's gate", "Samples"),
    ):
        assert title in titles
    assert tab.value("document.querySelectorAll('svg.chart').length") > 20
    assert tab.value("document.querySelectorAll('.said .accepted').length") > 0
    assert tab.value("document.querySelectorAll('.bad-row').length") == 0
    assert tab.value("document.querySelectorAll('.tip[hidden]').length") == 1
    # Only the contents of scrolling cards are wider than the page.
    assert tab.value("document.documentElement.scrollWidth") <= width
    loads = tab.value(
        "performance.getEntries().filter((one) => one.responseEnd).map("
        "(one) => [one.name.split('/').pop(), one.transferSize, one.duration])"
    )
    assert sum(size for _, size, _ in loads) < LARGEST_BYTES, loads
    navigation = tab.value("performance.getEntriesByType('navigation')[0].domComplete")
    assert navigation < patient(LONGEST_MS)
    print("loads", loads, "complete after ms", navigation)
