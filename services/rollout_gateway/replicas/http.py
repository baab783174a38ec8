"""The HTTP API of a head: finds the replica of a request and passes bytes in both directions.

The replica checks keys, bodies and paths. The head reads only the fields that select the replica.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from paceline.errors import InternalError, PacelineError, Unavailable
from paceline.services.rollout_gateway.api.http import bodies, errors
from paceline.services.rollout_gateway.api.http.keys import CURRENT, api_key
from paceline.services.rollout_gateway.api.http.sessions import MAX_WAIT_S
from paceline.services.rollout_gateway.api.http.streaming import unless_gone
from paceline.services.rollout_gateway.background import cancel
from paceline.services.rollout_gateway.calls.aside import LargeRequests
from paceline.services.rollout_gateway.replicas.claims import claim_in_turn
from paceline.services.rollout_gateway.replicas.fleet import Replica, ReplicaFleet
from paceline.services.rollout_gateway.replicas.pages import merged_metrics
from paceline.services.rollout_gateway.replicas.passage import Passage, ReplicaAnswer
from paceline.services.rollout_gateway.replicas.routing import SessionRouting
from paceline.telemetry import PROMETHEUS_TYPE, get_logger, prometheus_page

ALL_S = 10.0
"""Maximum time of a request to all replicas, seconds."""
LONGEST = (bodies.MAX_BODY_BYTES - bodies.LEAST_BODY_BYTES) // bodies.TOKEN_BYTES
"""Tokens of context that the head assumes for a body; a replica knows its model's context."""
_ONE_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade")
)
_OWN = _ONE_HOP | {b"date", b"server"}
"""Headers that every server writes itself."""
_SESSION = re.compile(r"/v1/sessions/([^/]+)(/.*)?")
_RESPONSE = re.compile(r"/v1/responses/([^/]+)")
_SPEAKS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
log = get_logger(__name__)


class HeadApp:
    """The ASGI application."""

    def __init__(self, fleet: ReplicaFleet, routing: SessionRouting, aside: LargeRequests) -> None:
        self._fleet = fleet
        self._routing = routing
        self._aside = aside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            body = await bodies.received(request, LONGEST, self._aside)
            answer = await self._answer(request, body)
        except PacelineError as error:
            answer = errors.answer(error, request)
        except Exception as error:
            log.error("a request failed", path=request.url.path, exc_info=error)
            defect = InternalError("the gateway failed; its log says why")
            answer = errors.answer(defect, request)
        await answer(scope, receive, send)

    async def _answer(self, request: Request, body: bytes) -> Response:
        path = request.url.path
        if request.method == "GET" and path == "/health":
            return await self._health(request)
        if request.method == "GET" and path == "/metrics":
            return await self._metrics(request)
        if request.method == "POST" and path == "/v1/sessions" and _read(body).get("claim"):
            return await self._claimed(request, _read(body))
        where = self._where(request, path, body)
        for replica in where[:-1]:
            answer = await _passed_on(request, body, replica)
            if answer.status_code != 404:
                return answer
            answer.close()
        return await _passed_on(request, body, where[-1])

    def _where(self, request: Request, path: str, body: bytes) -> Sequence[Replica]:
        """Replicas of a request; several if only the replicas know the right one."""
        routing = self._routing
        if (replica := routing.key(api_key(request))) is not None:
            return [replica]
        if (found := _SESSION.fullmatch(path)) and found[1] != CURRENT:
            return routing.session(found[1])
        if found := _RESPONSE.fullmatch(path):
            return [routing.named(found[1])]
        if request.method != "POST":
            return [routing.next()]
        fields = _read(body)
        if path == "/v1/sessions":
            return [routing.group(str(fields.get("group_id") or ""))]
        if completion := fields.get("completion_id"):
            return [routing.completion(str(completion))]
        return [routing.conversation(fields) if path in _SPEAKS else routing.next()]

    async def _claimed(self, request: Request, fields: Mapping[str, Any]) -> Response:
        async def at(replica: Replica, wait_s: float) -> _PassedOn | None:
            asked = orjson.dumps({**fields, "wait_s": wait_s})
            answer = await _passed_on(request, asked, replica)
            if answer.status_code == 204:
                answer.close()
                return None
            return answer

        wait_s = fields.get("wait_s", 0.0)
        if not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_WAIT_S:
            return await _passed_on(request, orjson.dumps(fields), self._routing.next())
        claimed = await claim_in_turn(self._routing, wait_s, at, lambda error: False)
        return claimed or Response(status_code=204)

    async def _health(self, request: Request) -> Response:
        """Health of all replicas: 200 while one worker of one replica serves."""
        pages = [orjson.loads(page) for _, page in await self._all(request)]
        workers = sum(page["workers"] for page in pages)
        model = next((page["model"] for page in pages), "")
        body = {"status": "ok" if workers else "starting", "model": model, "workers": workers}
        return JSONResponse(body, status_code=200 if workers else 503)

    async def _metrics(self, request: Request) -> Response:
        """Metrics of all replicas, each under its number, and of the head. If a replica refuses,
        its refusal is the answer.
        """
        first = await _passed_on(request, b"", self._routing.next())
        if first.status_code != 200:
            return first
        first.close()
        pages = {str(one.place.shard.index): page for one, page in await self._all(request)}
        pages["head"] = prometheus_page()
        return Response(merged_metrics(pages), media_type=PROMETHEUS_TYPE)

    async def _all(self, request: Request) -> list[tuple[Replica, bytes]]:
        """The whole answers of all available replicas."""
        ready = self._fleet.ready
        answers = await asyncio.gather(
            *(_whole(request, replica) for replica in ready), return_exceptions=True
        )
        found: list[tuple[Replica, bytes]] = []
        for replica, answer in zip(ready, answers, strict=True):
            if isinstance(answer, bytes):
                found.append((replica, answer))
            elif not isinstance(answer, TimeoutError | Unavailable):
                raise answer
        return found


