"""Checks whether a run can start on this machine, for `paceline doctor`.

The checks are the same as at a start. Here all checks run, even after a failure.
"""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

from paceline.cli.plan import plan_run
from paceline.cli.proxy_checks import look_at_proxies
from paceline.config import ServiceConfig
from paceline.errors import PacelineError
from paceline.local.child import Child
from paceline.local.disk import lack_of_room
from paceline.local.findings import Finding, looked_at
from paceline.local.launch import Launch
from paceline.local.patience import patient
from paceline.local.ports import require_free
from paceline.local.process_directory import socket_directory
from paceline.local.redis import find_redis_server
from paceline.local.services import services_of
from paceline.local.supervisor import EXTERNAL_REDIS_S, launch_of
from paceline.local.user_directory import user_directory
from paceline.report.machine import machine_in_words

OPEN_FILES = 4096
"""Recommended limit of open files: each agent connection and each worker's socket uses a file."""
GATEWAY_CHECKS = "paceline.services.rollout_gateway.machine_checks"
_GATEWAY_CHECKS_S = 120.0


async def findings(
    config: ServiceConfig, files: Sequence[Path], overrides: Sequence[str]
) -> AsyncIterator[Finding]:
    """Yields the findings for a run with these settings, each as soon as it is available."""
    yield Finding("machine", "ok", machine_in_words())
    yield looked_at("user directory", lambda: f"{user_directory()} is private")
    yield looked_at("sockets", lambda: f"{socket_directory()} is private and short")
    yield look_at_proxies(config)
    yield _disk(Path(config.run.dir))
    yield _open_files()
    yield looked_at("memory", lambda: _memory(files, overrides))
    for spec in services_of(len(config.addresses.gateways)):
        try:
            launch = launch_of(spec, config, ())
            if not spec.address_key:
                yield await _redis(launch)
        except PacelineError as error:
            yield Finding.of_error(spec.name, error)
            continue
        for address, setting in launch.ports:
            yield looked_at(setting, partial(_free, address, setting))
    for finding in await _of_gateway(files, overrides):
        yield finding


async def _redis(launch: Launch) -> Finding:
    """Checks the server to start, or the external server. Raises the errors of its check."""
    if launch.command:
        return Finding(launch.name, "ok", f"{find_redis_server()} will be started")
    assert launch.healthy is not None
    doubts = await launch.healthy(EXTERNAL_REDIS_S)
    if not doubts:
        return Finding(launch.name, "ok", "the server that the settings name answers")
    return Finding(launch.name, "warn", doubts, "change the URL or its redis.conf, or leave it out")


def _free(address: str, setting: str) -> str:
    require_free(address, setting)
    return f"{address} is free"


def _disk(directory: Path) -> Finding:
    there = next(one for one in (directory, *directory.absolute().parents) if one.is_dir())
    try:
        lack = lack_of_room(there)
    except OSError as error:
        advice = "set run.dir to a directory that this user may write"
        return Finding("disk", "fail", f"{there}: {error.strerror}", advice)
    if lack:
        return Finding("disk", "fail", lack, "make room, or set run.dir to another disk")
    return Finding("disk", "ok", f"{shutil.disk_usage(there).free >> 20:,} MiB free at {there}")


def _memory(files: Sequence[Path], overrides: Sequence[str]) -> str:
    return "; ".join(plan_run(files, overrides).lines).removeprefix("memory: ")


def _open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the gateway raises its own soft limit
    few = 0 <= hard < OPEN_FILES
    seen = f"{'any number' if hard < 0 else hard} for a process"
    advice = f"raise the hard limit, e.g. with LimitNOFILE, to {OPEN_FILES} or more" if few else ""
    return Finding("open files", "warn" if few else "ok", seen, advice)


async def _of_gateway(files: Sequence[Path], overrides: Sequence[str]) -> list[Finding]:
    """Runs the gateway's own checks in a separate process."""
    words = [word for path in files for word in ("--config", str(path))]
    command = (sys.executable, "-m", GATEWAY_CHECKS, *words, *overrides)
    child = await Child.execute(*command, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(patient(_GATEWAY_CHECKS_S)):
            out, err = await child.program.communicate()
    except TimeoutError:
        return [Finding("gateway", "fail", f"{GATEWAY_CHECKS} is not done in time")]
    finally:
        await child.stop()
    if child.returncode:
        words = err.decode(errors="replace").strip().splitlines() or [""]
        return [Finding("gateway", "fail", f"{GATEWAY_CHECKS} {child.last_words()}: {words[-1]}")]
    return [Finding(**each) for each in json.loads(out.decode().splitlines()[-1])]
