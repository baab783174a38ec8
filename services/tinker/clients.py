"""Runs the calls of training clients: each client's in the order of its seq ids, and one client at
a time on the learner.

A client keeps the learner until its optimiser step, because gradients are not saved. Before another
client's turn, the learner's state is written, and that client's state is read.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count

from paceline.errors import FailedPrecondition, InvalidInput, PacelineError
from paceline.services.tinker.futures import LOST, Future, Futures, Result
from paceline.services.tinker.trainer import Trainer
from paceline.v1 import policy_pb2 as pb

Work = Callable[[], Awaitable[Result]]


@dataclass(slots=True)
class TrainingClient:
    """A training client and its learner."""

    model_id: str
    session_id: str
    learner: pb.CreateLearner = field(default_factory=pb.CreateLearner)  # rank, layers and seed
    saved: str = ""  # newest state with the optimiser's, below the folder; "": the start
    changed: bool = False  # since `saved`
    gradient: bool = False  # since the last optimiser step
    lost: str = ""  # cause, if the trainer has lost its learner
    next_seq: int = 0
    waiting: dict[int, tuple[Future, Work]] = field(default_factory=dict)
    samplers: deque[str] = field(default_factory=deque)  # paths of unnamed samplers

    @property
    def folder(self) -> str:
        """Its directory of saved states, below the folder of all clients."""
        return self.model_id.replace(":", "-")

    @property
    def runnable(self) -> bool:
        """Whether its next call is here."""
        return self.next_seq in self.waiting


class Clients:
    """All training clients. Use on one event loop, with `run` as a task."""

    def __init__(
        self, trainer: Trainer, futures: Futures, gap_s: float, first_save: int = 1
    ) -> None:
        """`first_save`: number of the first checkpoint, above the numbers of earlier processes."""
        self._trainer, self._futures, self._gap_s = trainer, futures, gap_s
        self._clients: OrderedDict[str, TrainingClient] = OrderedDict()  # longest idle first
        self._loaded: TrainingClient | None = None  # of which the trainer holds the learner
        self._over = False  # the turn of this client is over
        self._work = asyncio.Event()
        self._saves = count(first_save)

    def find(self, model_id: str) -> TrainingClient | None:
        """The client of that name."""
        return self._clients.get(model_id)

    def add(self, client: TrainingClient) -> None:
        """Takes a new client."""
        self._clients[client.model_id] = client

    def drop(self, client: TrainingClient) -> None:
        """Ends a client; its waiting calls fail."""
        self._clients.pop(client.model_id, None)
        self._fail(client, FailedPrecondition("the session has ended", seen=client.model_id))
        client.gradient = False
        self._work.set()

    def submit(self, client: TrainingClient, seq: int, size: int, work: Work) -> Future:
        """Queues a call; a repeated call gets the future of the first one.

        Raises InvalidInput for the number of an earlier call, ResourceExhausted without room.
        """
        name = f"{client.model_id}:{seq}"
        found = self._futures.find(name)
        if found is not None:
            return found
        if seq < client.next_seq:
            message = "seq_id is the number of an earlier call"
            raise InvalidInput(message, seen=seq, allowed=f"{client.next_seq} or more")
        future = self._futures.open(name, size)
        client.waiting[seq] = (future, work)
        self._work.set()
        if seq != client.next_seq:
            self._await_earlier(client, seq)
        return future

    def _await_earlier(self, client: TrainingClient, seq: int) -> None:
        asyncio.get_running_loop().call_later(self._gap_s, self._miss, client, seq)

    def _miss(self, client: TrainingClient, seq: int) -> None:
        """Fails the waiting calls of a client if the call before them has not arrived."""
        if seq in client.waiting and client.runnable:
            self._await_earlier(client, seq)
        elif seq in client.waiting:
            missing, client.next_seq = client.next_seq, max(client.waiting) + 1
            message = "an earlier call of the client did not arrive"
            self._fail(client, InvalidInput(message, allowed=f"a call with seq_id {missing}"))

    def _fail(self, client: TrainingClient, error: PacelineError) -> None:
        for future, _ in client.waiting.values():
            self._futures.settle(future, Result.failed(error))
        client.waiting.clear()

    async def run(self) -> None:
        """Runs the calls for ever."""
        while True:
            client = self._next()
            if client is None:
                self._work.clear()
                await self._work.wait()
                continue
            future, work = client.waiting.pop(client.next_seq)
            client.next_seq += 1
            await self._futures.run(future, work())

    def _next(self) -> TrainingClient | None:
        """The client whose call is next: the holder of a gradient, the present client until its
        optimiser step, then each client in turn.
        """
        present = self._loaded
        if present is not None and present.gradient:
            return present if present.runnable else None
        if present is not None and present.runnable and not self._over:
            return present
        self._over = False
        client = next((one for one in self._clients.values() if one.runnable), None)
        if client is not None:
            self._clients.move_to_end(client.model_id)
        return client

    # --- the learner ------------------------------------------------------------------------------

    async def create(
        self, client: TrainingClient, path: str = "", *, optimizer: bool = True
    ) -> None:
        """Makes the trainer hold a learner for the client, from its settings or a saved state."""
        await self._put_away(client)
        self._loaded = None
        order = pb.CreateLearner(path=path, optimizer=optimizer)
        order.MergeFrom(client.learner)
        answer = await self._trainer.order(client.model_id, create=order)
        client.learner.rank, client.learner.targets[:] = answer.rank, answer.targets
        client.saved, client.changed = (path, False) if optimizer else ("", True)
        client.gradient, client.lost = False, ""
        self._loaded = client

    async def order(self, client: TrainingClient, **order: object) -> pb.LearnResponse:
        """The answer of the client's learner to an order.

        Raises the trainer's errors, and FailedPrecondition (LEARNER_LOST) if the trainer has lost
        steps or gradients of the client.
        """
        while True:
            if client.lost:
                message = f"the trainer has lost steps of the client: {client.lost}"
                allowed = "load_state, or a new training client from a saved state"
                raise FailedPrecondition(message, reason=LOST, allowed=allowed)
            if self._loaded is not client:
                await self.create(client, client.saved)
            try:
                return await self._trainer.order(client.model_id, **order)
            except FailedPrecondition as error:
                if error.reason != LOST:
                    raise
                self._loaded = None
                if client.changed or client.gradient:
                    client.lost, client.gradient = error.message, False

    async def save(self, client: TrainingClient, path: str, *, weights_only: bool) -> None:
        """Writes the client's state."""
        number = next(self._saves)
        order = pb.SaveLearner(path=path, number=number, weights_only=weights_only)
        await self.order(client, save=order)
        if not weights_only:
            client.saved, client.changed = path, False

    def end_turn(self) -> None:
        """Lets other clients have the learner."""
        self._over = True

    async def _put_away(self, client: TrainingClient) -> None:
        """Writes the state of another client that the trainer holds."""
        before = self._loaded
        alive = before is not None and before.model_id in self._clients
        if before is None or before is client or not (alive and before.changed):
            return
        try:
            await self.save(before, f"{before.folder}/resident", weights_only=False)
        except PacelineError:
            if not before.lost:  # else its own next call reports it
                raise
