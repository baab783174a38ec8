"""A deadline of processes counts the time that they use while they work, otherwise all time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from paceline.local.patience import WorkClock, patient

SPIN = "while True: pass"
SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", request.param]) as running:
        yield running
        running.kill()


async def waited_s(clock: WorkClock, deadline_s: float) -> float:
    began_s = time.monotonic()
    never = asyncio.get_running_loop().create_future()
    assert not await clock.wait((never,), deadline_s)
    return time.monotonic() - began_s


@pytest.mark.slow
@pytest.mark.parametrize("process", [SPIN], indirect=True)
async def test_a_process_that_gets_a_part_of_a_core_has_as_much_longer(
    process: subprocess.Popen[bytes],
) -> None:
    """The process runs for a fifth of the time, as beside four other processes."""

    async def starve() -> None:
        while True:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.16)
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.04)

    starving = asyncio.create_task(starve())
    assert await waited_s(WorkClock(lambda: [process.pid]), 1.0) > 3.0
    starving.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("process", [SPIN, SLEEP], indirect=True)
async def test_who_computes_without_end_or_does_nothing_misses_the_deadline(
    process: subprocess.Popen[bytes],
) -> None:
    assert await waited_s(WorkClock(lambda: [process.pid]), 2.0) < patient(10.0)


@pytest.mark.parametrize("process", [SPIN], indirect=True)
async def test_a_stopped_process_and_one_that_is_gone_count_as_the_wall_does(
    process: subprocess.Popen[bytes],
) -> None:
    process.send_signal(signal.SIGSTOP)
    clock = WorkClock(lambda: [process.pid])
    assert await waited_s(clock, 1.0) >= 1.0
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 1.0 <= await waited_s(clock, 1.0) < 5.0


async def test_a_word_of_progress_begins_the_count_anew() -> None:
    clock = WorkClock(list)

    async def speak() -> None:
        for _ in range(8):
            await asyncio.sleep(0.25)
            clock.restart()

    speaking = asyncio.create_task(speak())
    assert await waited_s(clock, 1.5) > 3.0
    await speaking
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    assert await clock.wait((done,), 1.0)
