"""A trace that begins in an agent, over a real OTLP receiver. The test follows it from the agent's
call to the optimiser step, and to the drafter's step that learned from it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from example_runs import background, run_example, until_it_serves
from integration.examples.test_openai_agent import FILES, own_places
from otlp_receiver import OtlpReceiver, ReceivedSpan, receiving

from paceline.local.patience import patient
from paceline.local.ports import free_ports
from paceline.telemetry import names

STEPS, TASKS, SAMPLES = 2, 4, 4
# A rank of the policy trainer ends without a last export.
OFTEN = {
    "OTEL_BSP_SCHEDULE_DELAY": "200",
    "OTEL_BLRP_SCHEDULE_DELAY": "200",
    "OTEL_METRIC_EXPORT_INTERVAL": "500",
}
SERVICES = {"coordinator", "gateway", "policy_trainer", "drafter_trainer"}


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtlpReceiver]:
    """Telemetry that agent and services of a finished run have sent."""
    tmp_path = tmp_path_factory.mktemp("traced")
    with receiving() as receiver, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        for often, ms in OFTEN.items():
            environment.setenv(often, ms)
        ports, log = free_ports(8), tmp_path / "up.log"
        url = f"http://127.0.0.1:{ports[2]}"
        words = [
            *own_places(tmp_path, ports),
            f"coordinator.steps={STEPS}",
            f"coordinator.prompts_per_step={TASKS}",
            f"coordinator.samples_per_task={SAMPLES}",
            "coordinator.evaluation.heldout_prompts=4",
            "coordinator.evaluation.probe_prompts=4",
        ]
        with background("up", *FILES, *words, log=log) as process:
            until_it_serves(url, process, log)
            agent = ("openai_agent/agent.py", "--url", url, "--patience", "30")
            done = run_example(*agent, timeout_s=400)
            assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
            assert process.wait(timeout=patient(60)) == 0, log.read_text()
        yield receiver


class Walk:
    """Spans by their links and by their parents."""

    def __init__(self, spans: list[ReceivedSpan]) -> None:
        self.by_id = {one.span_id: one for one in spans}
        self.linking: dict[str, list[ReceivedSpan]] = {}
        self.below: dict[str, list[ReceivedSpan]] = {}
        for one in spans:
            self.below.setdefault(one.parent_id, []).append(one)
            for link in one.links:
                self.linking.setdefault(link, []).append(one)

    def above(self, span: ReceivedSpan) -> Iterator[ReceivedSpan]:
        """The span and its parents, up to the root."""
        found: ReceivedSpan | None = span
        while found is not None:
            yield found
            found = self.by_id.get(found.parent_id)

    def under(self, span: ReceivedSpan) -> Iterator[ReceivedSpan]:
        """The span and all below it."""
        yield span
        for one in self.below.get(span.span_id, ()):
            yield from self.under(one)

    def links_to(self, span: ReceivedSpan, name: str) -> list[ReceivedSpan]:
        """Spans of a name that link it."""
        return [one for one in self.linking.get(span.span_id, ()) if one.name == name]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_links_lead_from_the_agents_call_to_both_optimisers(received: OtlpReceiver) -> None:
    walk = Walk(received.spans)
    agents = [one for one in received.named("invoke_agent") if one.service == "agent"]
    attempts = [
        (agent, session)
        for agent in agents
        for session in walk.under(agent)
        if session.name == names.AGENT_SESSION
    ]
    assert len(attempts) == STEPS * TASKS * SAMPLES
    steps, drafted = set(), 0
    for agent, session in attempts:
        # down: the agent's call, the gateway's request, the engine's stages
        asked = [one for one in walk.under(agent) if one.name == names.ENGINE_REQUEST]
        assert [walk.by_id[link] for one in asked for link in one.links] == [session] * len(asked)
        for one in asked:
            stages = {below.name for below in walk.under(one)}
            assert {"engine.prefill", "engine.decode"} <= stages
            assert one.attributes[names.GEN_AI_CONVERSATION] == session.attributes[names.SESSION_ID]
        # along: the session's append, which the optimiser step links
        (append,) = walk.links_to(session, names.TRAJECTORY_APPEND)
        (optimised,) = walk.links_to(append, names.OPTIMIZER_STEP)
        (step,) = [one for one in walk.above(optimised) if one.name == names.STEP]
        assert (optimised.service, step.service) == ("policy_trainer", "coordinator")
        assert step.trace_id == append.trace_id != agent.trace_id
        assert optimised.attributes[names.RL_STEP] == step.attributes[names.RL_STEP]
        steps.add(step.attributes[names.RL_STEP])
        # along: the rows of the session, which the drafter's step links
        for one in asked:
            learned = walk.links_to(one, names.DRAFTER_MICRO_STEP)
            assert not learned or walk.links_to(one, names.FEATURES_PUBLISH)
            drafted += bool(learned)
            for micro in learned:
                above = [one.name for one in walk.above(micro)]
                assert above[1] == names.DRAFTER_ACTIVATE
                assert above[-1] == names.STEP
    assert steps == set(range(STEPS))
    assert drafted > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_service_sends_spans_and_metrics_and_those_that_log_in_a_quiet_run_their_logs(
    received: OtlpReceiver,
) -> None:
    assert {one.service for one in received.spans} == SERVICES | {"agent"}
    assert set(received.metrics) >= SERVICES
    quiet = {"drafter_trainer"}  # it logs faults alone
    assert {one.service for one in received.logs} >= SERVICES - quiet
