"""Redis servers that a test may kill: the run's own servers, and foreign servers."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.local.patience import patient
from paceline.local.redis import RedisLauncher, find_redis_server, wait_redis


@dataclass
class RedisServer:
    """A redis-server process that a test may kill and start again over the same data."""

    launcher: RedisLauncher
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.launcher.url

    def start(self) -> None:
        self.start_without_waiting()
        asyncio.run(wait_redis(self.url, patient(10.0)))

    def start_without_waiting(self) -> None:
        self.launcher.prepare()
        settings = self.launcher.settings()
        self.process = start_redis(settings, self.launcher.directory / "redis.log")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def foreign_redis(directory: Path, *settings: str, within: Sequence[str] = ()) -> Iterator[str]:
    """URL of a foreign server over `directory`, which allows every command. `settings` are more
    lines of its redis.conf; `within`: words before its command.
    """
    directory.mkdir(parents=True, exist_ok=True)
    socket = directory / "s"
    lines = ["port 0", f"unixsocket {socket}", 'save ""', f"dir {directory}", *settings]
    server = start_redis("\n".join(lines), directory / "log", within=within)
    try:
        yield f"unix://{socket}?db=0"  # a client of connect() waits until it serves
    finally:
        server.kill()
        server.wait()


def start_redis(
    settings: str,
    log: Path,
    words: Sequence[str] = (),
    file: Path | None = None,
    within: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """A server process with the lines of a redis.conf, which is stored in `file` where the server
    has to write it too.
    """
    if file is not None:
        file.write_text(settings)
    with log.open("ab") as output:
        server = subprocess.Popen(
            [*within, find_redis_server(), file or "-", *words],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
    assert server.stdin is not None
    with server.stdin as config:
        if file is None:
            config.write(settings.encode())
    return server
