"""examples/frameworks as its README runs it: one agent in three frameworks, where installed."""

from __future__ import annotations

import importlib.util

import pytest
from example_runs import Serve, run_example

RIGHT = "1  240 bolts at 0.35 each are worth 84.00."


@pytest.mark.parametrize(
    ("framework", "script", "turns"),
    [
        ("agents", "openai_agents_agent", "3 turns in 1 branches"),
        ("langgraph", "langgraph_agent", "3 turns in 1 branches"),
        ("smolagents", "smolagents_agent", "3 turns in 3 branches"),
    ],
)
def test_the_agents_run_is_a_session_of_what_its_model_said(
    serve: Serve, framework: str, script: str, turns: str
) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install 'paceline[examples]'")
    done = run_example(f"frameworks/{script}.py", "--url", serve("frameworks"))
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{RIGHT}  ({turns};"), line
