"""One trace follows a request from the caller's header into the engine, streamed or not, left or
read to its end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.gateway.http_agent import SLOW, opened, until_running, user

from paceline import telemetry
from paceline.config import TelemetryConfig
from paceline.local.patience import patient
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


def spans_of(directory: Path) -> list[dict[str, Any]]:
    """All spans of the caller's trace; ends telemetry, so that they are written."""
    telemetry.shutdown()
    lines = [
        line for path in directory.glob("gateway-*.jsonl") for line in path.read_text().splitlines()
    ]
    return [span for span in map(json.loads, lines) if span["trace_id"] == TRACE]


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
