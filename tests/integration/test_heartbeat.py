"""Beats over real processes: a stopped one is killed within the limit and a beat, a busy one never.

Seconds are taken here, by the clock of this process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest
from standstill import standstill

from paceline.local.heartbeat import Heartbeat
from paceline.local.patience import patience, patient
from paceline.local.process_directory import process_directory
from paceline.local.processes import child_environment, usable_cores

STUB = str(Path(__file__).parent / "beating_stub.py")
LIMIT_S = 1.2
BEAT_S = LIMIT_S / 6


class Watched:
    """A child, and how its heartbeat says that it ended."""

    def __init__(self, process: asyncio.subprocess.Process, heartbeat: Heartbeat) -> None:
        self.process, self.heartbeat = process, heartbeat
        self.ended = asyncio.create_task(heartbeat.outlived(process))

    async def says(self, seconds: float = 20.0) -> str:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), patient(seconds))
        return line.decode().strip()

    def order(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())


@asynccontextmanager
async def watched(limit_s: float = LIMIT_S) -> AsyncIterator[Watched]:
    heartbeat = Heartbeat(limit_s)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        STUB,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(heartbeat.environment),
    )
    one = Watched(process, heartbeat)
    try:
        assert await one.says() == "answers"
        yield one
    finally:
        if process.returncode is None:
            process.kill()
        await one.ended
        await process.communicate()


@contextmanager
def five_times_over() -> Iterator[None]:
    """Five busy processes a core."""
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in range(5 * usable_cores())]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


async def test_a_stopped_process_is_killed_within_the_limit_and_a_beat() -> None:
    async with watched() as one, standstill() as stood_s:
        began = time.monotonic()
        os.kill(one.process.pid, signal.SIGSTOP)
        assert await one.ended == -signal.SIGKILL
        took_s = time.monotonic() - began
        # the last sixth waits for a busy machine
        most_s = LIMIT_S + BEAT_S * max(patience(), 1.0) + 1.0 + stood_s()
        assert LIMIT_S - 2 * BEAT_S < took_s < most_s
        assert one.heartbeat.verdict == ", silent for 1.2 s"
    assert list(process_directory().glob("beats-*")) == []


async def test_a_process_that_lets_no_thread_of_python_run_is_alive() -> None:
    async with watched() as one:
        one.order(f"hold {3 * LIMIT_S}")
        assert await one.says() == "hold"
        assert not one.ended.done()


async def test_a_process_that_runs_may_be_silent_for_several_limits() -> None:
    async with watched() as one:
        one.order(f"away {2 * LIMIT_S}")
        assert await one.says() == "away"
        one.order("spin 0.01")
        assert await one.says() == "spin"
        assert not one.ended.done()


async def test_a_process_that_stays_silent_is_killed_though_it_runs() -> None:
    async with watched() as one:
        one.order("away 3600")
        assert await asyncio.wait_for(one.ended, patient(20 * LIMIT_S)) == -signal.SIGKILL
        assert one.heartbeat.verdict == ", silent for 1.2 s"


async def test_a_process_that_was_stopped_for_less_than_the_limit_is_alive() -> None:
    async with watched() as one:
        for _ in range(3):
            os.kill(one.process.pid, signal.SIGSTOP)
            await asyncio.sleep(LIMIT_S / 2)
            os.kill(one.process.pid, signal.SIGCONT)
            one.order("spin 0.01")
            assert await one.says() == "spin"
        assert not one.ended.done()


async def test_a_silent_process_that_was_stopped_for_less_than_the_limit_is_alive() -> None:
    async with watched() as one:
        one.order(f"away {3 * LIMIT_S}")  # silent as on a machine that gives it no time
        for _ in range(3):
            os.kill(one.process.pid, signal.SIGSTOP)
            await asyncio.sleep(LIMIT_S / 2)
            os.kill(one.process.pid, signal.SIGCONT)
            await asyncio.sleep(2 * BEAT_S)
        assert await one.says() == "away"
        assert not one.ended.done()


@pytest.mark.slow
async def test_on_a_machine_loaded_five_times_over_nobody_is_killed() -> None:
    with five_times_over():
        async with watched() as one, watched() as other:
            one.order(f"spin {5 * LIMIT_S}")
            other.order(f"hold {5 * LIMIT_S}")
            assert [await one.says(60), await other.says(60)] == ["spin", "hold"]
            assert not one.ended.done()
            assert not other.ended.done()


async def test_a_parent_that_was_stopped_kills_nobody() -> None:
    script = (
        "import asyncio\n"
        "from test_heartbeat import watched\n"
        "async def main():\n"
        "    async with watched() as one:\n"
        "        print('begins', flush=True)\n"
        f"        await asyncio.wait({{one.ended}}, timeout={8 * LIMIT_S})\n"
        "        print('silent' if one.ended.done() else 'alive', flush=True)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert parent.stdout is not None
    assert await parent.stdout.readline() == b"begins\n"
    parent.send_signal(signal.SIGSTOP)
    await asyncio.sleep(3 * LIMIT_S)
    parent.send_signal(signal.SIGCONT)
    assert await parent.stdout.readline() == b"alive\n"
    await parent.communicate()


async def test_a_process_that_ends_by_itself_says_how() -> None:
    async with watched() as one:
        one.order("exit 7")
        assert await one.ended == 7
        assert one.heartbeat.verdict == ""


async def test_a_limit_of_zero_watches_nobody() -> None:
    async with watched(0.0) as one:
        os.kill(one.process.pid, signal.SIGSTOP)
        await asyncio.wait({one.ended}, timeout=2 * LIMIT_S)
        assert psutil.Process(one.process.pid).status() == psutil.STATUS_STOPPED
        assert not one.ended.done()


async def test_a_child_that_has_been_told_to_end_may_be_silent() -> None:
    async with watched() as one:
        one.heartbeat.expect_end()
        os.kill(one.process.pid, signal.SIGSTOP)
        await asyncio.wait({one.ended}, timeout=2 * LIMIT_S)
        assert not one.ended.done()


@pytest.mark.parametrize("limit_s", [0.6, 3.0])
async def test_a_process_that_never_answers_is_left_to_the_deadlines_of_its_start(
    limit_s: float,
) -> None:
    heartbeat = Heartbeat(limit_s)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=-1)
    ended = asyncio.create_task(heartbeat.outlived(process))
    await asyncio.wait({ended}, timeout=1.0)
    assert not ended.done()
    process.kill()
    assert (await ended, heartbeat.verdict) == (-signal.SIGKILL, "")
    await process.communicate()
