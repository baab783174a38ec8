"""Measures how many tasks per second pass through one gateway, started by either launcher.

The scripted engine serves, so that tokens cost nothing. Only the gateway and the run's Redis
servers run.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gateway.backends import ScriptPace, engine_settings, write_model
from benchmarks.gateway.tasks import RUN_ID, TasksPlan, rollout_stub, samples_a_second
from benchmarks.launching import LOCAL, RAY
from benchmarks.result import Row, paired_ratio, say
from examples.scripted_engine.engine import SCRIPTED_PATH
from paceline.config import ServiceConfig
from paceline.config.load import load_config
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.local.supervisor import Supervisor, run_launches

SECTION = "tasks through one gateway"
STARTED = ("redis", "redis_features", "gateway")
_HEALTH_S = 120.0
_STOP_GRACE_S = 20.0


@dataclass(frozen=True, slots=True)
class _Run:
    """A gateway to launch."""

    directory: Path
    port: int  # of its gRPC server
    overrides: Sequence[str]

    @classmethod
    def of(cls, plan: TasksPlan, folder: Path, name: str, model: Path, script: Path) -> _Run:
        directory, port = folder / name, free_port()
        directory.mkdir()
        own = {
            "run.id": RUN_ID,
            "run.dir": str(directory),
            "security.run_tokens": False,
            "addresses.gateway": f"127.0.0.1:{port}",
            "addresses.http": f"127.0.0.1:{free_port()}",
            "gateway.model": str(model),
            "gateway.engine.kind": SCRIPTED_PATH,
            "gateway.engine.options.file": str(script),
            "gateway.engine.workers": 1,
            "gateway.engine.max_batch": plan.tasks * plan.samples,
        }
        return cls(directory, port, [f"{key}={json.dumps(value)}" for key, value in own.items()])

    @property
    def config(self) -> ServiceConfig:
        """Settings that all services share."""
        return load_config(ServiceConfig, "local", (), self.overrides)


async def launched_tasks(plan: TasksPlan, pairs: int) -> list[Row]:
    """Makes a row for each launcher from `pairs` of gateways; the launchers take turns.

    The median of a gateway's calls counts. Raises the errors of the launchers.
    """
    found: dict[str, list[float]] = {LOCAL: [], RAY: []}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        files = write_model(folder, engine_settings(ScriptPace(plan.tokens, 4, 0.0)))
        for pair in range(pairs):
            for launcher in (LOCAL, RAY) if pair % 2 == 0 else (RAY, LOCAL):
                run = _Run.of(plan, folder, f"{launcher}-{pair}", *files)
                found[launcher].append(await _tasks_a_second(run, plan, launcher))
                say(f"pair {pair}, {launcher}: {found[launcher][-1]:.0f} tasks/s")
    return rows_of(plan, found[LOCAL], found[RAY])


def rows_of(plan: TasksPlan, local: Sequence[float], on_ray: Sequence[float]) -> list[Row]:
    """Rates of both launchers, and the median ratio of the pairs."""
    return [
        {
            "section": SECTION,
            "launcher": launcher,
            "tasks/s": statistics.median(rates),
            "of local": ratio,
            "gateways": len(rates),
            "calls of each": plan.repeats,
            "tasks a call": plan.tasks,
            "samples a task": plan.samples,
        }
        for launcher, rates, ratio in (
            (LOCAL, local, "1"),
            (RAY, on_ray, str(paired_ratio(on_ray, local))),
        )
    ]


async def _tasks_a_second(run: _Run, plan: TasksPlan, launcher: str) -> float:
    """Tasks per second of one gateway, which is started and stopped; its first call does not
    count.
    """
    async with _supervised(run, launcher) as supervisor:
        try:
            await supervisor.start(patient(_HEALTH_S))
            async with rollout_stub(run.port) as stub:
                rates = [
                    await samples_a_second(stub, plan, step) for step in range(1 + plan.repeats)
                ]
        finally:
            await supervisor.stop(_STOP_GRACE_S)
    return statistics.median(rates[1:]) / plan.samples


@asynccontextmanager
async def _supervised(run: _Run, launcher: str) -> AsyncIterator[Supervisor]:
    """Yields a supervisor of the gateway and of the services that it needs."""
    if launcher == LOCAL:
        launches = run_launches(run.config, (), run.overrides)
        kept = [one for one in launches if one.name in ("forkserver", *STARTED)]
        yield Supervisor(kept, run.directory)
        return
    from paceline.cluster.launcher import RunOnCluster, on_cluster
    from paceline.cluster.nodes import pools_of

    pools = [
        replace(pool, services=tuple(name for name in pool.services if name in STARTED))
        for pool in pools_of((), run.overrides)
    ]
    asked = RunOnCluster(run.config, (), run.overrides, run.directory, pools, patient(_HEALTH_S))
    async with on_cluster(asked, None, lambda event: None) as cluster:
        yield Supervisor(cluster.launches(), run.directory, keep=cluster.keep)
