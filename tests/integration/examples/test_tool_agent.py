"""Runs examples/tool_agent as its README does."""

from __future__ import annotations

import pytest
from example_runs import Serve, run_example


@pytest.mark.slow
def test_tools_are_called_and_both_runs_are_scored_and_exported_with_their_masks(
    serve: Serve,
) -> None:
    done = run_example("tool_agent/agent.py", "--url", serve("tool_agent"))
    assert done.returncode == 0, done.stdout + done.stderr
    right, wrong = done.stdout.splitlines()
    assert right.startswith(
        "1  240 bolts at 0.35 each are worth 84.00.  (asked for stock of bolts, price of bolts;"
    )
    assert wrong.startswith("0  240 bolts at 0.35 each are worth 8.40.")
    assert right.endswith("tokens are trained)")
