"""The HTTP API that the public SDK calls: routes, keys and bounded bodies."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paceline import errors
from paceline.addresses import is_loopback
from paceline.rpc import scope_of
from paceline.rpc.http_requests import api_key, check_site, error_handlers, read_body, status_of
from paceline.rpc.security import Scope
from paceline.services.tinker import bodies
from paceline.services.tinker.clients import TrainingClient
from paceline.services.tinker.front import TinkerFront
from paceline.services.tinker.futures import Result

KEY_PREFIX = "tml-"
"""The SDK requires it in front of a key."""
BODIES = 32
"""Bodies that are read at a time."""
Work = Callable[[TrainingClient, Any], Awaitable[Result]]
Handler = Callable[[Request, bytes], Awaitable[Response]]


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
        routes = [
            Route(f"/api/v1/{path}", self._guarded(handler), methods=[method])
            for method, handlers in (("POST", posts), ("GET", gets))
            for path, handler in handlers.items()
        ]
        return Starlette(routes=routes, exception_handlers=error_handlers(_answer_error))

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint that checks its caller, and then reads the body for the handler."""
        config = self._front.config
        loopback = is_loopback(config.addresses.tinker_http)

        async def guarded(request: Request) -> Response:
            check_site(request, loopback=loopback)
            token = api_key(request).removeprefix(KEY_PREFIX)
            if scope_of(config.security, token) is not Scope.OPERATOR:
                message = "the key does not open this server"
                allowed = f"TINKER_API_KEY={KEY_PREFIX}<the run's operator token>"
                raise errors.InvalidInput(message, reason="UNAUTHENTICATED", allowed=allowed)
            async with self._reading:
                body = await read_body(request, config.max_body_bytes)
            return await handler(request, body)

        return guarded

    # --- handlers ---------------------------------------------------------------------------------

    def _fixed(self, **fields: Any) -> Handler:
        """The handler of a call with always the same answer."""
        return self._json(lambda given, size: fields)

    def _json(self, answer: Callable[[dict[str, Any], int], Any]) -> Handler:
        """The handler of a call in JSON. `answer` gets the fields of body and path, and the size of
        the body, and returns the fields of the answer; None: without content.
        """

        async def handle(request: Request, body: bytes) -> Response:
            found = answer({**bodies.parsed(body), **request.path_params}, len(body))
            return Response(status_code=204) if found is None else JSONResponse(found)

        return handle

    def _queued(self, work: Work) -> Handler:
        """The handler of a call in JSON that waits for its turn."""
        submit = self._front.submit
        return self._json(
            lambda fields, size: submit(fields, size, lambda client: work(client, fields)).promise()
        )

    async def _learn(self, request: Request, data: bytes) -> Response:
        """forward and forward_backward, whose body is binary."""
        front = self._front
        body = bodies.read_binary(data)
        fields = {"model_id": body.model_id, "seq_id": body.seq_id}
        future = front.submit(fields, len(data), lambda client: front.learn(client, data))
        return JSONResponse(future.promise())

    async def _retrieve(self, request: Request, body: bytes) -> Response:
        """The result of a call; after `poll_s` seconds 408, on which the SDK asks again."""
        name = str(bodies.parsed(body).get("request_id"))
        result = await self._front.futures.wait(name, self._front.config.poll_s)
        if result is None:
            waits = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(waits, status_code=408)
        return Response(result.body, media_type=result.media)


def _answer_error(error: errors.PacelineError, request: Request) -> Response:
    return JSONResponse({"detail": str(error)}, status_code=status_of(error)[0])
