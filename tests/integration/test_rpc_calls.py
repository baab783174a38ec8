"""Calls between a real server and a real channel: all four kinds, errors, traces, deadlines,
caps.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline import errors, telemetry
from paceline.config import SecurityConfig, TelemetryConfig
from paceline.errors import PacelineError, StaleEpoch
from paceline.local.patience import patient
from paceline.rpc import EpochGuard, Server, Track, channel, error_from_rpc, responses, rpc_errors
from paceline.rpc.progress import while_moving
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2 import (
    AbortRequest,
    AbortResponse,
    GetVersionsRequest,
    PrepareRequest,
    PrepareResponse,
    PushRequest,
    PushResponse,
)
from paceline.v1.weights_pb2_grpc import (
    WeightServiceServicer,
    WeightServiceStub,
    add_WeightServiceServicer_to_server,
)

OFF = SecurityConfig(token_env="")
NAME = "paceline.test.Echo"
CLASSES = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and cls.__module__ == errors.__name__
]


class Echo:
    """Raw bytes in, raw bytes out; a request may order the behaviour."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.trace_id = ""

    async def one(self, request: bytes, context: Any) -> bytes:
        self.trace_id = telemetry.current_trace_id()
        return await self._obey(request)

    async def many(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for index in range(3):
            yield request + str(index).encode()
        yield await self._obey(request)

    async def many_written(self, request: bytes, context: Any) -> None:
        await context.write(await self._obey(request))

    async def gather(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([await self._obey(request) async for request in requests])

    async def converse(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield await self._obey(request)

    async def _obey(self, request: bytes) -> bytes:
        order, _, detail = request.decode().partition(":")
        match order:
            case "raise":
                raise next(cls for cls in CLASSES if cls.__name__ == detail)(
                    "ordered", seen="this", allowed="that"
                )
            case "crash":
                raise ZeroDivisionError("unforeseen")
            case "hang":
                self.entered.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
        return request

    def add_to(self, server: Server) -> None:
        methods = {
            "One": grpc.unary_unary_rpc_method_handler(self.one),
            "Many": grpc.unary_stream_rpc_method_handler(self.many),
            "ManyWritten": grpc.unary_stream_rpc_method_handler(self.many_written),
            "Gather": grpc.stream_unary_rpc_method_handler(self.gather),
            "Converse": grpc.stream_stream_rpc_method_handler(self.converse),
        }
        handlers = grpc.method_handlers_generic_handler(NAME, methods)
        server.add(lambda _, inner: inner.add_generic_rpc_handlers((handlers,)), self, NAME)


Answer = Callable[..., Awaitable[bytes]]


async def call_one(to: grpc.aio.Channel, request: bytes, deadline_s: float = 10) -> bytes:
    return await to.unary_unary(f"/{NAME}/One")(request, timeout=deadline_s)


async def call_many(to: grpc.aio.Channel, request: bytes, deadline_s: float = 10) -> bytes:
    return [
        response async for response in to.unary_stream(f"/{NAME}/Many")(request, timeout=deadline_s)
    ][-1]


async def call_many_written(to: grpc.aio.Channel, request: bytes, deadline_s: float = 10) -> bytes:
    return [
        response
        async for response in to.unary_stream(f"/{NAME}/ManyWritten")(request, timeout=deadline_s)
    ][-1]


async def call_gather(to: grpc.aio.Channel, request: bytes) -> bytes:
    call = to.stream_unary(f"/{NAME}/Gather")(timeout=patient(10))
    await call.write(request)
    await call.done_writing()
    return await call


async def call_converse(to: grpc.aio.Channel, request: bytes) -> bytes:
    call = to.stream_stream(f"/{NAME}/Converse")(timeout=patient(10))
    await call.write(request)
    answer = await call.read()
    await call.done_writing()
    if answer is grpc.aio.EOF:
        raise await failure(call)
    assert await call.read() is grpc.aio.EOF
    return answer


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error that awaiting a unary call would have raised."""
    return grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        await call.details(),
    )


KINDS = [call_one, call_many, call_many_written, call_gather, call_converse]


@pytest.fixture
def spans(tmp_path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    telemetry.setup("test", TelemetryConfig(spans_dir=str(tmp_path), log_level="error"))

    def read() -> list[dict[str, Any]]:
        telemetry.shutdown()
        return [
            json.loads(line)
            for path in tmp_path.glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]

    yield read
    telemetry.shutdown()


@pytest.fixture
async def echo(spans: object) -> AsyncIterator[tuple[Echo, grpc.aio.Channel]]:
    servicer = Echo()
    server = Server("127.0.0.1:0", OFF, unary_cap_s=0.2)
    servicer.add_to(server)
    port = await server.start()
    async with channel(f"127.0.0.1:{port}", OFF) as to:
        yield servicer, to
    await server.stop(0)


@pytest.mark.parametrize("answer", KINDS)
async def test_every_kind_of_call_passes_raw_bytes(
    echo: tuple[Echo, grpc.aio.Channel], answer: Answer
) -> None:
    assert await answer(echo[1], b"\x00\xff".decode("latin1").encode()) == "\x00ÿ".encode()


@pytest.mark.parametrize("answer", KINDS)
@pytest.mark.parametrize("cls", CLASSES)
async def test_an_error_comes_back_as_the_same_class(
    echo: tuple[Echo, grpc.aio.Channel], answer: Answer, cls: type[PacelineError]
) -> None:
    with pytest.raises(PacelineError) as caught, rpc_errors():
        await answer(echo[1], f"raise:{cls.__name__}".encode())
    expected = errors.InternalError if cls is PacelineError else cls
    assert type(caught.value) is expected
    assert (caught.value.message, caught.value.seen, caught.value.allowed) == (
        "ordered",
        "this",
        "that",
    )


@pytest.mark.parametrize("answer", KINDS)
async def test_an_unforeseen_exception_is_internal_and_logged_with_its_trace(
    echo: tuple[Echo, grpc.aio.Channel], answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry.setup("test", TelemetryConfig(log_json=True))
    with (
        pytest.raises(errors.InternalError, match=r"ZeroDivisionError.*unforeseen") as caught,
        rpc_errors(),
    ):
        await answer(echo[1], b"crash")
    (record,) = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert caught.value.reason == "UNEXPECTED"
    assert record["trace_id"] in caught.value.message
    assert "ZeroDivisionError: unforeseen" in record["exception"]


async def test_both_sides_share_one_trace(
    echo: tuple[Echo, grpc.aio.Channel], spans: Callable[[], list[dict[str, Any]]]
) -> None:
    servicer, to = echo
    with telemetry.span("root"):
        here = telemetry.current_trace_id()
        for answer in KINDS:
            await answer(to, b"x")
    assert servicer.trace_id == here
    await to.close()
    found = {(span["name"], span["kind"]): span for span in spans()}
    root = found["root", "internal"]
    for name in ("One", "Many", "ManyWritten", "Gather", "Converse"):
        client, server = found[f"Echo.{name}", "client"], found[f"Echo.{name}", "server"]
        assert client["parent_id"] == root["span_id"]
        assert server["parent_id"] == client["span_id"]
        assert {client["trace_id"], server["trace_id"]} == {here}
        assert {span["attributes"]["rpc.grpc.status_code"] for span in (client, server)} == {0}


async def test_failed_calls_say_their_code_on_both_sides(
    echo: tuple[Echo, grpc.aio.Channel], spans: Callable[[], list[dict[str, Any]]]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await call_one(echo[1], b"raise:DataLoss")
    await echo[1].close()
    client, server = sorted(spans(), key=lambda span: str(span["kind"]))
    assert (client["status"], server["status"]) == ("error", "error")
    assert [span["attributes"]["rpc.grpc.status_code"] for span in (client, server)] == [15, 15]
    assert server["attributes"]["error.type"] == "DataLoss"


@pytest.mark.parametrize("answer", [call_one, call_many, call_many_written])
async def test_the_callers_deadline_ends_the_call_on_both_sides(
    echo: tuple[Echo, grpc.aio.Channel], answer: Answer
) -> None:
    servicer, to = echo
    for deadline_s in (
        0.3,
        3.0,
        30.0,
    ):  # on a busy machine the deadline may pass before the method is reached
        with pytest.raises(errors.DeadlineExceeded), rpc_errors():
            await answer(to, b"hang", deadline_s)
        if servicer.entered.is_set():
            break
    await asyncio.wait_for(servicer.cancelled.wait(), patient(5))


async def test_a_unary_call_without_a_deadline_gets_the_servers(
    echo: tuple[Echo, grpc.aio.Channel],
) -> None:
    with (
        pytest.raises(errors.DeadlineExceeded, match=r"has no deadline.*allowed: 0\.2 s"),
        rpc_errors(),
    ):
        await echo[1].unary_unary(f"/{NAME}/One")(b"hang")


async def test_a_unary_call_that_is_awaited_while_it_moves_lasts_beyond_the_servers_cap(
    echo: tuple[Echo, grpc.aio.Channel],
) -> None:
    servicer, to = echo

    async def hang() -> None:
        async with while_moving(to, patient(20)) as timeout:
            await call_one(to, b"hang", timeout)

    call = asyncio.ensure_future(hang())
    await servicer.entered.wait()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(servicer.cancelled.wait(), 0.5)
    call.cancel()
    await asyncio.wait_for(servicer.cancelled.wait(), patient(5))


async def test_a_streaming_call_may_last_beyond_the_servers_cap(
    echo: tuple[Echo, grpc.aio.Channel],
) -> None:
    servicer, to = echo
    call = to.stream_unary(f"/{NAME}/Gather")()
    await call.write(b"hang")
    await servicer.entered.wait()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(servicer.cancelled.wait(), 0.5)
    call.cancel()
    await asyncio.wait_for(servicer.cancelled.wait(), patient(5))


async def test_a_caller_that_goes_away_cancels_the_method(
    echo: tuple[Echo, grpc.aio.Channel],
) -> None:
    servicer, to = echo
    task = asyncio.ensure_future(call_many(to, b"hang"))
    await servicer.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(servicer.cancelled.wait(), patient(5))


async def test_a_reader_cancelled_between_the_calls_start_and_its_first_message_ends_the_call(
    echo: tuple[Echo, grpc.aio.Channel],
) -> None:
    _, to = echo
    call: Any = to.unary_stream(f"/{NAME}/Many")(b"hang", timeout=patient(60))

    async def read() -> None:
        async for _ in responses(call):
            raise AssertionError("too late")

    reader = asyncio.ensure_future(read())
    call._preparation.add_done_callback(
        lambda started: reader.cancel()
    )  # runs before the reader's wake-up
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert call.cancelled()


@pytest.mark.parametrize("answer", [call_one, call_gather])
async def test_a_message_of_8_mib_passes_and_a_larger_one_is_refused(
    echo: tuple[Echo, grpc.aio.Channel], answer: Answer
) -> None:
    cap = 8 << 20
    assert len(await answer(echo[1], b"x" * cap)) == cap
    with pytest.raises(errors.ResourceExhausted, match="larger than max"), rpc_errors():
        await answer(echo[1], b"x" * (cap + 1))


async def one_or_many(request: object, context: object) -> CommandContext:
    raise AssertionError("what does not parse reaches no method")


async def read_all(requests: AsyncIterator[object], context: object) -> CommandContext:
    async for _ in requests:
        raise AssertionError("what does not parse reaches no method")
    raise AssertionError("a stream that does not parse has no end")


MALFORMED = {
    f"/{NAME}/unary_unary": grpc.unary_unary_rpc_method_handler(
        one_or_many, CommandContext.FromString
    ),
    f"/{NAME}/unary_stream": grpc.unary_stream_rpc_method_handler(
        one_or_many, CommandContext.FromString
    ),
    f"/{NAME}/stream_unary": grpc.stream_unary_rpc_method_handler(
        read_all, CommandContext.FromString
    ),
    f"/{NAME}/stream_stream": grpc.stream_stream_rpc_method_handler(
        read_all, CommandContext.FromString
    ),
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/Watch": None,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": None,
}
"""Methods of all kinds with protobuf messages, the project's and gRPC's own."""


@pytest.mark.parametrize("path", MALFORMED)
async def test_bytes_that_are_no_protobuf_are_refused_and_leave_no_traceback(
    path: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    server = Server("127.0.0.1:0", OFF)
    methods = {name.rpartition("/")[2]: one for name, one in MALFORMED.items() if one is not None}
    handlers = grpc.method_handlers_generic_handler(NAME, methods)
    server.add(lambda _, inner: inner.add_generic_rpc_handlers((handlers,)), None, NAME)
    port = await server.start()

    async with channel(f"127.0.0.1:{port}", OFF) as to:
        call: Any = to.stream_stream(path)(timeout=patient(10))
        await call.write(b"\xff")
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "the message that this method takes" in await call.details()
    await server.stop(0)
    assert "Traceback" not in "".join((caplog.text, *capfd.readouterr()))


class Weights(WeightServiceServicer):  # type: ignore[misc]
    """Fenced, and flaky at first; the other methods are absent."""

    def __init__(self) -> None:
        self.guard = EpochGuard(SecurityConfig())
        self.failures_left = 2
        self.pushes = 0

    async def Prepare(self, request: PrepareRequest, context: object) -> PrepareResponse:
        self.guard.check(request.context, Track.ROLLOUTS)
        return PrepareResponse(complete=True)

    async def Abort(self, request: AbortRequest, context: object) -> AbortResponse:
        if self.failures_left:
            self.failures_left -= 1
            raise errors.Unavailable("still loading")
        return AbortResponse()

    async def Push(self, requests: AsyncIterator[PushRequest], context: object) -> PushResponse:
        self.pushes += 1
        raise errors.Unavailable(f"push {self.pushes}")


@pytest.fixture
async def weights() -> AsyncIterator[WeightServiceStub]:
    server = Server("127.0.0.1:0", OFF)
    server.add(add_WeightServiceServicer_to_server, Weights(), "paceline.v1.WeightService")
    port = await server.start()
    async with channel(f"127.0.0.1:{port}", OFF) as to:
        yield WeightServiceStub(to)
    await server.stop(0)


async def test_a_command_of_an_old_epoch_is_refused(weights: WeightServiceStub) -> None:
    def command(epoch: int) -> PrepareRequest:
        return PrepareRequest(context=CommandContext(run_id="r", epoch=epoch))

    assert (await weights.Prepare(command(5), timeout=patient(10))).complete
    with pytest.raises(StaleEpoch, match="seen: 4; allowed: at least 5"), rpc_errors():
        await weights.Prepare(command(4), timeout=patient(10))


async def test_a_unary_call_is_retried_while_the_peer_is_unavailable(
    weights: WeightServiceStub,
) -> None:
    assert await weights.Abort(AbortRequest(), timeout=patient(10)) == AbortResponse()


async def test_a_streaming_call_is_not_retried(weights: WeightServiceStub) -> None:
    with pytest.raises(errors.Unavailable, match="push 1"), rpc_errors():
        await weights.Push(iter([PushRequest()]), timeout=patient(10))


async def test_a_method_that_a_servicer_leaves_out_is_a_missing_capability(
    weights: WeightServiceStub,
) -> None:
    with pytest.raises(errors.MissingCapability) as caught, rpc_errors():
        await weights.GetVersions(GetVersionsRequest(), timeout=patient(10))
    assert caught.value.reason == "UNIMPLEMENTED"


async def test_a_method_that_nobody_serves_is_a_missing_capability(
    echo: tuple[Echo, grpc.aio.Channel],
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await echo[1].unary_unary("/paceline.test.Nobody/Home")(b"", timeout=patient(10))
    assert type(error_from_rpc(caught.value)) is errors.MissingCapability
