"""Runs all processes under `paceline up`, with proxies before the gateway and Redis, and observes
them.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.chaos.files import FileWatch, Keeper
from benchmarks.chaos.happenings import Happening, Happenings
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.remains import WEIGHTS
from benchmarks.chaos.schedule import SUPERVISOR, Trigger
from benchmarks.chaos.settings import RUN_ID, settings
from benchmarks.processes import marked, running
from paceline.config.load import merge, write_tables
from paceline.errors import FailedPrecondition, PacelineError
from paceline.events import FactSubscriber
from paceline.local.patience import patient
from paceline.local.ports import free_ports
from paceline.v1.coordinator_pb2 import HOLDER_DRAFTER, HOLDER_POLICY, Fact

CONSOLE, ENDED = "console", "ended"
START_S, COMMIT_S = 120.0, 120.0
_MARK = "PACELINE_CHAOS_RUN"
_DOWN = ("started", "died", "restarted", "waits", "impaired", "given_up", "stopped")
_UP = ("healthy", "recovered", "finished")
_LINE = re.compile(r"(\w+) ([a-z_]+)\b.*\(pid (\d+)\)$")
_PROXIED = {
    "gateway": ("coordinator", "policy_trainer", "drafter_trainer"),
    "redis": ("coordinator", "gateway", "policy_trainer"),
}
"""Server behind proxies -> services that reach it through a proxy."""
PARTS = {
    "engine worker": ("gateway", "paceline.services.rollout_gateway.engines.worker.process"),
    "policy rank": ("policy_trainer", "paceline.services.policy_trainer.rank"),
    "drafter rank": ("drafter_trainer", "paceline.services.drafter_trainer.rank"),
}
"""Part of a service -> the service that reports on it, and the module that it runs."""


def service_of(target: str) -> str:
    """The service with console lines about a target."""
    return PARTS.get(target, (target.replace(" ", "_"), ""))[0]


class System:
    """A run in a directory with a path short enough for sockets; use it as an async context."""

    def __init__(self, directory: Path, seed: int, steps: int) -> None:
        self.directory = directory
        self.config = directory / "config.toml"
        self.happenings = Happenings()
        self.runs_ended: list[str] = []  # reasons of unrequested ends
        self.left: list[str] = []  # command lines of processes that outlived the run
        self.proxies: dict[str, list[Proxy]] = {name: [] for name in _PROXIED}
        self._pids: dict[str, int] = {}
        self._states: dict[str, str] = {}
        self._supervisor: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving = False
        ports = free_ports(6 + len(_PROXIED["gateway"]))
        self._proxy_ports = ports[6:]
        self._tree = settings(directory, seed, steps, ports[:6])

    async def __aenter__(self) -> System:
        directory = self.directory
        directory.mkdir(parents=True, exist_ok=True)
        self._watch = FileWatch()
        self._keeper = keeper = Keeper(directory / "kept")
        run = directory / "run"
        self._watch.watch(run / "spool" / "gateway", lambda path: self._spooled(path, keeper))
        self._watch.watch(run / "checkpoints" / "policy", lambda path: self._saved(path, keeper))
        await self._start_proxies()
        write_tables(self.config, self._tree)
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._keep_up())]
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._leaving = True
        if self._supervisor is not None and self._supervisor.returncode is None:
            self._supervisor.send_signal(signal.SIGCONT)
            self._supervisor.terminate()
        await asyncio.wait(self._tasks[1:], timeout=patient(40.0))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for proxy in self._all_proxies():
            await proxy.close()
        self._watch.close()
        self._keeper.close()
        said = [one.detail for one in self.happenings.since(0.0) if one.what == CONSOLE]
        (self.directory / "console.log").write_text("\n".join(said))  # now the disk has room
        for left in self.left_over():
            with suppress(psutil.Error):
                self.left.append(" ".join(left.cmdline()))
                left.kill()

    def left_over(self) -> list[psutil.Process]:
        """Processes of this run, found by the mark in their environment."""
        return marked(_MARK, str(self.directory))

    def pids(self, target: str) -> list[int]:
        """Processes of a kind that run now, in the order of their start."""
        if target == SUPERVISOR:
            return [self._supervisor.pid] if self._supervisor is not None else []
        service = service_of(target)
        if target not in PARTS:
            return [self._pids[service]] if self._pids.get(service) else []
        if self._supervisor is None:
            return []
        return [one.pid for one in running(PARTS[target][1], self._supervisor.pid)]

    @property
    def down(self) -> list[str]:
        """Services that do not report that they serve."""
        return sorted(name for name, state in self._states.items() if state not in _UP)

    async def all_up(self, at_s: float, deadline_s: float) -> None:
        """Waits until every service serves. Raises DeadlineExceeded."""
        if self._states and not self.down:
            return
        await self.happenings.first(
            lambda _: bool(self._states) and not self.down, at_s, deadline_s, "a state without loss"
        )

    async def told(self, service: str, kinds: tuple[str, ...], at_s: float) -> Happening:
        """Waits for the first console line of a service with a kind in `kinds`, at `at_s` or
        later.
        """

        def matches(one: Happening) -> bool:
            found = _LINE.match(one.detail) if one.what == CONSOLE else None
            return found is not None and found[1] == service and found[2] in kinds

        what = f"{service} {' or '.join(kinds)}"
        return await self.happenings.first(matches, at_s, patient(COMMIT_S), what)

    async def seen(self, trigger: Trigger, at_s: float, deadline_s: float) -> Happening:
        """Waits for the first occurrence of a trigger after `at_s`."""
        return await self.happenings.first(
            lambda one: one.what == trigger, at_s, deadline_s, trigger.value
        )

    async def serves(self, at_s: float) -> None:
        """Waits until `paceline up` reports, at `at_s` or later, that everything serves."""
        await self.happenings.first(
            lambda one: one.what == CONSOLE and one.detail.startswith("everything serves"),
            at_s,
            patient(START_S),
            "everything serves",
        )

    async def ended(self) -> None:
        """Waits until the run has ended by itself."""
        while not self._tasks[1].done():
            await asyncio.wait({self._tasks[1]}, timeout=patient(3600.0))
        self._tasks[1].result()

    async def stop(self) -> None:
        """Runs `paceline stop` and waits for the end of the run."""
        words = [sys.executable, "-m", "paceline.cli.main", "stop", "--config", str(self.config)]
        asking = await asyncio.create_subprocess_exec(
            *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await asking.communicate()
        if asking.returncode:
            raise FailedPrecondition("the run does not stop", seen=said.decode()[-500:])
        async with asyncio.timeout(patient(START_S)):
            await self.ended()

    # --- observation ------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        """Runs `paceline up`, and repeats it as a user would when it ends before the run does."""
        while not self._leaving:
            code = await self._up()
            self.happenings.tell(ENDED, str(code))
            if code == 0:
                return
            last = [one.detail for one in self.happenings.since(0) if one.what == CONSOLE][-3:]
            if code != -signal.SIGKILL and not self._leaving:
                self.runs_ended.append(f"status {code}: {' | '.join(last)}")
                if len(self.runs_ended) > 8:
                    raise FailedPrecondition("the run ends again and again", seen=last)

    async def _up(self) -> int:
        self._states, self._pids = {}, {}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", _MARK: str(self.directory)}
        environment.pop("REDIS_URL", None)
        self._supervisor = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paceline.cli.main", "up", "--lines", "text"),
            *("--config", str(self.config)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        assert self._supervisor.stdout is not None
        async for line in self._supervisor.stdout:
            self._hear(line.decode(errors="replace").rstrip())
        return await self._supervisor.wait()

    def _hear(self, line: str) -> None:
        found = _LINE.match(line)
        if found is not None and found[2] in (*_UP, *_DOWN):
            # A damaged checkpoint that the service can do without does not stop the service.
            if not (found[2] == "impaired" and "checkpoint" in line):
                self._states[found[1]] = found[2]
            self._pids[found[1]] = int(found[3])
        self.happenings.tell(CONSOLE, line)

    async def _follow(self) -> None:
        """Follows the facts, without end."""

        async def on_gap(first: int, last: int) -> None:
            return None  # a publisher that was killed begins anew

        address = str(self._tree["addresses"]["events"])
        with FactSubscriber(address, RUN_ID, on_gap) as facts:
            while True:
                try:
                    self._take(await facts.next(3600.0))
                except PacelineError as error:
                    self.happenings.tell("fact", str(error))

    def _take(self, fact: Fact) -> None:
        step = int(fact.context.step)
        holders = {one.holder for one in fact.slots}
        if fact.HasField("step_began"):
            self.happenings.tell(Trigger.ROLLOUT, step=step)
        if HOLDER_DRAFTER in holders:
            self.happenings.tell(Trigger.DRAFTER, step=step)
        if HOLDER_POLICY in holders:
            self.happenings.tell(Trigger.POLICY, step=step)
        if fact.HasField("step_finished") and fact.step_finished.record.finished_at_s:
            self.happenings.tell(Trigger.COMMITTED, step=int(fact.step_finished.record.step))

    def _spooled(self, path: Path, keeper: Keeper) -> None:
        if path.name.startswith("policy-"):
            keeper.keep(path, WEIGHTS)
            self.happenings.tell(Trigger.PREPARED, path.name)

    def _saved(self, path: Path, keeper: Keeper) -> None:
        if path.name.endswith(".tmp") and path.name[1:-4].isdigit():
            self.happenings.tell(Trigger.CHECKPOINT, path.name)
        elif path.name.startswith("step-"):
            keeper.keep(path, WEIGHTS, "state.json")

    # --- proxies ----------------------------------------------------------------------------------

    async def _start_proxies(self) -> None:
        gateway = str(self._tree["addresses"]["gateway"])
        for service, port in zip(_PROXIED["gateway"], self._proxy_ports, strict=True):
            here = f"127.0.0.1:{port}"
            trainer = service == "policy_trainer"
            push = (lambda: self.happenings.tell(Trigger.PUSH)) if trainer else (lambda: None)
            self.proxies["gateway"].append(Proxy(here, gateway, push))
            merge(self._tree, {service: {"addresses": {"gateway": here}}})
        run = self.directory / "run"
        features = f"unix://{run / 'redis-features' / 'redis.sock'}?db=0"
        durable = str(run / "redis-durable" / "redis.sock")
        for service in _PROXIED["redis"]:
            here = str(self.directory / f"{service}.sock")
            self.proxies["redis"].append(Proxy(here, durable))
            urls = {"durable_url": f"unix://{here}?db=0", "features_url": features}
            merge(self._tree, {service: {"redis": urls}})
        for proxy in self._all_proxies():
            await proxy.start()

    def _all_proxies(self) -> list[Proxy]:
        return [one for proxies in self.proxies.values() for one in proxies]
