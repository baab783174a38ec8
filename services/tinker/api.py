"""The HTTP API that the public SDK calls: routes, keys, bounded bodies and errors."""

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
from paceline.services.tinker.clients import Client
from paceline.services.tinker.front import Front
from paceline.services.tinker.futures import Future, Result
from paceline.telemetry import get_logger

KEY_PREFIX = "tml-"
"""The SDK requires it in front of a key."""
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
Work = Callable[[Client, Any], Awaitable[Result]]


class Api:
    """The handlers of all routes."""

    def __init__(self, front: Front, longest: int) -> None:
        """`longest`: tokens of the context."""
        self._front, self._longest = front, longest

    def app(self) -> Starlette:
        """The ASGI application."""
        front = self._front
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{id}/finish": self._finish,
            "telemetry": self._telemetry,
            "create_model": self._create,
            "get_info": self._info,
            "forward_backward": self._learn,
            "optim_step": self._queued(front.step),
            "save_weights": self._queued(front.save),
            "save_weights_for_sampler": self._queued(front.save_sampler),
            "load_weights": self._load,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }
        gets = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{id}": self._sampler,
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
        local = is_loopback(config.addresses.tinker_http)

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            request = Request(scope)
            host = request.headers.get("host", "")
            if local and not names_loopback(host):
                message = "the Host header names another machine than this one"
                raise errors.InvalidInput(message, seen=host[:100], allowed="a loopback address")
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            key = request.headers.get("x-api-key", key if scheme.lower() == "bearer" else "")
            token = key.removeprefix(KEY_PREFIX)
            if scope_of(config.security, token) is not Scope.OPERATOR:
                raise errors.InvalidInput(
                    "the key does not open this server",
                    reason="UNAUTHENTICATED",
                    allowed=f"TINKER_API_KEY={KEY_PREFIX}<the run's operator token>",
                )
            await app(scope, receive, send)

        return guarded

    async def _body(self, request: Request) -> bytes:
        """The body. Raises InvalidInput above the maximum, before it is read whole."""
        data, most = bytearray(), self._front.config.max_body_bytes
        async for part in request.stream():
            data += part
            if len(data) > most:
                message = "the body is too large"
                raise errors.InvalidInput(message, reason="BODY_TOO_LARGE", allowed=f"{most} bytes")
        return bytes(data)

    # --- the service ------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ready"})

    async def _client_config(self, request: Request) -> Response:
        """Switches of the SDK: its keys are sent as they are, and its calls over httpx."""
        most = self._front.config.max_body_bytes // 2
        return JSONResponse(
            {"use_pyqwest_transport": False, "fwdbwd_max_chunk_bytes_count": min(most, 5_000_000)}
        )

    async def _dynamic_config(self, request: Request) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def _telemetry(self, request: Request) -> Response:
        """Accepts the SDK's events and drops them."""
        await self._body(request)
        return JSONResponse({"status": "accepted"})

    async def _capabilities(self, request: Request) -> Response:
        served = {
            "model_name": self._front.model,
            "max_context_length": self._longest,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [served]})

    async def _create_session(self, request: Request) -> Response:
        bodies.SessionBody.read(bodies.parsed(await self._body(request)))
        note = "adapters of the head are not served: train_unembed has no effect"
        session = self._front.open_session()
        return JSONResponse({"session_id": session, "info_message": note, "type": "create_session"})

    async def _heartbeat(self, request: Request) -> Response:
        fields = bodies.parsed(await self._body(request))
        self._front.touch(str(fields.get("session_id")))
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: Request) -> Response:
        await self._body(request)
        self._front.end_session(request.path_params["id"])
        return Response(status_code=204)

    # --- training ---------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        return _promise(self._front.create(bodies.parsed(await self._body(request))))

    async def _info(self, request: Request) -> Response:
        fields = bodies.parsed(await self._body(request))
        return JSONResponse(self._front.info(str(fields.get("model_id"))))

    async def _learn(self, request: Request) -> Response:
        """forward and forward_backward, whose body is binary."""
        data, front = await self._body(request), self._front
        if request.headers.get("content-type") != "application/x-protobuf":
            message = "the body of forward_backward is protobuf since tinker 0.38"
            raise errors.InvalidInput(message, seen=request.headers.get("content-type"))
        body = bodies.read_binary(data)
        fields = {"model_id": body.model_id, "seq_id": body.seq_id}
        return _promise(front.submit(fields, len(data), lambda one: front.learn(one, data)))

    def _queued(self, work: Work) -> Callable[[Request], Awaitable[Response]]:
        """The handler of a call in JSON that waits for its turn."""

        async def handle(request: Request) -> Response:
            data = await self._body(request)
            fields = bodies.parsed(data)
            return _promise(
                self._front.submit(fields, len(data), lambda client: work(client, fields))
            )

        return handle

    async def _load(self, request: Request) -> Response:
        """load_weights into a training client, or as a new one."""
        data, front = await self._body(request), self._front
        fields = bodies.parsed(data)
        if fields.get("model_id") is None:
            return _promise(front.create(fields))
        return _promise(front.submit(fields, len(data), lambda one: front.load(one, fields)))

    # --- sampling ---------------------------------------------------------------------------------

    async def _create_sampler(self, request: Request) -> Response:
        name = self._front.open_sampler(bodies.parsed(await self._body(request)))
        return JSONResponse({"sampling_session_id": name, "type": "create_sampling_session"})

    async def _sampler(self, request: Request) -> Response:
        found = self._front.sampler(request.path_params["id"])
        return JSONResponse(
            {
                "sampler_id": found.name,
                "base_model": self._front.model,
                "model_path": found.model_path,
            }
        )

    async def _sample(self, request: Request) -> Response:
        data = await self._body(request)
        future, names = self._front.sample(bodies.parsed(data), len(data))
        return _promise(future, sample_sequence_ids=names)

    # --- futures ----------------------------------------------------------------------------------

    async def _retrieve(self, request: Request) -> Response:
        """The result of a call; after `poll_s` seconds 408, on which the SDK asks again."""
        name = str(bodies.parsed(await self._body(request)).get("request_id"))
        result = await self._front.futures.wait(name, self._front.config.poll_s)
        if result is None:
            body = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(body, status_code=408)
        return Response(result.body, media_type=result.media)

    async def _cancel(self, request: Request) -> Response:
        name = str(bodies.parsed(await self._body(request)).get("request_id"))
        self._front.futures.cancel(name)
        return Response(status_code=204)


def _promise(future: Future, **more: Any) -> Response:
    return JSONResponse({"request_id": future.name, **more})


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
