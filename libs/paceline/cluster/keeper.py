"""Keeps one service running on its node: the actor side.

The service is a child of this process, under the same supervision as on one machine
(local/child.py): heartbeats, event loop progress, restarts. `look` returns its events. If the run's
starter has not called `look` for DESERTED_S, it is gone. The keeper then stops its service and
itself.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.cluster.actor import ActorLoop, take_surroundings
from paceline.cluster.order import FORKSERVER, START_AGAIN, KeeperReport, ServiceOrder
from paceline.config import ServiceConfig, load_config
from paceline.errors import FailedPrecondition, PacelineError, Unavailable
from paceline.local.child import Child
from paceline.local.forking import forkserver_launch
from paceline.local.launch import ChildEvent, Launch, RestartPolicy
from paceline.local.services import service
from paceline.local.supervisor import service_launch

DESERTED_S = 20.0
"""Seconds without a call of `look` after which a keeper stops its service and itself."""
_GRACE_S = 10.0


def node_address() -> str:
    """Ray's address of the node of this process."""
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


@dataclass(frozen=True, slots=True)
class _Need:
    """Another service that this service depends on."""

    launch: Launch
    is_healthy: asyncio.Event = field(default_factory=asyncio.Event)


class ServiceKeeper:
    """The actor of one service. Ray's threads call its methods; the work runs on its own loop. No
    method, public or private, is a coroutine: with one, Ray would call all methods on one thread.
    """

    def __init__(self, order: str) -> None:
        self._kept = _ServiceProcess(ServiceOrder.of(order))
        self._loop = ActorLoop()
        self._loop.begin(self._kept.end_when_deserted())

    def begin(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Starts the service. Returns environment variables for the services that depend on it."""
        return self._loop.run(self._kept.begin(environment))

    def look(self, since: int, healthy: Sequence[str], wait_s: float) -> str:
        """Returns a KeeperReport (JSON) with the events from number `since`.

        Waits up to `wait_s` seconds for an event. `healthy`: names of healthy dependencies.
        """
        return self._loop.run(self._kept.look(since, healthy, wait_s))

    def silent_s(self) -> float:
        """Seconds since the last call of `look`."""
        return time.monotonic() - self._kept.looked_s

    def stop(self, grace_s: float) -> None:
        """Stops the service and all its children."""
        self._loop.run(self._kept.stop(grace_s))


class _ServiceProcess:
    """The service on the actor's loop."""

    def __init__(self, order: ServiceOrder) -> None:
        self._order = order
        self.looked_s = time.monotonic()
        self._events: list[ChildEvent] = []
        self._child: Child | None = None
        self._running: asyncio.Task[None] | None = None
        self._needs: dict[str, _Need] = {}
        self._looks = asyncio.Event()
        self._news = asyncio.Event()

    async def begin(self, environment: Mapping[str, str]) -> dict[str, str]:
        if self._child is not None:
            raise FailedPrecondition("this service is kept running already", seen=self._order.name)
        order = self._order
        if order.host != node_address():
            raise Unavailable(
                f"the slots of {order.name} are on another node now, where nobody looks for it",
                reason=START_AGAIN,
                seen=node_address(),
                allowed=order.host,
            )
        take_surroundings(order.directory, {**order.environment, **environment})
        launch = self._launch()
        self._needs = {
            name: _Need(Launch(name, (), optional=optional))
            for name, optional in order.needs.items()
        }
        limits = order.heartbeat_s, order.hung_s
        self._child = Child(
            launch,
            Path(order.run_dir) / "logs",
            RestartPolicy(),
            self._note,
            order.health_s,
            tuple(self._needs.values()),
            *limits,
        )
        self._running = asyncio.create_task(self._child.run())
        self._running.add_done_callback(lambda _: self._news.set())
        return dict(launch.environment) if order.name.startswith(FORKSERVER) else {}

    def _launch(self) -> Launch:
        order = self._order
        if order.name.startswith(FORKSERVER):
            return replace(forkserver_launch(order.modules), name=order.name)
        files = [Path(file) for file in order.files]
        config = load_config(ServiceConfig, "local", files, order.overrides)
        return service_launch(service(order.name), config, files, order.overrides)

    def _note(self, event: ChildEvent) -> None:
        self._events.append(event)
        self._news.set()

    async def look(self, since: int, healthy: Sequence[str], wait_s: float) -> str:
        self._note_look()
        for name, need in self._needs.items():
            need.is_healthy.set() if name in healthy else need.is_healthy.clear()
        if len(self._events) <= since and not self._over:
            self._news.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            except TimeoutError:
                pass
        self._note_look()
        well = self._child is not None and self._child.is_healthy.is_set()
        told = tuple(self._events[since:])
        return KeeperReport(len(self._events), told, well, self._over, self._failure()).text()

    def _note_look(self) -> None:
        self.looked_s = time.monotonic()
        self._looks.set()

    @property
    def _over(self) -> bool:
        return self._running is not None and self._running.done()

    def _failure(self) -> PacelineError | None:
        running = self._running
        if running is None or not running.done() or running.cancelled():
            return None
        error = running.exception()
        if error is None or isinstance(error, PacelineError):
            return error
        raise error

    async def stop(self, grace_s: float) -> None:
        if self._running is not None and self._child is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            await self._child.stop(grace_s)

    async def end_when_deserted(self) -> None:
        with suppress(TimeoutError):
            while True:
                self._looks.clear()
                async with asyncio.timeout(DESERTED_S):
                    await self._looks.wait()
        await self.stop(_GRACE_S)
        os._exit(0)  # no process is left to stop this actor
