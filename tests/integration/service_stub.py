"""A process for the supervisor's tests: serves health on an address and ends as ordered."""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

from paceline.config import SecurityConfig
from paceline.local.news import report_turns, tell_supervisor
from paceline.local.processes import NEWS_VARIABLE, child_environment, die_with_parent
from paceline.rpc import Server


async def serve(words: argparse.Namespace) -> int:
    """Serve until SIGTERM; SIGUSR1 ends the process as --exits orders."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if words.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = Server(words.address, SecurityConfig())
    await server.start()
    server.set_serving("stub", not words.sick)
    turning = asyncio.create_task(report_turns(words.turns))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, time.sleep, 600)
    if words.starts:
        with words.starts.open("a") as starts:
            starts.write("x")
    if words.part_dies:
        tell_supervisor(
            "impaired", f"a part [died]\nits pipe: {child_environment()[NEWS_VARIABLE]!r}"
        )
        tell_supervisor("recovered", "x" * 10_000)
    await stop.wait()
    turning.cancel()
    await server.stop(0.1)
    if words.exits:
        sys.stderr.write("an earlier line\ncoordinator: the disk is full\nof data\n")
    return words.exits


def main() -> int:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--exits", type=int, default=0)
    parser.add_argument("--sick", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--grandchild", type=Path)
    parser.add_argument("--starts", type=Path)
    parser.add_argument("--part-dies", action="store_true")
    parser.add_argument("--turns", type=float, default=0.0)
    words = parser.parse_args()
    if words.grandchild:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        words.grandchild.write_text(str(child.pid))
    return asyncio.run(serve(words))


if __name__ == "__main__":
    raise SystemExit(main())
