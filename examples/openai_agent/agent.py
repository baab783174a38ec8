"""An agent that a run trains: claims its tasks, answers with the plain OpenAI client, scores and
posts its own rewards.

From Paceline it imports the path of the token and the propagation of traces. With
OTEL_EXPORTER_OTLP_ENDPOINT set, each attempt is exported as a span, and the spans of the run
link to it. See README.md for how to start the run.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import time
from collections import Counter
from typing import Any

import httpx
import openai
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from paceline.client import find_token, trace_headers

WAIT_S = 10.0  # the gateway answers a claim at once when it has a task, else after so long


def reward(prompt: str, answer: str, finish_reason: str | None) -> float:
    """1 for the right greatest common divisor after the last "#", 0 for anything else; the prompt
    is "48:36=".
    """
    first, second = (int(part) for part in prompt.rstrip("=").split(":"))
    _, marker, given = answer.rpartition("#")
    right = marker and given.strip().isdecimal() and int(given) == math.gcd(first, second)
    return 1.0 if right and finish_reason == "stop" else 0.0


class Agent:
    """Many sessions at once, until no task has come for `patience_s`."""

    def __init__(self, url: str, patience_s: float) -> None:
        token = find_token(url) or "none"
        headers = {"authorization": f"Bearer {token}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=WAIT_S + 30)
        # For the model's name; each session has a key of its own.
        self._openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=token, max_retries=5)
        self._patience_s = patience_s
        self._last_task_s = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.model = ""

    async def run(self, sessions: int) -> None:
        """Raises openai.APIConnectionError when no gateway is there."""
        self.model = (await self._openai.models.list()).data[0].id
        async with asyncio.TaskGroup() as group:
            for _ in range(sessions):
                group.create_task(self._work())
        await self._http.aclose()
        await self._openai.close()

    async def _work(self) -> None:
        """One session after the other."""
        tracer, about = trace.get_tracer("agent"), {"gen_ai.operation.name": "invoke_agent"}
        there = True
        while there:
            with tracer.start_as_current_span("invoke_agent", attributes=about):
                session = await self._claim()
                there = session is not None
                if session is not None:
                    await self._attempt(session)

    async def _claim(self) -> dict[str, Any] | None:
        """A session for the next task of the run; None when none has come for a while or the
        gateway is gone.
        """
        while time.monotonic() < self._last_task_s + self._patience_s:
            try:
                answer = await self._http.post(
                    "/v1/sessions",
                    json={"claim": True, "wait_s": WAIT_S},
                    headers=trace_headers(),
                )
            except httpx.TransportError:
                answer = httpx.Response(httpx.codes.SERVICE_UNAVAILABLE)
            if answer.is_server_error:
                await asyncio.sleep(1)  # the gateway starts again, or the run is over
                continue
            if answer.status_code == httpx.codes.NO_CONTENT:
                continue
            answer.raise_for_status()
            self._last_task_s = time.monotonic()
            session: dict[str, Any] = answer.json()
            return session
        return None

    async def _attempt(self, session: dict[str, Any]) -> None:
        prompt, key = session["task"]["prompt"], session["api_key"]
        try:
            completion = await self._openai.with_options(api_key=key).completions.create(
                model=self.model,
                prompt=prompt,
                temperature=1,
                max_tokens=224,
                extra_headers=trace_headers(),
            )
        except openai.APIError as error:
            await self._post(key, "fail", {"reason": "infra", "message": str(error)})
            self.counts["failed"] += 1
            return
        choice = completion.choices[0]
        value = reward(prompt, choice.text, choice.finish_reason)
        await self._post(key, "complete", {"reward": value})
        self.counts["right" if value else "wrong"] += 1

    async def _post(self, key: str, action: str, body: dict[str, Any]) -> None:
        """End the session of this key.

        A session that has ended already (409), or with its gateway, needs no end.
        """
        headers = {"authorization": f"Bearer {key}", **trace_headers()}
        try:
            answer = await self._http.post(
                f"/v1/sessions/current/{action}", json=body, headers=headers
            )
        except httpx.TransportError:
            self.counts["unheard"] += 1
            return
        if answer.status_code not in (httpx.codes.CONFLICT, httpx.codes.UNAUTHORIZED):
            answer.raise_for_status()


def send_spans() -> TracerProvider:
    """Exports the spans of this process to OTEL_EXPORTER_OTLP_ENDPOINT if it is set."""
    provider = TracerProvider(resource=Resource.create({"service.name": "agent"}))
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:7408", help="address of the gateway")
    parser.add_argument("--sessions", type=int, default=64, help="sessions at once")
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds without a task, then the run is over"
    )
    options = parser.parse_args()
    spans = send_spans()
    agent = Agent(options.url, options.patience)
    await agent.run(options.sessions)
    spans.shutdown()
    scored = agent.counts["right"] + agent.counts["wrong"]
    share = f"{agent.counts['right'] / scored:.3f} right" if scored else "none scored"
    print(f"{scored + agent.counts['failed']} sessions, {share}, {agent.counts['failed']} failed")


if __name__ == "__main__":
    asyncio.run(main())
