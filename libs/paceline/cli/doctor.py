"""Implements `paceline doctor`: checks the machine before a run, and checks an active run.

The checks are the same as at a start. Here all checks run, even after a failure.
"""

import asyncio
import json
import os
import resource
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # public

from rich.console import Console
from rich.markup import escape

from paceline.addresses import proxied
from paceline.cli.plan import plan_run
from paceline.config import ServiceConfig
from paceline.config.load import load_config
from paceline.errors import PacelineError
from paceline.local.checks import Finding, lack_of_room, looked_at, run_checks
from paceline.local.launch import Launch
from paceline.local.ports import require_free
from paceline.local.redis import find_redis_server
from paceline.local.services import services_of
from paceline.local.supervisor import EXTERNAL_REDIS_S, launch_of
from paceline.local.user_directory import socket_directory, user_directory
from paceline.report.machine import machine_in_words
from paceline.streams.connection import shown

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
_EXEMPT = ("no_grpc_proxy", "no_proxy")


def look_at_proxies(config: ServiceConfig, environment: Mapping[str, str] = os.environ) -> Finding:
    """A finding; it warns if gRPC or HTTP between this run's services would pass through a
    proxy.
    """
    named, exempt = (
        {name: value for name, value in environment.items() if value and name.lower() in names}
        for names in (_PROXIES, _EXEMPT)
    )
    if not named:
        return Finding("proxies", "ok", "the environment names none")
    seen = ", ".join(f"{name}={shown(value)}" for name, value in named.items())
    seen += ": for other hosts, such as the Hub; not for loopback and unix sockets"
    seen += "".join(f"; {name}={value}" for name, value in exempt.items())

    def is_exempt(address: str) -> bool:
        host = address.rpartition(":")[0].strip("[]")
        return any(proxy_bypass_environment(host, {"no": hosts}) for hosts in exempt.values())

    addresses = config.addresses.model_dump(exclude={"events"})  # ZeroMQ uses no proxy
    through = [
        f"addresses.{name}={address}"
        for name, value in addresses.items()
        for address in ((value,) if isinstance(value, str) else value)
        if proxied(address) and not is_exempt(address)
    ]
    if not through:
        return Finding("proxies", "ok", seen)
    return Finding(
        "proxies",
        "warn",
        f"{seen}; the proxy is asked for {', '.join(through)}",
        "name these hosts in no_proxy, unless the proxy leads to them",
    )


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
    yield looked_at(
        "memory", lambda: "; ".join(plan_run(files, overrides).lines).removeprefix("memory: ")
    )
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
    words = [*(word for path in files for word in ("--config", str(path))), *overrides]
    gateway = await asyncio.to_thread(
        run_checks, "gateway", GATEWAY_CHECKS, words, _GATEWAY_CHECKS_S, "fail"
    )
    for finding in gateway:
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


def _open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the gateway raises its own soft limit
    few = 0 <= hard < OPEN_FILES
    seen = f"{'any number' if hard < 0 else hard} for a process"
    advice = f"raise the hard limit, e.g. with LimitNOFILE, to {OPEN_FILES} or more" if few else ""
    return Finding("open files", "warn" if few else "ok", seen, advice)


EXIT_FAIL = 1
_MARKS = {"ok": "[green]ok  [/]", "warn": "[bold yellow]warn[/]", "fail": "[bold red]fail[/]"}
_NAME_WIDTH = 26


async def check_machine(
    files: Sequence[Path], overrides: Sequence[str], console: Console, *, as_json: bool
) -> int:
    """Prints the machine's findings for a run with these settings; returns 0, or 1 after a failed
    check.

    Raises ConfigError if the settings cannot be read.
    """
    config = load_config(ServiceConfig, "local", files, overrides)
    found: list[Finding] = []
    async for finding in findings(config, [path.absolute() for path in files], overrides):
        found.append(finding)
        if not as_json:
            console.print(finding_line(finding), highlight=False, soft_wrap=True)
    failed = sum(one.verdict == "fail" for one in found)
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        told = f"[bold red]{failed} fail[/]: a run would not start" if failed else "nothing fails"
        console.print(told, highlight=False)
    return EXIT_FAIL if failed else 0


def finding_line(finding: Finding) -> str:
    """A finding as a line with rich markup; the advice is on the next line."""
    line = f"{_MARKS[finding.verdict]} {finding.check:<{_NAME_WIDTH}} {escape(finding.seen)}"
    if finding.verdict == "ok" or not finding.advice:
        return line
    return f"{line}\n{'':{_NAME_WIDTH + 5}} [bold]->[/] {escape(finding.advice)}"
