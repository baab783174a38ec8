"""Keeps the ranks of a node for their trainer on another node (hosts.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from math import inf
from typing import Any

import grpc

from paceline.errors import PacelineError
from paceline.local.patience import cancel, unless
from paceline.ranks.group import RankGroup
from paceline.ranks.hosts import READY
from paceline.rpc import error_from_rpc, responses
from paceline.telemetry import get_logger
from paceline.v1.policy_pb2 import KeepRanksRequest

_AGAIN_S = 0.5
_START_S = 86_400.0  # the trainer has the deadline
_log = get_logger(__name__)


async def host_ranks(
    group: RankGroup, offer: KeepRanksRequest, dial: Callable[[Any], Any], stop: asyncio.Event
) -> None:
    """Keeps a node's ranks for their trainer until `stop` is set. `dial` calls the trainer. No rank
    is left afterwards.
    """
    while await unless(stop, _keep(group, offer, dial)):
        pass


async def _keep(group: RankGroup, offer: KeepRanksRequest, dial: Callable[[Any], Any]) -> None:
    """One call, and its ranks; then a pause."""
    news: asyncio.Queue[KeepRanksRequest | None] = asyncio.Queue()
    news.put_nowait(offer)
    running: asyncio.Task[None] | None = None
    grace_s = 0.0
    try:
        async with aclosing(responses(dial(_until_none(news)))) as orders:
            try:
                async for order in orders:
                    if order.HasField("start"):
                        running = asyncio.create_task(_run(group, order.start, news))
                    elif order.HasField("message"):
                        with suppress(PacelineError):  # _run reports it
                            group.send(order.message)
                    else:
                        grace_s = order.stop_s
                        break
            finally:  # the trainer awaits the end of the call
                await cancel(running)
                await group.end_ranks(grace_s)
    except grpc.aio.AioRpcError as error:
        _log.warning("trainer_away", error=str(error_from_rpc(error)))
    await asyncio.sleep(_AGAIN_S)


async def _run(group: RankGroup, store: str, news: asyncio.Queue[KeepRanksRequest | None]) -> None:
    """Starts the ranks and forwards their messages, until a rank is lost."""

    def forward(rank: int, message: bytes) -> bool:
        news.put_nowait(KeepRanksRequest(rank=rank, message=message))
        return True

    group.on_progress = forward
    try:
        await group.start(_START_S, store)
        for rank in group.own:
            forward(rank, READY)
        while True:
            forward(*await group.receive(inf))
    except PacelineError as error:
        await group.end_ranks(0.0)  # none is left when the trainer receives the loss
        news.put_nowait(KeepRanksRequest(lost=str(error)))
        news.put_nowait(None)


async def _until_none(
    news: asyncio.Queue[KeepRanksRequest | None],
) -> AsyncIterator[KeepRanksRequest]:
    while (one := await news.get()) is not None:
        yield one
