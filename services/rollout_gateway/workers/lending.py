"""Lends the workers' slots to trainers and takes them back, as the coordinator's leases say.

A worker that is lent out gets no request and has given its memory back. Its requests end first, or
are suspended and go on elsewhere; where all workers are lent they wait.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from paceline.errors import (
    DataLoss,
    DeadlineExceeded,
    InvalidInput,
    PacelineError,
    Unavailable,
)
from paceline.rpc import EpochGuard, Track
from paceline.services.rollout_gateway.engines.nouns import Capability
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.services.rollout_gateway.workers.held import HeldRequests
from paceline.services.rollout_gateway.workers.placement import Seat
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.telemetry import Attributes, get_logger, names, span
from paceline.v1 import engine_pb2 as pb
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.whole_files import write_whole

DRAIN_S = 5.0
"""Seconds that the requests of a worker have to end before it is lent out, where nobody says."""
MOST_DRAIN_S = 3600.0

OUTLASTS_S = 30.0
"""Seconds that a lease is good without its coordinator, where that does not say: one that was
killed is back sooner.
"""
MOST_OUTLASTS_S = 7 * 86_400.0

log = get_logger(__name__)


class Loans:
    """Which workers are lent out; requests are the router's."""

    def __init__(
        self,
        seats: Sequence[Seat],
        held: HeldRequests,
        deadline_s: float,
        place: Callable[[Generation], None],
    ) -> None:
        """deadline_s: of a worker's answer; place: finds a request its worker."""
        self._seats = seats
        self._held = held
        self._deadline_s = deadline_s
        self._place = place
        self.on_return: Callable[[WorkerProcess], Awaitable[None]] | None = None
        """Awaited when a lent worker comes back: takes its memory and checks what it serves."""

    @property
    def lent(self) -> list[int]:
        """Workers that have given their memory back."""
        return [seat.index for seat in self._seats if seat.lent]

    def numbers(self, workers: Iterable[int]) -> list[int]:
        """Of workers among all of the run, as spans have them."""
        return [self._seats[index].number for index in workers]

    def keep(self, workers: Iterable[int]) -> None:
        """These give their memory back as soon as they start, and get no request."""
        for index in workers:
            self._seats[index].released = self._seats[index].lent = True

    def release(self, index: int) -> None:
        """No request goes to the worker any more: to others, or it waits. Idempotent."""
        self._seats[index].released = True
        for generation in self._seats[index].take_unsent():
            self._place(generation)

    async def _drain(self, seat: Seat, drain_s: float) -> None:
        """Returns when no request runs there: they get `drain_s` seconds to end, then they are
        suspended. Raises DeadlineExceeded when they do not stop.
        """
        if await seat.idle_within(drain_s):
            return
        if seat.process is not None and (suspended := seat.suspend("lease")):
            asked = pb.AbortRequests(request_ids=suspended)
            seat.process.send(pb.WorkerCommand(abort=asked))
        if not await seat.idle_within(self._deadline_s):
            raise DeadlineExceeded(
                f"requests of engine worker {seat.index} do not stop",
                seen=f"{self._deadline_s:g} s",
            )

    async def lend(self, index: int, drain_s: float = DRAIN_S) -> int:
        """Have a worker give its memory back; returns bytes, 0 where it keeps it.

        Its requests get `drain_s` seconds to end; then they are suspended, and go on from their
        tokens on another worker, or here when it is back. Raises DeadlineExceeded when they do not
        stop, and what the worker says.
        """
        self.release(index)
        seat = self._seats[index]
        seat.spare = False
        await self._drain(seat, drain_s)
        if seat.lent:
            return 0
        seat.lent = True
        try:
            return await self.free(seat.process) if seat.process is not None else 0
        except Unavailable:
            return 0  # lost; the next one gives its memory back before it serves

    async def follow(self, seat: Seat, process: WorkerProcess, *, away: bool) -> bool:
        """Has a worker that starts give its memory back while its seat is lent, and take its memory
        again when the seat returns. Returns whether the memory is away now.
        """
        lent = seat.lent
        if lent and not away:
            await self.free(process)
        elif away and not lent and self.on_return is not None:
            await self.on_return(process)
        return lent

    async def free(self, process: WorkerProcess) -> int:
        """A worker gives its memory back; returns bytes, 0 where it keeps it."""
        if Capability.RELEASE_MEMORY not in process.ready.capabilities:
            return 0
        command = pb.WorkerCommand(release_memory=pb.ReleaseMemory())
        return (await process.ask(command, self._deadline_s)).done.released_bytes

    def spare(self, index: int) -> None:
        """The worker has nothing to do: it is released, and a trainer may ask for it."""
        self._seats[index].spare = True
        self.release(index)

    def keep_spare(self) -> None:
        """Spare workers that no trainer has asked for get requests again."""
        for seat in self._seats:
            if seat.spare:
                seat.spare = seat.released = False
        self._place_held()

    async def wake(self, process: WorkerProcess) -> None:
        """A worker that has given its memory back takes it again. Raises what it says."""
        if Capability.RELEASE_MEMORY in process.ready.capabilities:
            command = pb.WorkerCommand(resume_memory=pb.ResumeMemory())
            await process.ask(command, self._deadline_s)

    async def take_back(self) -> list[int]:
        """All released workers have their memory and get requests again; returns which they were.

        One that cannot is replaced.
        """
        back = [seat for seat in self._seats if seat.released]
        await asyncio.gather(*(self._return(seat) for seat in back))
        for seat in back:
            seat.released = seat.spare = False
        self._place_held()
        return [seat.index for seat in back]

    def _place_held(self) -> None:
        """Requests that wait look for a worker again."""
        for generation in self._held.take_all():
            self._place(generation)

    async def _return(self, seat: Seat) -> None:
        lent, seat.lent = seat.lent, False
        process = seat.process
        if not lent or process is None or self.on_return is None:
            return
        try:
            await self.on_return(process)
        except PacelineError as error:
            log.error("a lent worker does not come back; it is replaced", error=str(error))
            process.kill()
            # Nothing is sent to it any more; its keeper starts another.
            await asyncio.shield(process.lost)


