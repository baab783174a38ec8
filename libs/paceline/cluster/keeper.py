"""Keeps the services of a pool on their node.

An actor on the node, the keeper, starts, watches and ends the services. They are its children,
under the same supervisor as on one machine. The run's starter polls the keeper through KeptPool. If
it has not called `look` for DESERTED_S, it is gone. The keeper then stops its services and itself.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from paceline.config import ServiceConfig
from paceline.config.load import load_config
from paceline.errors import DeadlineExceeded, PacelineError, Unavailable
from paceline.local import forking, processes
from paceline.local.launch import ChildEvent, Launch
from paceline.local.patience import cancel, patient, within
from paceline.local.supervisor import Supervisor, run_launches
from paceline.ranks.messages import Failed

START_AGAIN = "START_AGAIN"
"""Reason of errors that require a restart of all services of a run on other nodes."""


@dataclass(frozen=True, slots=True)
class PoolOrder:
    """Services to keep running on a node."""

    name: str
    services: Sequence[str]
    run_dir: str  # absolute, on a path that all nodes share
    directory: str  # working directory of the processes
    files: Sequence[str] = ()  # TOML, absolute
    overrides: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    health_s: float = 120.0  # seconds for the start of a service
    host: str = ""  # the node's address


@dataclass(frozen=True, slots=True)
class KeeperReport:
    """The events and state of the services since the last call."""

    next: int  # number of the next event
    events: tuple[ChildEvent, ...] = ()
    healthy: bool = False  # all services have started
    over: bool = False  # supervision has ended
    error: Failed | None = None  # the reason


_OF_RAY = ("RAY_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Prefixes of variables that Ray sets for its workers. Services must not inherit them."""
_TRAVELLING = ("PACELINE_", "OTEL_", "HF_", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "SGLANG_")
"""Prefixes of variables that services inherit from the run's starter."""
_AT_HOME = (processes.PARENT_VARIABLE, forking.FORKSERVER_VARIABLE, processes.NEWS_VARIABLE)
T = TypeVar("T")


def travelling() -> dict[str, str]:
    """Environment variables that this process passes to its services on other nodes."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_TRAVELLING) or name == "REDIS_URL") and name not in _AT_HOME
    }


def take_surroundings(directory: str, environment: Mapping[str, str]) -> None:
    """Changes to the directory and sets the environment, without Ray's variables and
    credentials.
    """
    os.chdir(directory)
    for name in [name for name in os.environ if name.startswith(_OF_RAY)]:
        del os.environ[name]
    os.environ.update(environment)


DESERTED_S = 20.0
"""Seconds without a call of `look` after which a keeper stops its services and itself."""
_GRACE_S = 10.0
_START_S = 86_400.0  # the run's starter has its own deadline


def node_address() -> str:
    """Ray's address of the node of this process."""
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


class PoolKeeper:
    """The actor of a pool. Ray's threads call its methods. A child process is tied to its starting
    thread, so all work runs on a loop of its own, in a thread that lives as long as the actor. No
    method, public or private, is a coroutine: with one, Ray would call all methods on one thread.
    """

    def __init__(self, order: PoolOrder) -> None:
        # Ray selects uvloop, which starts children in the main thread only.
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        self._services = _PoolServices(order)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._services.end_when_deserted(), self._loop)

    def begin(self) -> None:
        """Starts the services. Raises ConfigError, or Unavailable on another node."""
        self._run(self._services.begin())

    def look(self, since: int, wait_s: float) -> KeeperReport:
        """Returns the events from number `since`; waits up to `wait_s` seconds for one."""
        return self._run(self._services.look(since, wait_s))

    def silent_s(self) -> float:
        """Seconds since the last call of `look`."""
        return time.monotonic() - self._services.looked_s

    def stop(self, grace_s: float) -> None:
        """Stops the services and all their children."""
        self._run(self._services.stop(grace_s))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _PoolServices:
    """The services on the actor's loop."""

    def __init__(self, order: PoolOrder) -> None:
        self._order = order
        self.looked_s = time.monotonic()
        self._events: list[ChildEvent] = []
        self._supervisor: Supervisor | None = None
        self._running: asyncio.Task[None] | None = None
        self._healthy = False
        self._looks = asyncio.Event()
        self._news = asyncio.Event()

    async def begin(self) -> None:
        import ray

        order = self._order
        if order.host != node_address():
            raise Unavailable(
                f"the slots of {order.name} are on another node now, where nobody looks for them",
                reason=START_AGAIN,
                seen=node_address(),
                allowed=order.host,
            )
        gpus = ",".join(str(number) for number in ray.get_gpu_ids())  # by their numbers on the node
        take_surroundings(order.directory, {**order.environment, "CUDA_VISIBLE_DEVICES": gpus})
        files = [Path(file) for file in order.files]
        config = load_config(ServiceConfig, "local", files, order.overrides)
        self._supervisor = Supervisor(
            run_launches(config, files, order.overrides, order.name, order.services),
            Path(order.run_dir),
            on_event=self._note,
            health_s=order.health_s,
            heartbeat_s=config.run.heartbeat_s,
            hung_s=config.run.hung_s,
        )
        self._running = asyncio.create_task(self._run(self._supervisor))
        self._running.add_done_callback(lambda _: self._news.set())

    async def _run(self, supervisor: Supervisor) -> None:
        await supervisor.start(_START_S)
        self._healthy = True
        self._news.set()
        await supervisor.wait_finished()

    def _note(self, event: ChildEvent) -> None:
        self._events.append(event)
        self._news.set()

    async def look(self, since: int, wait_s: float) -> KeeperReport:
        self._note_look()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        self._news.clear()
        self._note_look()
        running, error = self._running, None
        over = running is not None and running.done()
        if running is not None and running.done() and not running.cancelled():
            error = running.exception()
        if error is not None and not isinstance(error, PacelineError):
            raise error
        failed = Failed.of(0, error) if error is not None else None
        events = tuple(self._events[since:])
        return KeeperReport(len(self._events), events, self._healthy, over, failed)

    def _note_look(self) -> None:
        self.looked_s = time.monotonic()
        self._looks.set()

    async def stop(self, grace_s: float) -> None:
        if self._running is not None and self._supervisor is not None:
            await cancel(self._running)
            await self._supervisor.stop(grace_s)

    async def end_when_deserted(self) -> None:
        with suppress(TimeoutError):
            while True:
                self._looks.clear()
                async with asyncio.timeout(DESERTED_S):
                    await self._looks.wait()
        await self.stop(_GRACE_S)
        os._exit(0)  # no process is left to stop this actor


