"""A sender of weights that holds everything and pushes alone."""

from __future__ import annotations

import grpc

from paceline.v1.trajectory_pb2 import CommandContext
from paceline.weights import Parcel, PushReport, WeightSender
from paceline.weights.shares import Announced


async def push_alone(
    sender: WeightSender,
    channel: grpc.aio.Channel,
    whole: Announced,
    context: CommandContext,
    deadline_s: float = 30.0,
) -> PushReport:
    """Plan, deliver and settle until the version is complete."""
    going: Parcel | PushReport = sender.plan(whole)
    while isinstance(going, Parcel):
        going = sender.settle(going, [await sender.deliver(channel, going, context, deadline_s)])
    return going
