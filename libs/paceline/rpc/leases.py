"""Calls that let the drafter trainer compute on leased slots, and that take the slots back."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from paceline.errors import DeadlineExceeded, Unavailable
from paceline.rpc.channel import responses
from paceline.rpc.progress import while_moving
from paceline.rpc.status import rpc_errors
from paceline.v1 import drafter_pb2 as pb
from paceline.v1.drafter_pb2_grpc import DrafterServiceStub
from paceline.v1.rollout_pb2 import WatchTrafficRequest, WatchTrafficResponse
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub
from paceline.v1.trajectory_pb2 import CommandContext

ACTIVATION_S = 30.0
"""Maximum time from a lease to the drafter's training, on an idle machine, seconds."""
PREEMPT_S = 4.0
"""Maximum time of a preemption of the drafter, on an idle machine, seconds."""
_ATTEMPTS = 3
"""Attempts of a Preempt request. Three deadlines exceed the longest pause for which no process is
killed (ADR 40).
"""


async def answers(call: Any, last: str) -> AsyncGenerator[tuple[str, Any]]:
    """Yields (name, message) for each response of a streaming call, up to the message named `last`.

    Raises Unavailable when the stream ends before that message.
    """
    with rpc_errors():
        async with aclosing(responses(call)) as stream:
            async for response in stream:
                name = response.WhichOneof("event")
                yield name, getattr(response, name)
                if name == last:
                    return
    raise Unavailable(f"the stream ended before its {last!r} message", seen="end of stream")


async def activation(
    trainer: grpc.aio.Channel, request: pb.ActivateRequest, still_s: float
) -> AsyncGenerator[tuple[str, Any]]:
    """Yields (name, message) for each ActivateResponse, the last one named "detached".

    Raises TimeoutError when training has not begun within the request's `deadline_s`,
    DeadlineExceeded after `still_s` seconds without progress of the trainer, and its errors.
    """
    stub: Any = DrafterServiceStub(trainer)  # type: ignore[no-untyped-call]
    async with (
        while_moving(trainer, still_s) as timeout,
        asyncio.timeout(request.deadline_s) as until_activated,
        aclosing(answers(stub.Activate(request, timeout=timeout), last="detached")) as news,
    ):
        async for name, answer in news:
            if name == "activated":
                until_activated.reschedule(None)
            yield name, answer


async def request_preemption(
    trainer: grpc.aio.Channel, context: CommandContext, deadline_s: float
) -> pb.PreemptResponse:
    """Sends up to three Preempt requests, each with `deadline_s` seconds, and returns the first
    answer. Raises DeadlineExceeded and other errors of the call.

    gRPC drops expired requests. A trainer that is stopped for longer than the deadline would never
    receive a single request, and its ranks would continue on the engine's slots.
    """
    stub: Any = DrafterServiceStub(trainer)  # type: ignore[no-untyped-call]
    request, left = pb.PreemptRequest(context=context), _ATTEMPTS
    while True:
        left -= 1
        try:
            with rpc_errors():
                answer: pb.PreemptResponse = await stub.Preempt(request, timeout=deadline_s)
                return answer
        except DeadlineExceeded:
            if not left:
                raise


async def waiting_traffic(gateway: grpc.aio.Channel) -> AsyncGenerator[WatchTrafficResponse]:
    """Reports of the gateway that callers' requests wait for lent workers. An open stream keeps the
    leases alive. Raises the gateway's errors.
    """
    stub: Any = RolloutServiceStub(gateway)  # type: ignore[no-untyped-call]
    with rpc_errors():
        call = stub.WatchTraffic(WatchTrafficRequest(), wait_for_ready=True)
        async with aclosing(responses(call)) as news:
            async for report in news:
                yield report