_LOOK_S = 1.0
"""Seconds that a keeper waits for events before it replies."""
_ANSWER_S, _AWAY_S = 30.0, 45.0
_STOP_S = 10.0
_NODE_DIED = "its node has died"
"""Part of Ray's message for an actor whose node died; no other sign distinguishes this from the
death of its process. Without it, the other keepers of the node do not respond to `stop`.
"""
Placed = Callable[[PoolOrder], Any]
"""Creates the keeper of a pool on its node and returns the actor handle."""


class KeptPool:
    """The services of a pool on the cluster. If their keeper dies or does not respond, they are
    lost, and the whole run starts again.
    """

    pid = 0  # the keeper's events report the process ids

    def __init__(
        self,
        launch: Launch,
        order: PoolOrder,
        placed: Placed,
        on_event: Callable[[ChildEvent], None],
        lost: set[str],
    ) -> None:
        """Creates the handle without starting the services. `lost`: addresses of lost nodes, shared
        by all pools of the run.
        """
        self.launch, self.order = launch, order
        self.is_healthy = asyncio.Event()
        self._placed, self._on_event, self._lost_nodes = placed, on_event, lost
        self._keeper: Any = None
        self._next, self._begun = 0, False

    async def run(self) -> None:
        """Starts the services; returns when the service that ends the run has finished.

        Raises the errors of their supervisor, and Unavailable with reason START_AGAIN if their
        keeper is lost.
        """
        from ray.exceptions import ActorDiedError, RayActorError

        try:
            self._keeper = await asyncio.to_thread(self._placed, self.order)
            await self._asked(self._keeper.begin.remote())
            self._begun = True
            while not (report := await self._look()).over:
                self._take(report)
        except (RayActorError, DeadlineExceeded) as error:
            node = not isinstance(error, ActorDiedError) or _NODE_DIED in str(error)
            if node:
                self._lost_nodes.add(self.order.host)
            lost = "node" if node else "keeper"
            message, reason = f"the {lost} of {', '.join(self.order.services)} is lost", START_AGAIN
            raise Unavailable(message, reason=reason, seen=" ".join(str(error).split())) from error
        self._take(report)
        if report.error is not None:
            raise report.error.error()

    async def stop(self, grace_s: float) -> None:
        """Stops the services, then their keeper.

        A keeper on a lost node gets no call, because it cannot respond. It ends by itself after
        DESERTED_S seconds without a call.
        """
        from ray.exceptions import RayActorError

        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        if self.order.host in self._lost_nodes:
            detail = "its node is lost: it ends there by itself"
            for name in self.order.services:
                self._on_event(ChildEvent(name, "stopped", 0, detail))
        elif self._begun:  # otherwise it may have no node
            with suppress(RayActorError, TimeoutError):  # a keeper's children end with the keeper
                async with asyncio.timeout(patient(grace_s + _STOP_S)):
                    await keeper.stop.remote(grace_s)
                    self._take(await keeper.look.remote(self._next, 0.0))
        await self._kill(keeper)
        self.is_healthy.clear()

    async def _kill(self, keeper: Any) -> None:
        import ray

        with suppress(TimeoutError):  # Ray kills it later
            async with asyncio.timeout(patient(_STOP_S)):
                await asyncio.to_thread(ray.kill, keeper)

    async def _look(self) -> KeeperReport:
        """Polls the keeper. A node may be unreachable for a while; Ray reports its death."""
        from ray.exceptions import ActorUnavailableError

        end = asyncio.get_running_loop().time() + patient(_AWAY_S)
        while True:
            try:
                report: KeeperReport = await self._asked(
                    self._keeper.look.remote(self._next, _LOOK_S)
                )
                return report
            except ActorUnavailableError:
                if asyncio.get_running_loop().time() > end:
                    raise
                await asyncio.sleep(_LOOK_S)

    async def _asked(self, answer: Any) -> Any:
        from ray.exceptions import RayTaskError

        try:
            name = self.order.name
            return await within(_ANSWER_S, answer, f"the keeper of {name} does not answer")
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, PacelineError) else error) from error

    def _take(self, report: KeeperReport) -> None:
        for event in report.events:
            self._on_event(event)
        self._next = report.next
        if report.healthy:
            self.is_healthy.set()
