"""Adds workers to a gateway that serves, and has some leave, as the coordinator says.

An added worker has the serving set before its first request. One that leaves gets no request any
more; what runs there ends, or goes on from its tokens on the others. Which places have a worker
outlives the gateway.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidInput,
    PacelineError,
    ResourceExhausted,
)
from paceline.services.rollout_gateway.background import cancel
from paceline.services.rollout_gateway.workers.lending import check_drain_s
from paceline.services.rollout_gateway.workers.placement import Seat
from paceline.services.rollout_gateway.workers.router import Router
from paceline.telemetry import get_logger
from paceline.whole_files import write_whole

log = get_logger(__name__)


class Staff:
    """Which places have a worker. What was begun goes on when its caller is gone; one that asks
    again waits for it.
    """

    def __init__(self, router: Router, file: Path | None, on_change: Callable[[int], None]) -> None:
        """`file`: keeps the places without a worker over a restart; None forgets them; on_change:
        told how many workers there are now.
        """
        self._router = router
        self._file = file
        self._on_change = on_change
        self._under_way: dict[int, asyncio.Task[None]] = {}  # by place

    def take_up(self, workers: int) -> None:
        """Before workers start: the places that had none when the process before this one ended
        have none still; at first there are so many workers. Raises DataLoss when the file is
        damaged.
        """
        seats = self._router.seats
        vacant: Collection[int] = range(workers, len(seats))
        if self._file is not None and self._file.exists():
            try:
                found = json.loads(self._file.read_text(encoding="utf-8"))
                vacant = {int(index) for index in found["vacant"]}
            except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
                raise DataLoss(
                    f"{self._file} does not say which workers there are",
                    seen=str(error)[:120],
                    allowed="remove it; workers are then those of gateway.engine.workers",
                ) from error
        for seat in seats:
            seat.vacant = seat.index in vacant
        self._changed()

    async def add(self, workers: Iterable[int]) -> dict[int, str]:
        """Returns when each of these places has a worker that serves, or by its number why not.
        Raises InvalidInput for a place that is not there, ResourceExhausted on a full disk.
        """
        seats = self._seats(workers)
        answers = await self._each(seats, lambda seat: self._add(seat))
        for answer in answers:
            if isinstance(answer, ResourceExhausted):
                raise answer
        return {seat.index: str(a) for seat, a in zip(seats, answers, strict=True) if a is not None}

    async def drain(self, workers: Iterable[int], drain_s: float) -> None:
        """Returns when these workers are gone. Requests that run there get `drain_s` seconds to
        end; then they go on elsewhere.

        Raises InvalidInput for a place that is not there, FailedPrecondition when no worker would
        be left, ResourceExhausted on a full disk.
        """
        check_drain_s(drain_s)
        seats = self._seats(workers)
        going = {seat.index for seat in seats}
        if not set(self._router.members) - going:
            raise FailedPrecondition(
                "a gateway keeps an engine worker",
                seen=f"drain {', '.join(map(str, sorted(going)))}",
                allowed="all workers but one",
            )
        self._router.loans.vacate(going)
        self._changed()
        for answer in await self._each(seats, lambda seat: self._drain(seat, drain_s)):
            if answer is not None:
                raise answer

    async def stop(self) -> None:
        """Nobody comes or goes any more."""
        await cancel(*self._under_way.values())

    def _seats(self, workers: Iterable[int]) -> list[Seat]:
        wanted, seats = sorted(set(workers)), self._router.seats
        if unknown := [index for index in wanted if index >= len(seats)]:
            raise InvalidInput(
                "there is no such place for a worker",
                seen=unknown[0],
                allowed=f"0..{len(seats) - 1}",
            )
        return [seats[index] for index in wanted]

    async def _each(
        self, seats: Iterable[Seat], work: Callable[[Seat], Coroutine[Any, Any, None]]
    ) -> list[PacelineError | None]:
        """What has become of each."""
        tasks = []
        for seat in seats:
            task = self._under_way.get(seat.index)
            if task is None:
                task = self._under_way[seat.index] = asyncio.create_task(work(seat))
                task.add_done_callback(partial(self._ended, seat.index))
            tasks.append(task)
        answers = await asyncio.gather(*map(asyncio.shield, tasks), return_exceptions=True)
        for answer in answers:
            if answer is not None and not isinstance(answer, PacelineError):
                raise answer
        return [answer for answer in answers if isinstance(answer, PacelineError | None)]

    def _ended(self, index: int, task: asyncio.Task[None]) -> None:
        del self._under_way[index]

    async def _add(self, seat: Seat) -> None:
        try:
            if seat.vacant:
                await self._router.keeper.add(seat)
        except (PacelineError, OSError) as error:
            log.error("an added worker does not start", worker=seat.index, error=str(error))
            message = f"engine worker {seat.index} does not start"
            raise FailedPrecondition(message, seen=error) from error
        log.info("worker added", worker=seat.index)
        self._changed()
        self._note()
        self._router.loans.place_held()

    async def _drain(self, seat: Seat, drain_s: float) -> None:
        try:
            await self._router.loans.drain(seat, drain_s, "drain")
        except DeadlineExceeded as error:
            log.warning("a worker that leaves is ended", worker=seat.index, error=str(error))
            if seat.process is not None:
                seat.process.kill()
            await seat.idle_for(0)  # its keeper has its requests go on elsewhere
        await self._router.keeper.remove(seat)
        log.info("worker drained", worker=seat.index)
        self._note()

    def _changed(self) -> None:
        self._on_change(len(self._router.members))

    def _note(self) -> None:
        """Those that are on their way do not count yet: they come or go anew after a restart."""
        if self._file is not None:
            vacant = [
                seat.index for seat in self._router.seats if seat.vacant and seat.process is None
            ]
            write_whole(self._file, json.dumps({"vacant": vacant}))
