"""Sends requests to the engine workers and delivers their tokens.

When a worker is lost, its requests continue from the tokens received, on its replacement or another
worker. Sessions and rewards are outside the router.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.errors import InternalError, PacelineError, Unavailable
from paceline.local.forking import Forker
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.engines.worker.ring import RowArray
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.services.rollout_gateway.workers.lending import Lending
from paceline.services.rollout_gateway.workers.local import LocalWorkers
from paceline.services.rollout_gateway.workers.metrics import EngineMetrics
from paceline.services.rollout_gateway.workers.placement import Seat, WaitingRequests, choose
from paceline.services.rollout_gateway.workers.process import ANSWER_S, WorkerProcess
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

MAX_TRIES = 3
PROMPTS_KEPT, PROMPT_TOKENS_KEPT = 4, 256


class Router:
    """Routes requests to the workers of a gateway. Use on one event loop: start, submit, stop."""

    def __init__(
        self,
        config: GatewayConfig,
        on_rows: Callable[[RowArray], None],
        on_discard: Callable[[int], None],
        forker: Forker | None = None,
    ) -> None:
        """on_discard: discards a request's rows, because its next try sends them again. forker: see
        LocalWorkers.
        """
        self._on_rows = on_rows
        self._on_discard = on_discard
        first = config.number * config.worker_count
        self.seats = [Seat(i, first=first) for i in range(config.worker_count)]
        """Places of the workers, by index."""
        self.ready = pb.WorkerReady()
        """See Routing."""
        self.keeper = LocalWorkers(config, self.seats, self, forker)
        self._flushing = False
        wait_s, at_once = config.queue.wait_s, config.engine.max_batch
        self.traffic = WaitingRequests(self.seats, wait_s, at_once, config.reclaim_after_s)
        self.lending = Lending(self.seats, self.traffic, config, self._place)
        self.on_ready: Callable[[WorkerProcess], Any] | None = None
        """Awaited before a worker gets requests: loads the committed versions."""
        self.orders: Callable[[], object] = lambda: None
        """Orders for every worker, compared before and after `on_ready`."""
        self.rows_dropped = [0] * config.worker_count
        self.metrics = EngineMetrics(config.engine.kind)
        self.prompts: deque[list[int]] = deque(maxlen=PROMPTS_KEPT)
        """Ends of the newest prompts, for probes."""

    def processes(self) -> list[WorkerProcess]:
        """Workers that serve now."""
        return [seat.process for seat in self.seats if seat.process is not None]

    async def start(self) -> None:
        """Start all workers; returns when all serve.

        A worker that finds the serving set damaged may start later, after the next push. Raises the
        first start's error.
        """
        try:
            await self.keeper.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End requests with an error, and shut the workers down."""
        await self.keeper.stop_keeping()
        for seat in self.seats:
            self.fail_requests(seat, "the gateway is stopping")
        for generation in self.traffic.remove_all():
            generation.fail("the gateway is stopping")
        await self.keeper.stop()

    def submit(
        self,
        request: pb.EngineRequest,
        *,
        worker: int | None = None,
        prefer: int | None = None,
        rerun: bool = True,
    ) -> Generation:
        """Queue a request: on `worker` only, else on `prefer` unless it is gone, released or
        overloaded.

        Otherwise the least loaded worker gets it; see placement.choose. The request waits while
        none of these workers serves. rerun False: it ends as unavailable when its worker is lost
        and no other worker serves.
        """
        generation = Generation(request, worker, rerun=rerun)
        self.prompts.append(list(request.prompt_token_ids[-PROMPT_TOKENS_KEPT:]))
        self._place(generation, prefer)
        return generation

    def abort(self, generation: Generation) -> None:
        """Stop a request; it ends with FINISH_REASON_ABORT."""
        seat = self.seats[generation.worker_index]
        request_id = generation.request.request_id
        ended = pb.TokenChunk(request_id=request_id, finish_reason=tpb.FINISH_REASON_ABORT)
        if self.traffic.remove(generation):
            generation.accept(ended)
        if request_id not in seat.live:
            return
        seat.moving.pop(request_id, None)
        if generation in seat.unsent or seat.process is None:
            seat.unsent = [one for one in seat.unsent if one is not generation]
            self._deliver(seat, ended)
        else:
            seat.process.send(pb.WorkerCommand(abort=pb.AbortRequests(request_ids=[request_id])))

    async def ask_all(
        self,
        command: pb.WorkerCommand,
        processes: Iterable[WorkerProcess] | None = None,
        deadline_s: float = ANSWER_S,
    ) -> list[Any]:
        """Send a command to workers in parallel (default: all serving workers). Returns answers or
        exceptions, in their order.

        deadline_s: of each answer.
        """
        asked = list(self.processes() if processes is None else processes)
        copies = [pb.WorkerCommand() for _ in asked]
        for copy in copies:
            copy.CopyFrom(command)
        pairs = zip(asked, copies, strict=True)
        answers = (process.ask(copy, deadline_s) for process, copy in pairs)
        return await asyncio.gather(*answers, return_exceptions=True)

    async def healths(self, deadline_s: float = ANSWER_S) -> dict[int, pb.WorkerHealth]:
        """Load and statistics by worker, without the workers that do not answer. Also records them
        as metrics.

        deadline_s: of each answer.
        """
        processes = self.processes()
        command = pb.WorkerCommand(get_health=pb.GetHealth())
        answers = await self.ask_all(command, processes, deadline_s)
        found: dict[int, pb.WorkerHealth] = {}
        for process, answer in zip(processes, answers, strict=True):
            if isinstance(answer, pb.WorkerEvent):
                found[process.index] = answer.health
                self.metrics.record_health(process.ready, answer.health)
        return found

    async def probe(self, seat: Seat, requests: Sequence[pb.EngineRequest]) -> list[pb.TokenChunk]:
        """Whole answers of the worker in this place, also while it is lent. A lost worker gives
        answers with an error.
        """
        probes = [Generation(request, seat.index) for request in requests]
        for generation in probes:
            seat.add(generation)
        self.flush_requests()
        try:
            for generation in probes:
                async for _ in generation.chunks():
                    pass
        finally:
            for generation in probes:
                self.abort(generation)
        return [generation.whole for generation in probes]

    def deliver_withheld(self, seat: Seat) -> None:
        """Deliver the chunks that were withheld while the worker's weights were on trial."""
        chunks, seat.withheld = seat.withheld or [], None
        self._deliver_all(seat, chunks)

    def _place(self, generation: Generation, prefer: int | None = None) -> None:
        pinned = generation.pinned
        seat = choose(self.seats, prefer) if pinned is None else self.seats[pinned]
        if seat is None or seat.released:
            self.traffic.hold(generation)
            return
        seat.add(generation)
        self.traffic.update()
        if not self._flushing:
            # Requests of one turn of the event loop leave in one message, so that the engine admits
            # them together.
            self._flushing = True
            asyncio.get_running_loop().call_soon(self.flush_requests)

    def flush_requests(self) -> None:
        """Send the unsent requests of every place with a worker."""
        self._flushing = False
        for seat in self.seats:
            if seat.process is not None and seat.unsent:
                requests = [generation.request for generation in seat.unsent]
                seat.unsent = []
                seat.process.send(pb.WorkerCommand(enqueue=pb.EnqueueRequests(requests=requests)))

    async def equip_worker(self, seat: Seat, process: WorkerProcess) -> None:
        """See Routing. Repeats until no order has changed meanwhile. While the seat is lent, the
        worker releases its memory.
        """
        given, away = object(), False
        while given != (now := (self.orders(), seat.lent)):
            given = now
            if self.on_ready is not None:
                await self.on_ready(process)
            lent = seat.lent
            if lent and not away:
                await process.release_memory()
            elif away and not lent:
                await self.lending.on_return(process)
            away = lent

    def deliver_tokens(self, seat: Seat, tokens: pb.TokensEmitted, rows: RowArray | None) -> None:
        """See Routing."""
        seat.activity.moves()
        self.rows_dropped[seat.index] = tokens.rows_dropped
        if rows is not None and len(rows):
            self._on_rows(rows)
        self._deliver_all(seat, tokens.chunks)

    def _deliver_all(self, seat: Seat, chunks: Iterable[pb.TokenChunk]) -> None:
        if told := sum([self._deliver(seat, chunk) for chunk in chunks]):
            metrics.TOKENS.record(told)

    def _deliver(self, seat: Seat, chunk: pb.TokenChunk) -> int:
        """Deliver a chunk of one request; returns the number of tokens with a reader."""
        request_id = chunk.request_id
        generation = seat.live.get(request_id)
        if generation is None:
            return 0
        if seat.withheld is not None and not generation.request.probe:
            seat.withheld.append(chunk)
            return 0
        moves = chunk.finish_reason == tpb.FINISH_REASON_ABORT and request_id in seat.moving
        if moves:
            generation.suspend_try(chunk)
        else:
            generation.accept(chunk)
        if moves or generation.finished:
            self._leaves(seat, generation)
        return len(chunk.token_ids)

    def _leaves(self, seat: Seat, generation: Generation) -> None:
        """A request has left its worker: it has ended, or continues on another place."""
        request_id = generation.request.request_id
        reason = seat.moving.pop(request_id, None)
        seat.end(request_id)
        if generation.finished:
            self.traffic.update()
            self.metrics.record_end(generation)
            return
        metrics.REQUESTS_SUSPENDED.record(reason=str(reason))
        self._on_discard(request_id)
        self._place(generation)

    def lose_worker(self, seat: Seat) -> None:
        """See Routing."""
        sent, unsent = seat.clear()
        for generation in sent:
            generation.lose_worker()
            self._on_discard(generation.request.request_id)
        for generation in (*sent, *unsent):
            if generation.tries >= MAX_TRIES:
                times = generation.tries
                generation.fail(f"the engine worker was lost {times} times under this request")
            elif generation.request.probe:  # bound to this one worker
                generation.fail("the engine worker was lost", Unavailable)
            elif not generation.rerun and not self.processes():
                generation.fail("the engine is starting again; try later", Unavailable)
            else:
                self._place(generation)

    def fail_requests(
        self, seat: Seat, message: str, kind: type[PacelineError] = InternalError
    ) -> None:
        """See Routing."""
        for generations in seat.clear():
            for generation in generations:
                generation.fail(message, kind)
