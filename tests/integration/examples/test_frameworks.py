"""Runs examples/frameworks as its README does: one agent in several frameworks, where installed."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_runs import Serve, gateway, run_example
from otlp_receiver import OtlpReceiver, receiving

from paceline.local.patience import patient
from paceline.telemetry import names

pytestmark = pytest.mark.slow

RIGHT = "1  240 bolts at 0.35 each are worth 84.00."
TURNS = 3


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """Telemetry of processes that start after this fixture."""
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield receiver


@pytest.mark.parametrize(
    ("framework", "script", "branches"),
    [
        ("agents", "openai_agents_agent", 1),
        ("langgraph", "langgraph_agent", 1),
        ("pydantic_ai", "pydantic_ai_agent", 1),
        ("mcp", "mcp_agent", 1),
        ("smolagents", "smolagents_agent", 3),
    ],
)
def test_the_agents_run_is_a_session_of_what_its_model_said_in_the_agents_trace(
    received: OtlpReceiver, serve: Serve, framework: str, script: str, branches: int
) -> None:
    require(framework)
    done = run_example(f"frameworks/{script}.py", "--url", serve("frameworks"))
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{RIGHT}  ({TURNS} turns in {branches} branches;"), line
    session_hangs_below_the_agent(received)


def require(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install 'paceline[examples]'")


@pytest.fixture(scope="module")
def real_gateway(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway of the pretrained model, whose template knows no tools."""
    chat = ("gateway.chat.tool_format=hermes", "gateway.chat.tool_prompt=default")
    engine = ("gateway.engine.max_sequence_tokens=8192", "gateway.engine.workers=1")
    engine += ("gateway.engine.max_batch=2", "gateway.engine.embedded.prefix_slots=2")
    folder = tmp_path_factory.mktemp("real")
    with gateway(folder, f"gateway.model={real_model}", *chat, *engine) as url:
        yield url


@pytest.mark.real
@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", ["agents", "langgraph", "mcp", "pydantic_ai", "smolagents"])
def test_an_agents_run_on_a_real_model_is_scored_and_its_tokens_are_trained(
    real_gateway: str, framework: str
) -> None:
    require(framework)
    script = f"frameworks/{'openai_' if framework == 'agents' else ''}{framework}_agent.py"
    done = run_example(script, "--url", real_gateway, timeout_s=patient(500))
    assert done.returncode == 0, done.stdout + done.stderr
    # smolagents prints lines of its own before when the small model forms no valid call.
    found = re.search(
        r"^[01]  .*  \((\d+) turns in (\d+) branches; (\d+) of (\d+) tokens are trained\)\n\Z",
        done.stdout,
        re.DOTALL | re.MULTILINE,
    )
    assert found is not None, done.stdout
    turns, branches, trained, tokens = map(int, found.groups())
    assert turns >= branches >= 1
    assert 0 < trained < tokens


def session_hangs_below_the_agent(received: OtlpReceiver) -> None:
    """The session's opening and each model call are children of the agent's span."""
    whole = {"invoke_agent": 1, names.AGENT_SESSION: 1, names.ENGINE_REQUEST: TURNS}
    arrived = received.until(
        lambda: all(len(received.named(name)) == count for name, count in whole.items()),
        patient(20),
    )
    assert arrived, [one.name for one in received.spans]
    by_id = {one.span_id: one for one in received.spans}
    (agent,) = received.named("invoke_agent")
    (session,) = received.named(names.AGENT_SESSION)
    asked = received.named(names.ENGINE_REQUEST)
    assert agent.service == "agent"
    assert [one.links for one in asked] == [(session.span_id,)] * TURNS
    for one in (session, *asked):
        request = by_id[one.parent_id]
        assert (request.name, request.parent_id) == (names.HTTP_REQUEST, agent.span_id)
