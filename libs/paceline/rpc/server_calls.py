"""Wraps every call that a server answers: trace, token, deadline, errors."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status
from opentelemetry.trace import Span

from paceline import errors, telemetry
from paceline.config import SecurityConfig
from paceline.rpc.security import check_token
from paceline.rpc.status import MALFORMED, REFUSALS, code_of, error_from_rpc, status_of
from paceline.telemetry import names
from paceline.telemetry.metrics import Counter

REFUSED = Counter("paceline.rpc.refused", "{call}", ("reason",))
"""gRPC calls without a valid token, or with an epoch that no lease has"""


HEALTH = "/grpc.health.v1.Health/"
_FACTORIES = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
_DRAIN_S, _DRAIN_BYTES = 1.0, 64 << 20
"""Seconds and bytes for which the rest of a refused stream is read."""
_Parser = Callable[[Any], Any]
_Around = Callable[[Any], AbstractAsyncContextManager[None]]
_log = telemetry.get_logger("rpc")


class GuardedCalls(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps every method of a server.

    The call runs in a server span below the caller's span. Without the token it is refused before
    its bytes are parsed, except for health. A PacelineError becomes its status. Any other exception
    is logged and becomes INTERNAL. Cancellation propagates. A unary call without a deadline gets
    `unary_cap_s`; streaming calls have no limit.
    """

    def __init__(
        self, security: SecurityConfig, unary_cap_s: float, caps: Mapping[str, int]
    ) -> None:
        """`caps`: maximum bytes of a request, by method; read with each call."""
        self._security = security
        self._caps = caps
        self._unary_cap_s = unary_cap_s

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], call: Any
    ) -> Any:
        """The wrapped method. It takes raw bytes from grpc.aio, which would log a traceback for
        each unparsable request.
        """
        found = await continuation(call)
        if found is None:
            return None
        around = _report_refusal if call.method.startswith(HEALTH) else partial(self._around, call)
        several = bool(found.request_streaming)
        parsed = partial(
            _all_parsed if several else _parsed,
            found.request_deserializer,
            self._caps.get(call.method),
        )
        if found.response_streaming:
            behavior = found.stream_stream if several else found.unary_stream
            answer = self._stream(around, behavior, parsed)
        else:
            behavior = found.stream_unary if several else found.unary_unary
            answer = self._unary(around, behavior, parsed, several)
        factory = _FACTORIES[several, bool(found.response_streaming)]
        return factory(answer, None, found.response_serializer)

    def _unary(
        self, around: _Around, behavior: Any, parsed: _Parser, request_streaming: bool
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def answer(raw: Any, context: Any) -> Any:
            async with around(context):
                request = parsed(raw)
                if request_streaming:
                    return await _read_to_end(behavior(request, context), raw)
                if context.time_remaining() is not None:
                    return await behavior(request, context)
                return await self._capped(behavior(request, context))

        return answer

    def _stream(
        self, around: _Around, behavior: Any, parsed: _Parser
    ) -> Callable[[Any, Any], Awaitable[None]]:
        # A writing coroutine, not a generator. It unwinds in its own task when the caller leaves,
        # so the method's `finally` blocks run at once and the trace context is restored in its own
        # task.
        async def answer(raw: Any, context: Any) -> None:
            async with around(context):
                outcome = behavior(parsed(raw), context)
                if not hasattr(outcome, "__aiter__"):
                    await outcome
                    return
                async with aclosing(outcome) as responses:
                    async for response in responses:
                        await context.write(response)

        return answer

    async def _capped(self, answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._unary_cap_s) as cap:
                return await answer
        except TimeoutError as error:
            if not cap.expired():
                raise
            message = "the call has no deadline and exceeds the server's own"
            raise errors.DeadlineExceeded(message, allowed=f"{self._unary_cap_s} s") from error

    @asynccontextmanager
    async def _around(self, call: Any, context: Any) -> AsyncIterator[None]:
        metadata = tuple(call.invocation_metadata or ())
        service, _, method = call.method.lstrip("/").partition("/")
        facts = {names.RPC_SYSTEM: "grpc", names.RPC_SERVICE: service, names.RPC_METHOD: method}
        parent = telemetry.extract(dict(metadata))
        failed: Status | None = None
        title = names.rpc_span(service, method)
        with telemetry.span(title, facts, kind="server", parent=parent) as opened:
            try:
                check_token(self._security, call.method, metadata)
                yield
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError:
                _record(opened, grpc.StatusCode.CANCELLED)
                raise
            except Exception as error:  # noqa: BLE001  the last frame of ours: it is logged or returned to the caller
                known = _known(error, call.method)
                if known.reason in REFUSALS:
                    REFUSED.record(reason=known.reason)
                _record(opened, code_of(known))
                telemetry.mark_failed(opened, known)
                failed = status_of(known)
            else:
                _record(opened, grpc.StatusCode.OK)

        if failed is not None:
            await context.abort_with_status(rpc_status.to_status(failed))


@asynccontextmanager
async def _report_refusal(context: Any) -> AsyncIterator[None]:
    """Wraps a public call without a trace; only its refusal is reported."""
    try:
        yield
    except errors.InvalidInput as error:
        await context.abort_with_status(rpc_status.to_status(status_of(error)))


def _parsed(deserialize: _Parser | None, cap: int | None, raw: bytes) -> Any:
    """A request parsed from its bytes, or the bytes themselves. Raises InvalidInput for malformed
    or too many bytes.
    """
    if cap is not None and len(raw) > cap:
        message = "the request is too large"
        reason = "BODY_TOO_LARGE"
        seen = f"{len(raw)} bytes"
        raise errors.InvalidInput(message, reason=reason, seen=seen, allowed=f"{cap} bytes")
    if deserialize is None:
        return raw
    try:
        return deserialize(raw)
    except DecodeError as error:
        message = "the request is not the message that this method takes"
        seen = f"{len(raw)} bytes: {error}"
        allowed = "that message as protobuf"
        raise errors.InvalidInput(message, reason=MALFORMED, seen=seen, allowed=allowed) from error


async def _all_parsed(
    deserialize: _Parser | None, cap: int | None, several: AsyncIterator[bytes]
) -> AsyncIterator[Any]:
    async for raw in several:
        yield _parsed(deserialize, cap, raw)


async def _read_to_end(answer: Awaitable[Any], rest: AsyncIterator[bytes]) -> Any:
    """The answer to a stream of requests. A refusal waits a little for the rest of the stream.

    A status that overtakes the caller's messages can break its write. grpc.aio then reports the
    broken write to the caller instead of the reason.
    """
    try:
        return await answer
    except errors.PacelineError:
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                drained = 0
                async for raw in rest:
                    drained += len(raw)
                    if drained > _DRAIN_BYTES:
                        break
        raise


def _known(error: Exception, method: str) -> errors.PacelineError:
    """The error as a PacelineError; an unexpected one is logged here."""
    match error:
        case errors.InternalError():
            _log.error("a call failed by our own fault", method=method, exc_info=error)
            return error
        case errors.PacelineError():
            return error
        case grpc.aio.AioRpcError():
            return error_from_rpc(error)
        case NotImplementedError():
            return errors.MissingCapability(
                "this server does not have that method", reason="UNIMPLEMENTED", seen=method
            )
    _log.error("a call failed unexpectedly", method=method, exc_info=error)
    message = (
        f"{type(error).__name__} in {method}: {error}; see the server's log, trace "
        f"{telemetry.current_trace_id()}"
    )
    return errors.InternalError(message, reason="UNEXPECTED")


def _record(opened: Span, code: grpc.StatusCode) -> None:
    opened.set_attribute(names.RPC_STATUS, code.value[0])
