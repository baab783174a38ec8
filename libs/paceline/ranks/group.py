"""Starts one process per rank of a trainer and exchanges messages with these processes.

The parent imports no torch. Ranks find each other through a file in the parent's process directory,
and listen on loopback only. Ranks on several nodes find each other through a file in the shared
directory of the logs; each node has a group with its own ranks, and node 0's commands the others.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import zmq

from paceline.config import Config
from paceline.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from paceline.local import forking, patience, ports, processes, user_directory
from paceline.local.child import LIMIT_S, Child, ChildSocket
from paceline.processor import keep_freed_memory
from paceline.ranks.hosts import READY, RankHosts
from paceline.training import STORE_VARIABLE

SOCKET_VARIABLE = "PACELINE_RANK_SOCKET"
CONFIG_VARIABLE = "PACELINE_RANK_CONFIG"
_MESSAGES_QUEUED = 64
_SEND_S = 10.0
C = TypeVar("C", bound=Config)
T = TypeVar("T")


class RankLost(Unavailable):
    """A rank process has ended; stop and restart the group. The message's first line states the
    end. The last lines of the rank's log follow.
    """

    reason = "RANK_LOST"


class Span(NamedTuple):
    """The nodes of a group, and this process's node."""

    node: int = 0
    nodes: int = 1
    address: str = ""  # of node 0; "": one node

    def interfaces(self) -> dict[str, str]:
        """Environment that restricts the ranks to the interface to node 0, unless the user chose
        one.
        """
        if not self.address:
            return processes.LOOPBACK_ONLY
        name = ports.interface_to(self.address)
        return {key: os.environ.get(key) or name for key in processes.LOOPBACK_ONLY}


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
        span: Span | None = None,
    ) -> None:
        """Creates the group without starting it.

        `config`: settings that the ranks read through RankLink.config. `preload`: modules that
        `module` imports late. `heartbeat_s`: seconds of a stop after which a rank is killed; 0: no
        limit. `span`: nodes with equal numbers of ranks; None: one node.
        """
        self._module = module
        self._name = ".".join(module.split(".")[-2:])  # the last two parts: service and module
        self.world_size = world_size
        """Number of ranks on all nodes."""
        self._span = span = span or Span()
        here = world_size // span.nodes
        self.own = range(span.node * here, (span.node + 1) * here)
        """Ranks on this node."""
        others = range(1, span.nodes) if span.node == 0 else ()
        self.hosts = RankHosts(others, self._take, self._lose)
        """The links to the other nodes, on node 0."""
        self._log_dir = log_dir
        self._heartbeat_s = heartbeat_s
        own = {"OMP_NUM_THREADS": str(threads_per_rank)}
        if config is not None:
            own[CONFIG_VARIABLE] = config.model_dump_json()
        self._environment = {**(env or {}), **own}
        self._forker = forking.Forker(
            list(dict.fromkeys([module, *preload])), log_dir / f"{self._name}.log"
        )
        self._ranks: list[Child] = []
        self._sockets: list[ChildSocket] = []
        self._lost: RankLost | None = None
        self._arrived: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self._folder, self._shared, self._store = "", "", ""
        self._early: deque[tuple[int, bytes]] = deque()  # messages sent during the start
        self._clock = patience.WorkClock(lambda: self.pids)
        self.on_progress: Callable[[int, bytes], bool] = lambda rank, message: False
        """Handles a message (rank, payload) during the start; False: the message waits for
        receive().
        """

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks on this node; [] before start and after stop."""
        return [rank.pid for rank in self._ranks]

    @property
    def still_s(self) -> float:
        """Counted seconds since the last message of any rank (WorkClock)."""
        return self._clock.counted_s

    async def start(self, deadline_s: float, store: str = "") -> None:
        """Starts all ranks and waits until every rank is ready.

        `deadline_s`: maximum counted seconds without a message of any rank (WorkClock). `store`:
        the file of ranks on several nodes, on a node that is not node 0.

        Raises RankLost if a rank ends first, DeadlineExceeded if no rank makes progress. No rank is
        left running then. Raises FailedPrecondition if the ranks already run.
        """
        if self._ranks:
            raise FailedPrecondition("the ranks run already", seen=self.pids)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.mkdtemp(prefix="r-", dir=user_directory.socket_directory())
        self._arrived, self._lost = asyncio.Queue(), None
        self._shared = self._folder
        if self._span.nodes > 1 and not store:
            self._shared = tempfile.mkdtemp(prefix="ranks-", dir=self._log_dir.absolute())
        self._store = store or f"{self._shared}/store"
        try:
            late = f"a process of {self._name} on another node does not call"
            await self._in_time(self.hosts.start(self._store), deadline_s, late)
            for rank in self.own:
                await self._spawn(rank, deadline_s)
            await self._all_ready(deadline_s)
        except BaseException:
            await self.stop(0.0)
            raise

    def send(self, message: bytes) -> None:
        """Sends one message to every rank. Raises RankLost if a rank is gone, FailedPrecondition
        before a start.
        """
        self._require_ranks()
        for to_rank in self._sockets:
            to_rank.send(message)
        self.hosts.send(message)

    async def receive(self, deadline_s: float) -> tuple[int, bytes]:
        """Returns the next message of any rank, as (rank, bytes).

        Raises RankLost if a rank has ended. Raises DeadlineExceeded after `deadline_s` counted
        seconds without a message (WorkClock).
        """
        if self._early:
            return self._early.popleft()
        self._require_ranks()
        late = f"no rank of {self._name} spoke in time"
        rank, message = await self._in_time(self._arrived.get(), deadline_s, late)
        self._require_ranks()
        self._clock.restart()
        return rank, message

    async def stop(self, grace_s: float = 5.0) -> None:
        """Sends SIGTERM, waits `grace_s` seconds, then sends SIGKILL. No process is left, and the
        group can start again.
        """
        await self.end_ranks(grace_s)
        await self._forker.close()

    async def end_ranks(self, grace_s: float) -> None:
        """As stop(), but keeps the imported modules in memory, so that the next start is quick."""
        await asyncio.gather(
            self.hosts.stop(grace_s), *(rank.stop(grace_s) for rank in self._ranks)
        )
        if any(rank.process.returncode is None for rank in self._ranks):
            await self._forker.close()  # stopped too: it reported no end
        for to_rank in self._sockets:
            to_rank.close()
        self._ranks, self._sockets, self._lost = [], [], None
        self._early.clear()
        for folder in (self._folder, self._shared):
            shutil.rmtree(folder, ignore_errors=True)

    def signal(self, number: int) -> None:
        """Sends a signal to every rank."""
        for rank in self._ranks:
            rank.send_signal(number)

    def kill(self) -> None:
        """Sends SIGKILL to every rank without waiting; stop() cleans up."""
        self.signal(signal.SIGKILL)

    async def __aenter__(self) -> RankGroup:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def _spawn(self, rank: int, deadline_s: float) -> None:
        address = f"ipc://{self._folder}/rank{rank}"
        take = partial(self._take, rank)
        self._sockets.append(ChildSocket(zmq.Context.instance(), address, take))
        environment = {
            **self._environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.own.start),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(len(self.own)),
            **self._span.interfaces(),
            STORE_VARIABLE: self._store,
            SOCKET_VARIABLE: address,
        }
        log = self._log_dir / f"{self._name}-rank{rank}.log"
        child = await self._forker.fork(
            self._module, environment, log, deadline_s, stop_s=self._heartbeat_s
        )
        self._ranks.append(child)
        child.ended.add_done_callback(partial(self._note_end, rank, child))

    async def _in_time(self, awaited: Coroutine[Any, Any, T], deadline_s: float, late: str) -> T:
        """Awaits a result. Raises DeadlineExceeded after so many counted seconds (WorkClock)."""
        waiting = asyncio.ensure_future(awaited)
        try:
            if not await self._clock.wait({waiting}, deadline_s):
                raise DeadlineExceeded(late, seen=f"{deadline_s:.1f} s")
            return waiting.result()
        finally:
            waiting.cancel()

    def _require_ranks(self) -> None:
        """Raises RankLost if a rank has ended, FailedPrecondition if the ranks do not run."""
        if self._lost is not None:
            raise self._lost
        if not self._ranks:
            raise FailedPrecondition(f"the ranks of {self._name} do not run; start() them")

    def _take(self, rank: int, message: bytes) -> None:
        self._arrived.put_nowait((rank, message))

    def _note_end(self, rank: int, child: Child, _: object) -> None:
        if child in self._ranks and self._lost is None and not child.ended.cancelled():
            words, end = child.last_words(), child.last_lines()
            self._lose(f"rank {rank} of {self._name} {words}\n{end}")

    def _lose(self, words: str) -> None:
        self._lost = self._lost or RankLost(words)
        self._take(0, READY)  # wakes the receiver

    async def _all_ready(self, deadline_s: float) -> None:
        waiting = set(range(self.world_size) if self._span.node == 0 else self.own)
        early = deque[tuple[int, bytes]]()
        while waiting:
            rank, message = await self.receive(deadline_s)
            if message == READY:
                waiting.discard(rank)
            elif not self.on_progress(rank, message):
                early.append((rank, message))
        self._early = early


class RankLink:
    """The rank's connection to its parent: blocking, for one thread. The rank dies with its parent
    and ignores Ctrl-C.
    """

    def __init__(self, address: str, rank: int) -> None:
        self.rank = rank
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(_MESSAGES_QUEUED)
        self._socket.connect(address)

    @classmethod
    def from_environment(cls) -> RankLink:
        """Connects to the parent's address in the environment. Raises FailedPrecondition without an
        address.
        """
        if SOCKET_VARIABLE not in os.environ:
            message = "a rank is started by its service, not by hand"
            raise FailedPrecondition(message, seen=f"no {SOCKET_VARIABLE}")
        processes.die_with_parent()
        keep_freed_memory()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return cls(os.environ[SOCKET_VARIABLE], int(os.environ["RANK"]))

    def config(self, kind: type[C]) -> C:
        """The settings from the parent's RankGroup."""
        return kind.model_validate_json(os.environ[CONFIG_VARIABLE])

    def ready(self) -> None:
        """Reports to the parent that this rank accepts messages."""
        self._socket.send(READY)

    def receive(self, timeout_s: float) -> bytes | None:
        """Returns the next message, or None after `timeout_s` seconds."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return bytes(self._socket.recv())

    def poll(self) -> bytes | None:
        """Returns the next message if it is already here, else None; never waits."""
        return self.receive(0.0)

    def send(self, message: bytes) -> None:
        """Sends one message to the parent. Raises Unavailable if it cannot be queued within 10 s,
        or longer on a busy machine.
        """
        seconds = patience.patient(_SEND_S)
        if not self._socket.poll(int(seconds * 1000), zmq.POLLOUT):
            raise Unavailable(f"the parent of rank {self.rank} takes no messages for {seconds:g} s")
        self._socket.send(message)

    def close(self) -> None:
        """Sends queued messages for at most a second, then disconnects."""
        self._socket.close(linger=1000)
        self._context.term()
