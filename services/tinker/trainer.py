"""Sends orders to the policy trainer."""

from contextlib import aclosing
from typing import Any

import grpc

from paceline.errors import Unavailable
from paceline.rpc import responses, rpc_errors
from paceline.rpc.progress import while_moving
from paceline.v1 import policy_pb2 as pb
from paceline.v1.policy_pb2_grpc import PolicyServiceStub
from paceline.v1.trajectory_pb2 import CommandContext

_STILL_S = 600.0
"""Seconds without progress of the trainer after which a call fails."""


class Trainer:
    """The policy trainer at the other end of a channel."""

    def __init__(self, channel: grpc.aio.Channel, context: CommandContext) -> None:
        self._channel, self._context = channel, context
        self._stub: Any = PolicyServiceStub(channel)  # type: ignore[no-untyped-call]

    async def order(self, learner: str, **order: Any) -> pb.LearnResponse:
        """The answer to an order, a field of LearnRequest. Raises the trainer's errors."""
        request = pb.LearnRequest(context=self._context, learner=learner, **order)
        async with while_moving(self._channel, _STILL_S) as timeout:
            with rpc_errors():
                call = self._stub.Learn(request, timeout=timeout)
                async with aclosing(responses(call)) as answers:
                    async for answer in answers:
                        return answer  # type: ignore[no-any-return]
        raise Unavailable("the policy trainer has ended the call without an answer")
