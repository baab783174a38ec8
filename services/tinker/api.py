"""The HTTP API that the public SDK calls: routes, keys, bounded bodies and errors."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paceline import errors
from paceline.addresses import is_loopback
from paceline.rpc import names_loopback, scope_of
from paceline.rpc.security import Scope
from paceline.services.tinker import bodies
from paceline.services.tinker.clients import TrainingClient
from paceline.services.tinker.front import TinkerFront
from paceline.services.tinker.futures import BINARY, Result
from paceline.telemetry import get_logger

KEY_PREFIX = "tml-"
"""The SDK requires it in front of a key."""
BODIES, BODY_S = 32, 30.0
"""Bodies that are read at a time, and the maximum time of one, seconds."""
_STATUSES: tuple[tuple[str | type[errors.PacelineError], int], ...] = (
    ("UNAUTHENTICATED", 401),
    ("BODY_TOO_LARGE", 413),
    (errors.NotFound, 404),
    (errors.InvalidInput, 400),
    (errors.FailedPrecondition, 400),  # the SDK repeats a call after 409
    (errors.ResourceExhausted, 429),
    (errors.Unavailable, 503),
    (errors.PacelineError, 500),
)
_log = get_logger(__name__)
Work = Callable[[TrainingClient, Any], Awaitable[Result]]
Handler = Callable[[Request], Awaitable[Response]]


class Api:
    """The handlers of all routes."""

    def __init__(self, front: TinkerFront) -> None:
        self._front = front
        self._reading = asyncio.Semaphore(BODIES)

    def app(self) -> Starlette:
        """The ASGI application."""
        front, fixed, json, queued = self._front, self._fixed, self._json, self._queued
        chunk = min(front.config.max_body_bytes // 2, 5_000_000)
        served = {"model_name": front.model, "trainable": True, "sampleable": True}
        posts: dict[str, Handler] = {
            # The SDK sends its key as it is, over httpx, and bodies that are read here.
            "client/config": fixed(use_pyqwest_transport=False, fwdbwd_max_chunk_bytes_count=chunk),
            "client/dynamic_config": fixed(),
            "telemetry": fixed(status="accepted"),
            "create_session": json(lambda fields, size: front.open_session()),
            "session_heartbeat": json(lambda fields, size: front.keep_session(fields)),
            "sessions/{id}/finish": json(lambda fields, size: front.end_session(fields["id"])),
            "create_model": queued(front.create),
            "get_info": json(lambda fields, size: front.info(fields.get("model_id"))),
            "forward_backward": self._learn,
            "optim_step": queued(front.step),
            "save_weights": queued(front.save),
            "save_weights_for_sampler": queued(front.save_sampler),
            "load_weights": queued(front.load),
            "create_sampling_session": json(lambda fields, size: front.open_sampler(fields)),
            "asample": json(front.sample),
            "retrieve_future": self._retrieve,
        }
        gets = {
            "healthz": fixed(status="ready"),
            "get_server_capabilities": fixed(supported_models=[served]),
            "samplers/{id}": json(lambda fields, size: front.sampler_info(fields["id"])),
        }
        routes = [Route(f"/api/v1/{path}", one, methods=["POST"]) for path, one in posts.items()]
        routes += [Route(f"/api/v1/{path}", one) for path, one in gets.items()]
        kinds: tuple[type[Exception], ...] = (errors.PacelineError, HTTPException, Exception)
        app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _answer_error))
        for route in routes:
            route.app = self._guarded(route.app)
        return app

    def _guarded(self, app: Any) -> Any:
        """The route behind the check of its caller."""
        config = self._front.config

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            request = Request(scope)
            host = request.headers.get("host", "")
            foreign = is_loopback(config.addresses.tinker_http) and not names_loopback(host)
            if foreign or "origin" in request.headers:
                message, allowed = "a web page or another host sent this", "a loopback Host"
                raise errors.InvalidInput(message, seen=host[:100], allowed=allowed)
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            key = request.headers.get("x-api-key", key if scheme.lower() == "bearer" else "")
            token = key.removeprefix(KEY_PREFIX)
            if scope_of(config.security, token) is not Scope.OPERATOR:
                message = "the key does not open this server"
                allowed = f"TINKER_API_KEY={KEY_PREFIX}<the run's operator token>"
                raise errors.InvalidInput(message, reason="UNAUTHENTICATED", allowed=allowed)
            await app(scope, receive, send)

        return guarded

    async def _body(self, request: Request) -> bytes:
        """The body. Raises InvalidInput above the maximum, before it is read whole, and for a body
        that is not there in time.
        """
        data, most = bytearray(), self._front.config.max_body_bytes
        try:
            async with self._reading, asyncio.timeout(BODY_S):
                async for part in request.stream():
                    data += part
                    if len(data) > most:
                        message, allowed = "the body is too large", f"{most} bytes"
                        raise errors.InvalidInput(message, reason="BODY_TOO_LARGE", allowed=allowed)
        except TimeoutError as error:
            raise errors.InvalidInput("the body is late", allowed=f"{BODY_S:g} s") from error
        return bytes(data)

    # --- handlers ---------------------------------------------------------------------------------

    def _fixed(self, **fields: Any) -> Handler:
        """The handler of a call with always the same answer."""
        return self._json(lambda given, size: fields)

    def _json(self, answer: Callable[[dict[str, Any], int], Any]) -> Handler:
        """The handler of a call in JSON. `answer` gets the fields of body and path, and the size of
        the body, and returns the fields of the answer; None: without content.
        """

        async def handle(request: Request) -> Response:
            data = await self._body(request)
            found = answer({**bodies.parsed(data), **request.path_params}, len(data))
            return Response(status_code=204) if found is None else JSONResponse(found)

        return handle

    def _queued(self, work: Work) -> Handler:
        """The handler of a call in JSON that waits for its turn."""
        submit = self._front.submit
        return self._json(
            lambda fields, size: submit(fields, size, lambda client: work(client, fields)).promise()
        )

    async def _learn(self, request: Request) -> Response:
        """forward and forward_backward, whose body is binary."""
        data, front = await self._body(request), self._front
        if request.headers.get("content-type") != BINARY:
            message = "the body of forward_backward is protobuf since tinker 0.38"
            raise errors.InvalidInput(message, seen=request.headers.get("content-type"))
        body = bodies.read_binary(data)
        fields = {"model_id": body.model_id, "seq_id": body.seq_id}
        future = front.submit(fields, len(data), lambda client: front.learn(client, data))
        return JSONResponse(future.promise())

    async def _retrieve(self, request: Request) -> Response:
        """The result of a call; after `poll_s` seconds 408, on which the SDK asks again."""
        name = str(bodies.parsed(await self._body(request)).get("request_id"))
        result = await self._front.futures.wait(name, self._front.config.poll_s)
        if result is None:
            body = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(body, status_code=408)
        return Response(result.body, media_type=result.media)


async def _answer_error(request: Request, error: Exception) -> Response:
    """The answer to an error. The traceback of a fault is logged, not sent."""
    if isinstance(error, HTTPException):
        return JSONResponse({"detail": error.detail}, status_code=error.status_code)
    if not isinstance(error, errors.PacelineError):
        _log.error("a request failed", path=request.url.path, exc_info=error)
        error = errors.InternalError("the front failed; its log has the cause")
    status = next(
        code
        for key, code in _STATUSES
        if (key == error.reason if isinstance(key, str) else isinstance(error, key))
    )
    return JSONResponse({"detail": str(error)}, status_code=status)
