"""The client's requests carry the trace of its caller's current span, and need nothing for it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import openai
from opentelemetry.context import attach, detach
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    TraceState,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from unit.client.scripted_gateway import ScriptedGateway, reply

from paceline.client.traces import trace_headers

PROVIDER = TracerProvider(shutdown_on_exit=False)


def test_outside_any_span_a_request_carries_no_trace() -> None:
    assert trace_headers() == {}


def test_the_headers_are_those_of_the_current_span() -> None:
    with PROVIDER.get_tracer("agent").start_as_current_span("invoke_agent") as current:
        context = current.get_span_context()
        headers = trace_headers()
    assert headers == {
        "traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    }
    parent = TraceContextTextMapPropagator().extract(headers)
    assert get_current_span(parent).get_span_context().span_id == context.span_id


def test_the_states_of_other_vendors_go_along() -> None:
    state = TraceState([("vendor", "x")])
    remote = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1), trace_state=state)
    token = attach(set_span_in_context(NonRecordingSpan(remote)))
    try:
        assert trace_headers()["tracestate"] == "vendor=x"
    finally:
        detach(token)


async def test_every_call_is_sent_under_the_span_around_it(
    gateway: ScriptedGateway, client: Any
) -> None:
    with PROVIDER.get_tracer("agent").start_as_current_span("invoke_agent") as current:
        sent = f"{current.get_span_context().trace_id:032x}"
        session = await client.session()
        await session.info()
    await session.info()
    traces = [one.headers.get("traceparent", "-").split("-")[1] for one in gateway.seen]
    assert traces == [sent, sent, ""]


async def test_an_openai_client_that_is_made_once_sends_each_request_under_the_span_around_it(
    gateway: ScriptedGateway, client: Any
) -> None:
    session = await client.session()
    gateway.otherwise = reply(200, {"object": "list", "data": []})
    tracer, sent = PROVIDER.get_tracer("agent"), [""]
    async with openai.AsyncOpenAI(**session.openai_options(), max_retries=0) as agent:
        await agent.models.list()
        for turn in ("first", "second"):
            with tracer.start_as_current_span(turn) as current:
                await agent.with_options(timeout=30).models.list()
                sent.append(f"{current.get_span_context().span_id:016x}")
    asked = [one.headers.get("traceparent") for one in gateway.seen if "/models" in one.path]
    assert [one.split("-")[2] if one else "" for one in asked] == sent


def test_a_process_without_opentelemetry_imports_none_for_the_client() -> None:
    script = (
        "import sys; import paceline.client.traces as t;"
        "assert t.trace_headers() == {};"
        "assert not [one for one in sys.modules if one.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