class _PassedOn(Response):
    """A replica's answer on its way to the client; the replica is notified if the client leaves."""

    def __init__(self, passage: Passage, answer: ReplicaAnswer, *, bodiless: bool) -> None:
        self.status_code, self.background, self.body = answer.status, None, b""
        self.raw_headers = [header for header in answer.headers if header[0] not in _OWN]
        self._passage, self._answer, self._bodiless = passage, answer, bodiless

    def close(self) -> None:
        """Discards the answer."""
        self._passage.release(self._answer)

    async def whole(self) -> bytes:
        """The whole body."""
        try:
            return b"".join([part async for part in self._answer.parts()])
        finally:
            self.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.current_task()
        assert sending is not None
        gone = asyncio.create_task(_cancel_when_gone(receive, sending))
        head = {"status": self.status_code, "headers": self.raw_headers}
        try:
            await send({"type": "http.response.start", **head})
            if not self._bodiless:
                async with aclosing(self._answer.parts()) as parts:
                    async for part in parts:
                        await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not gone.done():
                raise
            sending.uncancel()
        finally:
            self.close()
            await cancel(gone)


async def _cancel_when_gone(receive: Receive, sending: asyncio.Task[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    sending.cancel()


async def _passed_on(request: Request, body: bytes, replica: Replica) -> _PassedOn:
    """Returns the answer of a replica, without its body. Raises Unavailable while the replica
    starts, when it is lost, or when the client leaves.
    """
    replica.require_up()
    answer = await unless_gone(request, _asked(request, body, replica))
    return _PassedOn(replica.http, answer, bodiless=request.method == "HEAD")


async def _asked(request: Request, body: bytes, replica: Replica) -> ReplicaAnswer:
    scope = request.scope
    kept = [
        (key, value)
        for key, value in scope["headers"]
        if key not in _ONE_HOP and key != b"content-length"
    ]
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    return await replica.http.ask(request.method, target, kept, body)


async def _whole(request: Request, replica: Replica) -> bytes:
    replica.require_up()
    async with asyncio.timeout(ALL_S):
        answer = await _asked(request, b"", replica)
        return await _PassedOn(replica.http, answer, bodiless=False).whole()


def _read(body: bytes) -> Mapping[str, Any]:
    """The fields of a body; empty for a body that is no JSON object, which the replica refuses."""
    try:
        found = orjson.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
