"""Lends the workers' slots to trainers and takes them back, under the coordinator's leases.

A lent worker gets no requests and has released its memory. Its requests end first, or are suspended
and continue on another worker. When all workers are lent, requests wait.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from paceline.errors import DataLoss, DeadlineExceeded, InvalidInput, PacelineError, Unavailable
from paceline.local.news import tell_supervisor
from paceline.rpc import EPOCHS, EpochGuard, Track
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.services.rollout_gateway.workers.placement import Seat, WaitingRequests
from paceline.services.rollout_gateway.workers.process import ANSWER_S, WorkerProcess
from paceline.telemetry import Attributes, get_logger, names, span
from paceline.v1 import engine_pb2 as pb
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.whole_files import write_whole

DRAIN_S = 5.0
"""Default seconds that a worker's requests get to end before the slot is lent."""
MOST_DRAIN_S = 3600.0

OUTLASTS_S = 30.0
"""Default seconds that a lease outlasts its coordinator; a killed coordinator is back sooner."""
MOST_OUTLASTS_S = 7 * 86_400.0
LENDING_EPOCHS = f"lending_{EPOCHS}"

Place = Callable[[Generation], None]

log = get_logger(__name__)


class Lending:
    """Tracks the lent workers and serialises the leases: commands of an older lease are refused.

    Returns lent workers when no coordinator has listened for as long as their lease may outlast it.
    The router owns their requests. For use on one event loop.
    """

    def __init__(
        self, seats: Sequence[Seat], traffic: WaitingRequests, config: GatewayConfig, place: Place
    ) -> None:
        """place: finds a worker for a request."""
        self._seats = seats
        self._traffic = traffic
        self._place = place
        self.on_return: Callable[[WorkerProcess], Awaitable[None]] = WorkerProcess.restore_memory
        """Awaited when a lent worker returns. Restores its memory, and may check its set."""
        # The file keeps the lent workers over a restart; None keeps nothing.
        self._file = config.spool and config.spool / "lent.json"
        # Separate from the weights' guard, since a push under the previous lease stays valid.
        self._guard = EpochGuard(config.security, config.spool and config.spool / LENDING_EPOCHS)
        self._turn = asyncio.Lock()
        self._outlasts_s: float | None = None  # None while no worker is lent
        self.epoch = 0  # of the newest lease
        self._listeners = 1  # no coordinator can listen before `start`
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def restore_leases(self) -> None:
        """Restore the leases of the previous process. Call before workers start.

        Raises DataLoss when the file is damaged.
        """
        if self._file is None or not self._file.exists():
            return
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            lent = [int(index) for index in found["workers"]]
            outlasts_s, epoch = float(found["outlasts_s"]), int(found["epoch"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            message = f"the list of lent workers in {self._file} is damaged"
            allowed = "remove it when no trainer of the run is alive"
            raise DataLoss(message, seen=str(error)[:120], allowed=allowed) from error
        for seat in self._seats:  # lent workers release memory at once and get no requests
            seat.released = seat.lent = seat.index in lent
        self.epoch = epoch
        self._outlasts_s = outlasts_s if any(seat.lent for seat in self._seats) else None

    def _note_lent(self, lent: Iterable[int], outlasts_s: float | None = None) -> None:
        if self._file is not None:
            noted = {"workers": sorted(lent), "outlasts_s": outlasts_s or 0.0, "epoch": self.epoch}
            write_whole(self._file, json.dumps(noted))
        self._outlasts_s = outlasts_s
        self._renew()

    async def grant(
        self, context: CommandContext, workers: Iterable[int], drain_s: float, outlasts_s: float
    ) -> dict[int, int]:
        """Lend workers under a new lease of their slots; returns the released bytes by worker.

        drain_s: see lend. outlasts_s: seconds that the lease outlasts its coordinator. Raises
        StaleEpoch, InvalidInput for an index out of range, ResourceExhausted on a full disk, and
        the errors of lend.
        """
        wanted = sorted(set(workers))
        if unknown := [index for index in wanted if index >= len(self._seats)]:
            allowed = f"0..{len(self._seats) - 1}"
            raise InvalidInput("there is no such worker", seen=unknown[0], allowed=allowed)
        if not 0 <= drain_s <= MOST_DRAIN_S:
            raise InvalidInput("drain_s", seen=drain_s, allowed=f"0 to {MOST_DRAIN_S:g} s")
        if not 0 < outlasts_s <= MOST_OUTLASTS_S:
            allowed = f"above 0, at most {MOST_OUTLASTS_S:g} s"
            raise InvalidInput("outlasts_s", seen=outlasts_s, allowed=allowed)
        async with self._turn:
            self._guard.check(context, Track.SLOTS)
            self.epoch = context.epoch
            lent = {seat.index for seat in self._seats if seat.lent}
            self._note_lent({*lent, *wanted}, outlasts_s)
            numbers = [self._seats[index].number for index in wanted]
            about: Attributes = {names.WORKERS: numbers, names.EPOCH: context.epoch}
            with span(names.WORKERS_RELEASE, about) as current:
                freed = await asyncio.gather(*(self.lend(index, drain_s) for index in wanted))
                current.set_attribute(names.RELEASED_BYTES, sum(freed))
        return dict(zip(wanted, freed, strict=True))

    async def revoke(self, context: CommandContext) -> list[int]:
        """Take all lent workers back; returns their indices. Raises StaleEpoch, and
        ResourceExhausted on a full disk.
        """
        async with self._turn:
            self._guard.check(context, Track.SLOTS)
            self.epoch = context.epoch
            with span(names.WORKERS_RESUME, {names.EPOCH: context.epoch}) as current:
                back = await self.take_back()
                numbers = [self._seats[index].number for index in back]
                current.set_attribute(names.WORKERS, numbers)
            self._note_lent(())
        return back

    def start(self) -> None:
        """Coordinators can listen from now on."""
        self._listeners -= 1
        self._renew()

    async def stop(self) -> None:
        """Stop the expiry of leases for good."""
        self._listeners += 1
        self._renew()
        await cancel(self._ending)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block the coordinator is connected, and no lease expires."""
        self._listeners += 1
        self._renew()
        try:
            yield
        finally:
            self._listeners -= 1
            self._renew()

    def _renew(self) -> None:
        """Restart the timer; it runs while workers are lent and no coordinator listens."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._outlasts_s is not None and not self._listeners:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._outlasts_s, self._expire)

    def _expire(self) -> None:
        self._ending = background(self._end_leases(), "expiry of leases")

    async def _end_leases(self) -> None:
        after_s = self._outlasts_s
        try:
            async with self._turn:
                if self._listeners:
                    return
                back = await self.take_back()
                self._note_lent(())
        except PacelineError as error:
            log.error("expired leases cannot be ended", error=str(error))
            self._renew()
            return
        if back:
            message = f"workers {back} serve again: their coordinator is gone for {after_s:g} s"
            log.warning("leases have expired", workers=back, after_s=after_s)
            tell_supervisor("recovered", message)

    def release(self, index: int) -> None:
        """Send no more requests to the worker; its unsent requests move or wait. Idempotent."""
        self._seats[index].released = True
        for generation in self._seats[index].take_unsent():
            self._place(generation)

    async def lend(self, index: int, drain_s: float = DRAIN_S) -> int:
        """Have a worker release its memory; returns the bytes, 0 if the engine cannot release
        memory.

        Its requests get `drain_s` seconds to end. Then they are suspended and continue from their
        tokens on another worker, or here after the worker's return. Raises DeadlineExceeded when
        they do not stop, and the worker's errors.
        """
        self.release(index)
        seat = self._seats[index]
        seat.spare = False
        if not await seat.idle_within(drain_s):
            if seat.process is not None and (suspended := seat.suspend("lease")):
                asked = pb.AbortRequests(request_ids=suspended)
                seat.process.send(pb.WorkerCommand(abort=asked))
            if not await seat.idle_within(ANSWER_S):
                message = f"requests of engine worker {index} do not stop"
                raise DeadlineExceeded(message, seen=f"{ANSWER_S:g} s")
        if seat.lent:
            return 0
        seat.lent = True
        try:
            return await seat.process.release_memory() if seat.process is not None else 0
        except Unavailable:
            return 0  # the worker is lost; its replacement releases memory before it serves

    def spare(self, index: int) -> None:
        """Release an idle worker and offer its slot to trainers."""
        self._seats[index].spare = True
        self.release(index)

    def keep_spare(self) -> None:
        """Return spare workers that no trainer has taken to service."""
        for seat in self._seats:
            if seat.spare:
                seat.spare = seat.released = False
        self._place_held()

    async def take_back(self) -> list[int]:
        """Restore the memory of all released workers and send them requests again; returns their
        indices.

        A worker that fails is replaced.
        """
        back = [seat for seat in self._seats if seat.released]
        await asyncio.gather(*(self._return(seat) for seat in back))
        for seat in back:
            seat.released = seat.spare = False
        self._place_held()
        return [seat.index for seat in back]

    def _place_held(self) -> None:
        """Place the held requests again."""
        for generation in self._traffic.remove_all():
            self._place(generation)

    async def _return(self, seat: Seat) -> None:
        lent, seat.lent = seat.lent, False
        process = seat.process
        if not lent or process is None:
            return
        try:
            await self.on_return(process)
        except PacelineError as error:
            log.error("a lent worker does not come back; it is replaced", error=str(error))
            await process.replace()
