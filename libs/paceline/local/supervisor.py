"""Starts the services of a run in dependency order, keeps them running and stops them all.

The run ends when the coordinator exits with status 0.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config import ServiceConfig
from paceline.errors import DeadlineExceeded, FailedPrecondition
from paceline.local import forking, news, patience, redis
from paceline.local.child import LIMIT_S
from paceline.local.launch import ChildEvent, Keep, KeptService, Launch, RestartPolicy, Supervised
from paceline.local.ports import require_free
from paceline.local.services import REDIS, TINKER, ServiceSpec, services_of
from paceline.rpc import wait_healthy

EXTERNAL_REDIS_S = 5.0
_ELSEWHERE_S = 86_400.0


class Supervisor:
    """Runs a set of launches; use it as an async context, or always call stop()."""

    def __init__(
        self,
        launches: Sequence[Launch],
        run_dir: Path,
        *,
        on_event: Callable[[ChildEvent], None] = lambda event: None,
        policy: RestartPolicy | None = None,
        health_s: float = 120.0,
        heartbeat_s: float = LIMIT_S,
        hung_s: float = news.HUNG_S,
        keep: Keep | None = None,
    ) -> None:
        """`launches`: each after its dependencies. `heartbeat_s` and `hung_s`: as in the run
        settings.

        `keep` creates supervised processes on other nodes, with their own limits; None: children of
        this process.
        """

        def child(launch: Launch, needs: Sequence[Supervised]) -> Supervised:
            logs, own = run_dir / "logs", replace(policy or RestartPolicy())
            return KeptService(launch, logs, own, on_event, health_s, needs, heartbeat_s, hung_s)

        self._children: dict[str, Supervised] = {}
        needs: dict[str, list[str]] = {}  # transitive dependencies by name
        for launch in launches:
            near = launch.depends_on
            all_of_it = dict.fromkeys([*near, *(far for name in near for far in needs[name])])
            needs[launch.name] = list(all_of_it)
            needed = [self._children[name] for name in all_of_it]
            self._children[launch.name] = (keep or child)(launch, needed)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of running services by name."""
        return {name: child.pid for name, child in self._children.items() if child.pid}

    async def start(self, deadline_s: float) -> None:
        """Starts all services and waits until all are healthy.

        Raises Unavailable with the end of the log if a port is in use, or a service dies or is
        unhealthy. Raises DeadlineExceeded after `deadline_s` seconds. No process is left running
        then.
        """
        for child in self._children.values():
            for address, setting in child.launch.ports:
                require_free(address, setting)
        self._tasks = {
            name: asyncio.create_task(child.run()) for name, child in self._children.items()
        }
        healthy = asyncio.gather(*(one.is_healthy.wait() for one in self._children.values()))
        waits: set[asyncio.Future[Any]] = {healthy, self._failing()}
        try:
            await asyncio.wait(waits, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()
            late = [name for name, child in self._children.items() if not child.is_healthy.is_set()]
            if late and not healthy.done():
                raise DeadlineExceeded(f"services are not healthy after {deadline_s} s", seen=late)
        except BaseException:
            await self.stop(1.0)
            raise
        finally:
            healthy.cancel()

    async def wait_finished(self) -> None:
        """Waits until the service that ends the run exits with status 0. Raises Unavailable if a
        service fails, FailedPrecondition before a start.
        """
        if not self._tasks:
            raise FailedPrecondition("nothing was started")
        launches = [child.launch for child in self._children.values()]
        ends = [one for one in launches if one.ends_run] or [one for one in launches if one.command]
        ended = asyncio.gather(*(self._tasks[one.name] for one in ends), return_exceptions=True)
        waits: set[asyncio.Future[Any]] = {ended, self._failing()}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        self._raise_failure()

    async def stop(self, grace_s: float = 10.0) -> None:
        """Stops all services in reverse order; leaves no process.

        The services share `grace_s`; each service gets at least a second.
        """
        await patience.cancel(*self._tasks.values())
        end = asyncio.get_running_loop().time() + grace_s
        for child in reversed(self._children.values()):
            await child.stop(max(1.0, end - asyncio.get_running_loop().time()))
        self._tasks = {}

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    def _failing(self) -> asyncio.Future[Any]:
        """A future that is done at the first failure of a service, or when all have ended."""
        failing = asyncio.gather(*map(asyncio.shield, self._tasks.values()))
        failing.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return failing

    def _raise_failure(self) -> None:
        for task in self._tasks.values():
            if task.done() and not task.cancelled():
                task.result()


def run_launches(
    config: ServiceConfig,
    files: Sequence[Path],
    overrides: Sequence[str],
    pool: str = "",
    services: Sequence[str] = (),
) -> list[Launch]:
    """The launches of a whole run: the forkserver, then all services with the same settings.

    `config` holds the shared sections of `files` and `overrides`. The forkserver forks the ranks
    and engine workers. An external Redis is only awaited.

    `services`: the services of `pool` on this node; services elsewhere that they depend on are only
    awaited.
    """
    every = services_of(len(config.addresses.gateways), config.run.policy_nodes)
    every += [TINKER] * (TINKER.name in services)
    own = [spec for spec in every if not services or spec.name in services]
    words = [word for path in files for word in ("--config", str(path))]
    launches = {spec.name: launch_of(spec, config, [*words, *overrides]) for spec in own}
    needs = {name for launch in launches.values() for name in launch.depends_on}
    elsewhere = [
        _awaited(launch_of(spec, config, (), here=False))
        for spec in every
        if spec.name in needs - set(launches)
    ]
    modules = [module for spec in own for module in spec.forked]
    if not modules:
        return [*elsewhere, *launches.values()]
    forkserver = forking.forkserver_launch(modules)
    found = {forking.FORKSERVER_VARIABLE: forkserver.environment[forking.FORKSERVER_VARIABLE]}
    named = replace(forkserver, name=f"{forkserver.name}_{pool}" if pool else forkserver.name)
    return [named, *elsewhere, *(replace(each, environment=found) for each in launches.values())]


def _awaited(launch: Launch) -> Launch:
    """The launch of a service elsewhere: nothing to start. Its own supervisor has the deadline of
    its start, unless the run goes on without it.
    """
    healthy = launch.healthy
    assert healthy is not None

    async def healthy_there(deadline_s: float) -> str | None:
        return await healthy(deadline_s if launch.optional else _ELSEWHERE_S)

    return Launch(launch.name, (), healthy_there, optional=launch.optional)


def launch_of(
    spec: ServiceSpec, config: ServiceConfig, arguments: Sequence[str], *, here: bool = True
) -> Launch:
    """The launch of one service. Raises Unavailable or ConfigError for a Redis that cannot start
    `here`.
    """
    command = (sys.executable, "-m", spec.module, *spec.arguments, *arguments)
    if spec.module == REDIS:
        return _redis_launch(spec, config, command, here=here)
    if not spec.address_key:
        return Launch(spec.name, command, None, spec.depends_on)
    address = config.addresses.of(spec.address_key)
    keys = (spec.address_key, *spec.more_address_keys)
    ports = tuple((config.addresses.of(key), f"addresses.{key}") for key in keys)
    return Launch(
        spec.name,
        command,
        partial(wait_healthy, address, config.security),
        spec.depends_on,
        ports,
        ends_run=spec.ends_run,
        optional=spec.optional,
    )


def _redis_launch(
    spec: ServiceSpec, config: ServiceConfig, command: tuple[str, ...], *, here: bool
) -> Launch:
    role: redis.Role = "features" if "features" in spec.arguments else "durable"
    server = redis.launcher(config, role)
    urls = redis.resolved(config).redis
    url = urls.durable_url if role == "durable" else urls.features_url

    # The features role may use the durable server, which is just starting.
    ours = server is not None or (
        url == urls.durable_url and redis.launcher(config, "durable") is not None
    )

    async def healthy(deadline_s: float) -> str:
        if ours:
            await redis.wait_redis(url, deadline_s)  # Redis may have to load its data
            return ""
        # An external server is up or not.
        await redis.wait_redis(url, min(deadline_s, EXTERNAL_REDIS_S))
        return await redis.check_durable(url) if role == "durable" else ""

    ping = partial(redis.wait_redis, url)
    if server is None:
        return Launch(spec.name, (), healthy, ping=ping)
    if here:
        redis.find_redis_server()  # raises if no binary is found
    ports = (server.address,) if server.address else ()
    return Launch(spec.name, command, healthy, spec.depends_on, ports, ping=ping)
