"""Keeps a service on its node: an actor beside it starts, watches and ends it.

The services are children of this process, under the same supervisor as on one machine. `look`
returns its events. If the run's starter has not called `look` for DESERTED_S, it is gone. The
keeper then stops its services and itself.
"""

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from paceline.cluster.order import START_AGAIN, KeeperReport, PoolOrder
from paceline.config import ServiceConfig
from paceline.config.load import load_config
from paceline.errors import PacelineError, Unavailable
from paceline.local import forking, launch, news, processes
from paceline.local.supervisor import Supervisor, run_launches
from paceline.ranks.messages import Failed

_OF_RAY = ("RAY_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Prefixes of variables that Ray sets for its workers. Services must not inherit them."""
_TRAVELLING = ("PACELINE_", "OTEL_", "HF_", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "SGLANG_")
"""Prefixes of variables that services inherit from the run's starter."""
_AT_HOME = (processes.PARENT_VARIABLE, forking.FORKSERVER_VARIABLE, news.VARIABLE)
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
        self._events: list[launch.ChildEvent] = []
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

    def _note(self, event: launch.ChildEvent) -> None:
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
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            await self._supervisor.stop(grace_s)

    async def end_when_deserted(self) -> None:
        with suppress(TimeoutError):
            while True:
                self._looks.clear()
                async with asyncio.timeout(DESERTED_S):
                    await self._looks.wait()
        await self.stop(_GRACE_S)
        os._exit(0)  # no process is left to stop this actor
