"""A Redis that others run: every command is allowed, every setting is the test's."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.local.redis import find_redis_server


@contextmanager
def foreign_redis(directory: Path, *settings: str) -> Iterator[str]:
    """URL of a server over `directory`; `settings` are lines of redis.conf that outrank ours."""
    directory.mkdir(parents=True, exist_ok=True)
    socket = directory / "s"
    lines = ["port 0", f"unixsocket {socket}", 'save ""', f"dir {directory}", *settings]
    with (directory / "log").open("ab") as log:
        server = subprocess.Popen(
            [find_redis_server(), "-"], stdin=subprocess.PIPE, stdout=log, stderr=log
        )
    assert server.stdin is not None
    with server.stdin as config:
        config.write("\n".join(lines).encode())
    try:
        yield f"unix://{socket}?db=0"  # a client of connect() waits until it serves
    finally:
        server.kill()
        server.wait()
