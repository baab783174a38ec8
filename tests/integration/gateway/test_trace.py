"""One trace follows a request from the caller's header into the engine: streamed or not, abandoned
or read to its end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.gateway.http_agent import SLOW, Agent, opened, task_run, until_running, user

from paceline import telemetry
from paceline.config import TelemetryConfig
from paceline.local.patience import patient
from paceline.telemetry import names
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
BODY = {"messages": [user("2+2=")], "max_tokens": 400, "n": 1}


@pytest.fixture
def spans_dir(tmp_path: Path) -> Iterator[Path]:
    telemetry.setup("gateway", TelemetryConfig(spans_dir=str(tmp_path / "spans")))
    yield tmp_path / "spans"
    telemetry.shutdown()


def spans_of(directory: Path, *traces: str) -> list[dict[str, Any]]:
    """All spans of the given traces, by default of the caller's trace; "" matches any trace. Ends
    telemetry, so that all spans are written.
    """
    telemetry.shutdown()
    lines = [
        line for path in directory.glob("gateway-*.jsonl") for line in path.read_text().splitlines()
    ]
    wanted = traces or (TRACE,)
    return [one for one in map(json.loads, lines) if "" in wanted or one["trace_id"] in wanted]


@pytest.mark.few(2)
@pytest.mark.parametrize(("stream", "choices"), [(False, 1), (True, 1), (False, 2), (True, 2)])
async def test_http_and_engine_spans_hang_below_the_callers(
    serve_gateway: Any, spans_dir: Path, stream: bool, choices: int
) -> None:
    async with serve_gateway() as served:
        agent = await opened(served)
        body = {**BODY, "stream": stream, "n": choices}
        answer = await served.http.post(
            "/v1/chat/completions", json=body, headers={**agent.headers, **HEADER}
        )
        assert answer.status_code == 200
    spans = spans_of(spans_dir)
    (outer,) = [span for span in spans if span["name"] == "http.request"]
    inner = [span for span in spans if span["name"] == "engine.request"]
    assert outer["parent_id"] == PARENT
    assert outer["attributes"]["http.route"] == "/v1/chat/completions"
    assert outer["attributes"]["http.response.status_code"] == 200
    assert [span["parent_id"] for span in inner] == [outer["span_id"]] * choices


async def test_a_stream_that_its_client_leaves_ends_its_spans_in_order(
    serve_gateway: Any, script: dict[str, Any], spans_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script |= SLOW
    caplog.set_level(logging.WARNING)
    async with serve_gateway() as served:
        agent = await opened(served)
        body = {**BODY, "stream": True, "ignore_eos": True}
        headers = {**agent.headers, **HEADER}
        async with served.http.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as response:
            async for _ in response.aiter_lines():
                break
        await until_running(served, 0)
        sampling = tpb.SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True)
        request = rpb.GenerateRequest(text="2+2=", sampling=sampling)
        with telemetry.span("caller", parent=telemetry.extract(HEADER)):
            call = served.stub.Generate(request, timeout=patient(20))
            await call.read()
            call.cancel()
        await until_running(served, 0)
    spans = spans_of(spans_dir)
    names = [span["name"] for span in spans]
    assert names.count("engine.request") == 2
    assert names.count("http.request") == 1
    by_id = {span["span_id"]: span for span in spans}
    parents = {
        by_id[span["parent_id"]]["name"] for span in spans if span["name"] == "engine.request"
    }
    assert parents == {"http.request", "RolloutService.Generate"}
    assert not [record for record in caplog.records if "detach" in record.getMessage()]


async def test_an_engines_stages_hang_below_the_request_and_lie_within_it(
    serve_gateway: Any, spans_dir: Path
) -> None:
    async with serve_gateway() as served:
        agent = await opened(served)
        await served.http.post(
            "/v1/chat/completions", json=BODY, headers={**agent.headers, **HEADER}
        )
    spans = spans_of(spans_dir)
    (request,) = [one for one in spans if one["name"] == names.ENGINE_REQUEST]
    stages = [one for one in spans if one["parent_id"] == request["span_id"]]
    assert {one["name"] for one in stages} >= {"engine.queue", "engine.prefill", "engine.decode"}
    for one in stages:
        assert request["start_ns"] <= one["start_ns"] <= one["end_ns"] <= request["end_ns"]
        assert one["attributes"][names.WORKER] == 0
    rounds = [one["attributes"] for one in stages if one["name"] == "engine.decode"]
    said = request["attributes"][names.GEN_AI_OUTPUT_TOKENS]
    assert sum(one[names.TOKENS] for one in rounds) == said > 0
    assert {one[names.POLICY_VERSION] for one in rounds} == {0}
    assert all(one[names.ARM] and one[names.ROUNDS] > 0 for one in rounds)


async def test_a_request_is_described_in_the_words_of_the_genai_conventions(
    serve_gateway: Any, spans_dir: Path
) -> None:
    async with serve_gateway() as served:
        agent = await opened(served)
        headers = {**agent.headers, **HEADER}
        chat = {**BODY, "temperature": 0.5, "top_p": 1.0}
        answer = (await served.http.post("/v1/chat/completions", json=chat, headers=headers)).json()
        await served.http.post(
            "/v1/completions",
            json={"prompt": "2+2=", "max_tokens": 8, "temperature": 0.5},
            headers=headers,
        )
    first, second = [
        one["attributes"] for one in spans_of(spans_dir) if one["name"] == names.ENGINE_REQUEST
    ]
    assert first["gen_ai.operation.name"] == "chat"
    assert second["gen_ai.operation.name"] == "text_completion"
    assert first["gen_ai.provider.name"] == "paceline"
    assert first["gen_ai.request.model"] == answer["model"]
    assert (first["gen_ai.request.temperature"], first["gen_ai.request.max_tokens"]) == (0.5, 400)
    assert first["gen_ai.conversation.id"] == agent.id
    assert first["gen_ai.response.id"] == answer["id"]
    assert first["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert first["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert first["gen_ai.response.finish_reasons"] == [answer["choices"][0]["finish_reason"]]
    assert first["gen_ai.response.time_to_first_chunk"] > 0


async def test_a_session_stands_between_the_agents_trace_and_the_samples_append(
    serve_gateway: Any, spans_dir: Path, redis_url: str, run_id: str
) -> None:
    keys = {"trajectories": True, "redis": {"durable_url": redis_url}, "run": {"id": run_id}}
    async with serve_gateway(**keys) as served:
        opener = await served.http.post("/v1/sessions", json={"group_size": 1}, headers=HEADER)
        agent = Agent(served.http, opener.json())
        await served.http.post(
            "/v1/chat/completions", json=BODY, headers={**agent.headers, **HEADER}
        )
        await agent.act("complete", {"reward": 1.0})
        request = rpb.RunTasksRequest(
            context=tpb.CommandContext(run_id=run_id, step=4, epoch=1),
            purpose=tpb.PURPOSE_TRAIN,
            environment="external",
            reward="agent",
            open_groups=1,
        )
        told = [one async for one in served.stub.RunTasks(request, timeout=patient(20))]
        assert len(told[-1].finished.closed_groups) == 1
    spans = spans_of(spans_dir, TRACE, "")
    (session,) = [one for one in spans if one["name"] == names.AGENT_SESSION]
    by_id = {one["span_id"]: one for one in spans}
    assert by_id[session["parent_id"]]["name"] == names.HTTP_REQUEST
    assert (session["trace_id"], by_id[session["parent_id"]]["parent_id"]) == (TRACE, PARENT)
    assert session["attributes"][names.SESSION_ID] == agent.id
    assert session["attributes"][names.SESSION_STATE] == "final"
    assert (session["attributes"][names.SESSION_TURNS], session["attributes"][names.REWARD]) == (
        1,
        1.0,
    )
    for name in (names.ENGINE_REQUEST, names.TRAJECTORY_APPEND):
        (found,) = [one for one in spans if one["name"] == name]
        assert [link.split("-")[2] for link in found["links"]] == [session["span_id"]]
    append = next(one for one in spans if one["name"] == names.TRAJECTORY_APPEND)
    assert append["trace_id"] != TRACE  # it belongs to the step's trace


async def test_a_trace_that_is_no_trace_is_left_alone(serve_gateway: Any, spans_dir: Path) -> None:
    async with serve_gateway() as served:
        agent = await opened(served)
        for bad in ("", "x", "00-0-0-0", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"):
            headers = {**agent.headers, "traceparent": bad}
            answer = await served.http.post("/v1/chat/completions", json=BODY, headers=headers)
            assert answer.status_code == 200
    roots = [one for one in spans_of(spans_dir, "") if one["name"] == names.HTTP_REQUEST]
    assert [one["parent_id"] for one in roots] == [""] * len(roots)
    assert len({one["trace_id"] for one in roots}) == len(roots)


async def test_a_claimed_session_joins_the_agents_trace_and_the_steps(
    serve_gateway: Any, spans_dir: Path, redis_url: str, run_id: str
) -> None:
    keys = {"trajectories": True, "redis": {"durable_url": redis_url}, "run": {"id": run_id}}
    async with serve_gateway(**keys) as served:
        request = served.tasks_request(environment="external", reward="agent", samples_per_task=1)
        del request.tasks[1:]
        async with task_run(served, request) as told:
            body = {"claim": True, "wait_s": 5.0}
            opener = await served.http.post("/v1/sessions", json=body, headers=HEADER)
            agent = Agent(served.http, opener.json())
            await agent.chat([user(agent.session["task"]["prompt"])])
            await agent.act("complete", {"reward": 1.0})
        assert told[-1].finished.scored == 1
    spans = spans_of(spans_dir, "")
    (own,) = [one for one in spans if one["name"] == names.AGENT_SESSION]
    (led,) = [one for one in spans if one["name"] == names.SESSION]
    (append,) = [one for one in spans if one["name"] == names.TRAJECTORY_APPEND]
    assert own["trace_id"] == TRACE != led["trace_id"] == append["trace_id"]
    assert append["parent_id"] == led["span_id"]
    for one in (led, append):
        assert [link.split("-")[2] for link in one["links"]] == [own["span_id"]]
    assert led["attributes"][names.SESSION_ID] == own["attributes"][names.SESSION_ID] == agent.id
