"""Starts one process per rank of a trainer and exchanges messages with these processes.

The parent imports no torch. Ranks find each other through a file in the parent's process directory,
and listen on loopback only.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from paceline.config import Config
from paceline.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from paceline.local.child import LIMIT_S, Child
from paceline.local.forking import Forker
from paceline.local.patience import patient
from paceline.local.process_directory import socket_directory
from paceline.local.processes import LOOPBACK_ONLY, die_with_parent
from paceline.local.work import WorkClock
from paceline.training import STORE_VARIABLE

SOCKET_VARIABLE = "PACELINE_RANK_SOCKET"
CONFIG_VARIABLE = "PACELINE_RANK_CONFIG"
_READY, _DATA = b"r", b"d"
_MESSAGES_QUEUED = 64
_SEND_S = 10.0
C = TypeVar("C", bound=Config)


class RankLost(Unavailable):
    """A rank process has ended; stop and restart the group. The message's first line states the
    end. The last lines of the rank's log follow.
    """

    reason = "RANK_LOST"


class RankGroup:
    """The parent's handle on the ranks of one trainer."""

    def __init__(
        self,
        module: str,
        world_size: int,
        threads_per_rank: int = 1,
        log_dir: Path = Path("logs"),
        env: Mapping[str, str] | None = None,
        config: Config | None = None,
        preload: Sequence[str] = (),
        heartbeat_s: float = LIMIT_S,
    ) -> None:
        """Creates the group without starting it.

        `config`: settings that the ranks read through RankLink.config. `preload`: modules that
        `module` imports late. `heartbeat_s`: seconds of a stop after which a rank is killed; 0: no
        limit.
        """
        self._module = module
        self._name = ".".join(module.split(".")[-2:])  # the last two parts: service and module
        self._world_size = world_size
        self._log_dir = log_dir
        self._heartbeat_s = heartbeat_s
        own = {"OMP_NUM_THREADS": str(threads_per_rank)}
        if config is not None:
            own[CONFIG_VARIABLE] = config.model_dump_json()
        self._environment = {**(env or {}), **own}
        self._forker = Forker(
            list(dict.fromkeys([module, *preload])), log_dir / f"{self._name}.log"
        )
        self._ranks: list[Child] = []
        self._lost: asyncio.Future[RankLost] | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._context: zmq.asyncio.Context | None = None
        self._folder = ""
        self._early: deque[tuple[int, bytes]] = deque()  # messages sent during the start
        self._clock = WorkClock(lambda: self.pids)
        self.on_progress: Callable[[int, bytes], bool] = lambda rank, message: False
        """Handles a message (rank, payload) during the start; False: the message waits for
        receive().
        """

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; [] before start and after stop."""
        return [rank.pid for rank in self._ranks]

    @property
    def still_s(self) -> float:
        """Counted seconds since the last message of any rank (WorkClock)."""
        return self._clock.counted_s

    async def start(self, deadline_s: float) -> None:
        """Starts all ranks and waits until every rank is ready.

        `deadline_s`: maximum counted seconds without a message of any rank (WorkClock).

        Raises RankLost if a rank ends first, DeadlineExceeded if no rank makes progress. No rank is
        left running then. Raises FailedPrecondition if the ranks already run.
        """
        if self._ranks:
            raise FailedPrecondition("the ranks run already", seen=self.pids)
        self._bind()
        try:
            end = asyncio.get_running_loop().time() + patient(deadline_s)
            for rank in range(self._world_size):
                await self._spawn(rank, end - asyncio.get_running_loop().time())
            await self._all_ready(deadline_s)
        except BaseException:
            await self.stop(0.0)
            raise

    async def send(self, message: bytes) -> None:
        """Sends one message to every rank.

        Raises RankLost if a rank is gone, DeadlineExceeded if a rank accepts no messages.
        """
        for rank in range(self._world_size):
            self._raise_if_lost()
            try:
                async with asyncio.timeout(patient(_SEND_S)):
                    await self._open.send_multipart([b"%d" % rank, _DATA, message])
            except zmq.ZMQError as error:
                raise RankLost(f"rank {rank} of {self._name} is not connected") from error
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"rank {rank} of {self._name} takes no messages for {_SEND_S} s and more"
                ) from error

    async def receive(self, deadline_s: float) -> tuple[int, bytes]:
        """Returns the next message of any rank, as (rank, bytes).

        Raises RankLost if a rank ends meanwhile. Raises DeadlineExceeded after `deadline_s` counted
        seconds without a message (WorkClock).
        """
        if self._early:
            return self._early.popleft()
        rank, _, payload = await self._receive(deadline_s)
        return rank, payload

    async def stop(self, grace_s: float = 5.0) -> None:
        """Sends SIGTERM, waits `grace_s` seconds, then sends SIGKILL. No process is left, and the
        group can start again.
        """
        await self.end_ranks(grace_s)
        await self._forker.close()

    async def end_ranks(self, grace_s: float) -> None:
        """As stop(), but keeps the imported modules in memory, so that the next start is quick."""
        await asyncio.gather(*(rank.stop(grace_s) for rank in self._ranks))
        if any(rank.process.returncode is None for rank in self._ranks):
            await self._forker.close()  # stopped too: it reported no end
        self._ranks, self._lost = [], None
        self._early.clear()
        if self._socket is not None and self._context is not None:
            self._socket.close(linger=0)
            self._context.term()
            self._socket = self._context = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Sends SIGKILL to every rank without waiting; stop() cleans up."""
        for rank in self._ranks:
            rank.kill()

    async def __aenter__(self) -> RankGroup:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    @property
    def _open(self) -> zmq.asyncio.Socket:
        if self._socket is None:
            raise FailedPrecondition(f"the ranks of {self._name} do not run; start() them")
        return self._socket

    def _bind(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="r-", dir=socket_directory())
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.set_hwm(_MESSAGES_QUEUED)
        self._socket.bind(f"ipc://{self._folder}/ranks")
        self._lost = asyncio.get_running_loop().create_future()

    async def _spawn(self, rank: int, deadline_s: float) -> None:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        environment = {
            **self._environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(self._world_size),
            **LOOPBACK_ONLY,
            STORE_VARIABLE: f"{self._folder}/store",
            SOCKET_VARIABLE: f"ipc://{self._folder}/ranks",
        }
        log = self._log_dir / f"{self._name}-rank{rank}.log"
        child = await self._forker.fork(
            self._module, environment, log, deadline_s, stop_s=self._heartbeat_s
        )
        self._ranks.append(child)
        child.ended.add_done_callback(partial(self._note_end, rank, child, self._lost))

    def _note_end(
        self, rank: int, child: Child, lost: asyncio.Future[RankLost] | None, _: object
    ) -> None:
        if lost is not None and not lost.done() and not child.ended.cancelled():
            words, end = child.last_words(), child.last_lines()
            lost.set_result(RankLost(f"rank {rank} of {self._name} {words}\n{end}"))

    async def _all_ready(self, deadline_s: float) -> None:
        waiting = set(range(self._world_size))
        while waiting:
            rank, kind, payload = await self._receive(deadline_s)
            if kind == _READY:
                waiting.discard(rank)
            elif not self.on_progress(rank, payload):
                self._early.append((rank, payload))

    async def _receive(self, deadline_s: float) -> tuple[int, bytes, bytes]:
        self._raise_if_lost()
        lost = self._lost
        if lost is None:
            raise FailedPrecondition(f"the ranks of {self._name} do not run; start() them")
        message: asyncio.Future[list[bytes]] = asyncio.ensure_future(self._open.recv_multipart())
        waits: set[asyncio.Future[Any]] = {message, lost}
        try:
            await self._clock.wait(waits, deadline_s)
        finally:
            if not message.done():
                message.cancel()

        if message.done() and not message.cancelled():
            self._clock.restart()
            identity, kind, payload = message.result()
            return int(identity), kind, payload
        self._raise_if_lost()
        raise DeadlineExceeded(f"no rank of {self._name} spoke in time", seen=f"{deadline_s:.1f} s")

    def _raise_if_lost(self) -> None:
        if self._lost is not None and self._lost.done():
            raise self._lost.result()