class Lending:
    """One lease after the other: what an older one still asks for is refused."""

    def __init__(self, loans: Loans, workers: int, guard: EpochGuard, file: Path | None) -> None:
        """guard: of its own, since a push under the lease before stays welcome. `file`: keeps which
        workers are lent out over a restart; None forgets it.
        """
        self._loans = loans
        self._file = file
        self._workers = workers
        self._guard = guard
        self._turn = asyncio.Lock()
        self.outlasts_s: float | None = None
        """Seconds that leases outlast their coordinator; None while no worker is lent."""
        self.epoch = 0  # of the newest lease
        self.on_lent: Callable[[], None] = lambda: None
        """Called when workers were lent."""

    def take_up(self) -> None:
        """What was lent when the process before this one ended is lent still. Before workers start.

        Raises DataLoss when the file is damaged.
        """
        if self._file is None or not self._file.exists():
            return
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            lent = [int(index) for index in found["workers"]]
            outlasts_s, epoch = float(found["outlasts_s"]), int(found["epoch"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataLoss(
                f"{self._file} does not say which workers are lent",
                seen=str(error)[:120],
                allowed="remove it when no trainer of the run is alive",
            ) from error
        self._loans.keep(index for index in lent if 0 <= index < self._workers)
        self.epoch = epoch
        self._lent_for(outlasts_s if self._loans.lent else None)

    def _note(self, lent: Iterable[int], outlasts_s: float = 0.0) -> None:
        if self._file is not None:
            noted = {"workers": sorted(lent), "outlasts_s": outlasts_s, "epoch": self.epoch}
            write_whole(self._file, json.dumps(noted))

    def _lent_for(self, outlasts_s: float | None) -> None:
        self.outlasts_s = outlasts_s
        self.on_lent()

    async def release(
        self,
        context: CommandContext,
        workers: Iterable[int],
        drain_s: float = DRAIN_S,
        outlasts_s: float = OUTLASTS_S,
    ) -> dict[int, int]:
        """Bytes that each of the workers has given back, under a new lease of its slots.

        drain_s: see Loans.lend; outlasts_s: for how long the lease is good without its coordinator.
        Raises StaleEpoch, InvalidInput for a worker that is not there, ResourceExhausted on a full
        disk, and what Loans.lend does.
        """
        wanted = sorted(set(workers))
        if unknown := [index for index in wanted if index >= self._workers]:
            allowed = f"0..{self._workers - 1}"
            raise InvalidInput("there is no such worker", seen=unknown[0], allowed=allowed)
        if not 0 <= drain_s <= MOST_DRAIN_S:
            raise InvalidInput("drain_s", seen=drain_s, allowed=f"0 to {MOST_DRAIN_S:g} s")
        if not 0 < outlasts_s <= MOST_OUTLASTS_S:
            allowed = f"above 0, at most {MOST_OUTLASTS_S:g} s"
            raise InvalidInput("outlasts_s", seen=outlasts_s, allowed=allowed)
        async with self._turn:
            self._guard.check(context, Track.SLOTS)
            self.epoch = context.epoch
            self._note({*self._loans.lent, *wanted}, outlasts_s)
            self._lent_for(outlasts_s)
            numbers = self._loans.numbers(wanted)
            about: Attributes = {names.WORKERS: numbers, names.EPOCH: context.epoch}
            with span(names.WORKERS_RELEASE, about) as current:
                freed = await asyncio.gather(
                    *(self._loans.lend(index, drain_s) for index in wanted)
                )
                current.set_attribute(names.RELEASED_BYTES, sum(freed))
        return dict(zip(wanted, freed, strict=True))

    async def resume(self, context: CommandContext) -> list[int]:
        """The workers that had been lent out and serve again. Raises StaleEpoch, and
        ResourceExhausted on a full disk.
        """
        async with self._turn:
            self._guard.check(context, Track.SLOTS)
            self.epoch = context.epoch
            with span(names.WORKERS_RESUME, {names.EPOCH: context.epoch}) as current:
                back = await self._loans.take_back()
                current.set_attribute(names.WORKERS, self._loans.numbers(back))
            self._all_back()
        return back

    async def expire(self, due: Callable[[], bool]) -> list[int]:
        """Ends all leases without a command if that is still `due`; the workers that come back."""
        async with self._turn:
            if not due():
                return []
            back = await self._loans.take_back()
            self._all_back()
        return back

    def _all_back(self) -> None:
        self._note(())
        self._lent_for(None)
