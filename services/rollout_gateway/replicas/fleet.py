"""Starts and watches the replicas of a gateway, and lists the available replicas.

A dead replica is restarted. It loads the serving set before it gets requests.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import PacelineError, Unavailable
from paceline.local.launch import ChildEvent, Launch
from paceline.local.news import tell_supervisor
from paceline.local.patience import patient
from paceline.local.processes import signal_group
from paceline.local.supervisor import Supervisor
from paceline.rpc import channel, rpc_errors, wait_healthy, wait_ready
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.place import ReplicaPlace, inside, write_place
from paceline.services.rollout_gateway.replicas.passage import Passage
from paceline.telemetry import get_logger
from paceline.v1.progress_pb2_grpc import ProgressServiceStub
from paceline.v1.replica_pb2_grpc import ReplicaServiceStub
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

START_GRACE_S = 30.0
"""Time beyond the start limit of the engine workers, seconds."""
STOP_GRACE_S = 20.0
MODULE = "paceline.services.rollout_gateway.replicas.process"
T = TypeVar("T")
log = get_logger(__name__)


class Replica:
    """One replica in the head, across its restarts. Create it on the running event loop."""

    def __init__(self, place: ReplicaPlace, config: GatewayConfig) -> None:
        self.place = place
        self.channel = channel(place.address, inside(config.security))
        self.rollout: Any = RolloutServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.inner: Any = ReplicaServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.progress: Any = ProgressServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.http = Passage(place.http_socket)
        self.up = asyncio.Event()
        """Set while the replica serves the same set as the other replicas."""

    def require_up(self) -> None:
        """Raises Unavailable while the replica starts."""
        if not self.up.is_set():
            raise Unavailable(f"{self.place.name} is starting again", seen=self.place.name)

    async def ask(
        self, method: Any, request: Any, deadline_s: float | None, *, starting: bool = False
    ) -> Any:
        """Returns the answer of a call. Raises Unavailable while the replica starts, unless the
        call is part of the start (`starting`), and the errors of the call.
        """
        if not starting:
            self.require_up()
        with rpc_errors():
            return await method(request, timeout=deadline_s)

    async def close(self) -> None:
        """Closes the connections."""
        await self.channel.close()
        self.http.close()


class ReplicaFleet:
    """All replicas of one gateway: start, use, stop. For use on one event loop."""

    def __init__(
        self, config: GatewayConfig, places: Sequence[ReplicaPlace], spool: Path, files: Path
    ) -> None:
        """`files`: directory for the start settings of the processes, private to this user."""
        self._config = config
        self._spool, self._files = spool, files
        self.replicas = [Replica(place, config) for place in places]
        self.on_up: Callable[[Replica], Awaitable[None]] | None = None
        """Awaited before a replica gets requests; it makes the replica load the serving set."""
        health_s = patient(config.engine.ready_deadline_s + START_GRACE_S)
        self._supervisor = Supervisor(
            [self._launch(replica) for replica in self.replicas],
            Path(config.run.dir),
            on_event=self._note,
            health_s=health_s,
            heartbeat_s=config.run.heartbeat_s,
            hung_s=config.run.hung_s,
        )
        self._start_s = health_s

    @property
    def ready(self) -> list[Replica]:
        """The available replicas."""
        return [replica for replica in self.replicas if replica.up.is_set()]

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each running replica, by name."""
        return self._supervisor.pids

    def of_worker(self, worker: int) -> Replica | None:
        """The replica that has a worker of the run."""
        return next((one for one in self.replicas if one.place.holds(worker)), None)

    async def start(self) -> None:
        """Returns when all replicas serve. Raises the error of a replica that cannot start."""
        for replica in self.replicas:
            write_place(self._file(replica), replica.place, self._config, self._spool)
        await self._supervisor.start(self._start_s)

    async def failed(self) -> None:
        """Never returns; raises when a replica cannot be restarted."""
        await self._supervisor.wait_finished()
        raise Unavailable("a replica of the gateway ended by itself")

    def replace(self, replica: Replica) -> None:
        """Ends one replica, which is then restarted."""
        replica.up.clear()
        if pid := self.pids.get(replica.place.name):
            signal_group(pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Ends all replicas."""
        await self._supervisor.stop(STOP_GRACE_S)
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    def _file(self, replica: Replica) -> Path:
        return self._files / f"{replica.place.name}.json"

    def _launch(self, replica: Replica) -> Launch:
        security = inside(self._config.security)

        async def healthy(deadline_s: float) -> None:
            await wait_healthy(replica.place.address, security, deadline_s)
            await wait_ready(replica.channel, deadline_s)
            if self.on_up is not None:
                await self.on_up(replica)
            replica.up.set()

        command = (sys.executable, "-m", MODULE, str(self._file(replica)))
        return Launch(replica.place.name, command, healthy)

    def _note(self, event: ChildEvent) -> None:
        replica = next(one for one in self.replicas if one.place.name == event.name)
        if event.kind == "died":
            replica.up.clear()
        log.info("replica", replica=event.name, news=event.kind, detail=event.detail)
        if event.kind in ("died", "impaired", "waits"):
            tell_supervisor("impaired", f"{event.name} {event.kind}: {event.detail}")
        elif event.kind in ("restarted", "recovered"):
            tell_supervisor("recovered", f"{event.name} {event.kind} {event.detail}".rstrip())


async def each(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns all answers, in order, after all have ended. Raises the first failure."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def refused(answer: object) -> PacelineError | None:
    """The error of an answer, except that of an unavailable replica; else None."""
    if isinstance(answer, PacelineError) and not isinstance(answer, Unavailable):
        return answer
    return None