class RankLink:
    """The rank's connection to its parent: blocking, for one thread. The rank dies with its parent
    and ignores Ctrl-C.
    """

    def __init__(self, address: str, rank: int) -> None:
        self.rank = rank
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"%d" % rank)
        self._socket.set_hwm(_MESSAGES_QUEUED)
        self._socket.connect(address)

    @classmethod
    def from_environment(cls) -> RankLink:
        """Connects to the parent's address in the environment. Raises FailedPrecondition without an
        address.
        """
        if SOCKET_VARIABLE not in os.environ:
            raise FailedPrecondition(
                "a rank is started by its service, not by hand", seen=f"no {SOCKET_VARIABLE}"
            )
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return cls(os.environ[SOCKET_VARIABLE], int(os.environ["RANK"]))

    def config(self, kind: type[C]) -> C:
        """The settings from the parent's RankGroup."""
        return kind.model_validate_json(os.environ[CONFIG_VARIABLE])

    def ready(self) -> None:
        """Reports to the parent that this rank accepts messages."""
        self._socket.send_multipart([_READY, b""])

    def receive(self, timeout_s: float) -> bytes | None:
        """Returns the next message, or None after `timeout_s` seconds."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return bytes(self._socket.recv_multipart()[1])

    def poll(self) -> bytes | None:
        """Returns the next message if it is already here, else None; never waits."""
        return self.receive(0.0)

    def send(self, message: bytes) -> None:
        """Sends one message to the parent. Raises Unavailable if it cannot be queued within 10 s,
        or longer on a busy machine.
        """
        seconds = patient(_SEND_S)
        if not self._socket.poll(int(seconds * 1000), zmq.POLLOUT):
            raise Unavailable(f"the parent of rank {self.rank} takes no messages for {seconds:g} s")
        self._socket.send_multipart([_DATA, message])

    def close(self) -> None:
        """Sends queued messages for at most a second, then disconnects."""
        self._socket.close(linger=1000)
        self._context.term()
