"""A child process's stops (SIGSTOP), its end and its group, over real processes."""

from __future__ import annotations

import asyncio
import os
import resource
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

from paceline.local.child import Child
from paceline.local.patience import patience, patient
from paceline.local.processes import usable_cores

STUB = """
import subprocess, sys, time
from paceline.local.processes import die_with_parent
die_with_parent()
print("runs", flush=True)
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    if word == "spin":
        end = time.monotonic() + float(rest)
        while time.monotonic() < end:
            pass
    elif word == "child":
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        made = subprocess.Popen(sleep, stdout=subprocess.DEVNULL)
        word = str(made.pid)
    else:
        raise SystemExit(int(rest))
    print(word, flush=True)
"""
LIMIT_S = 1.2
LOOK_S = LIMIT_S / 6


async def says(child: Child, seconds: float = 20.0) -> str:
    line = await asyncio.wait_for(child.program.stdout.readline(), patient(seconds))  # type: ignore[union-attr]
    return str(line.decode().strip())


def order(child: Child, text: str) -> None:
    child.program.stdin.write(f"{text}\n".encode())  # type: ignore[union-attr]


@asynccontextmanager
async def watched(limit_s: float = LIMIT_S) -> AsyncIterator[Child]:
    child = await Child.execute(
        sys.executable, "-c", STUB, stop_s=limit_s, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert await says(child) == "runs"
        yield child
    finally:
        await child.stop()


@contextmanager
def five_times_over() -> Iterator[None]:
    """Runs five busy processes per core."""
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in range(5 * usable_cores())]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


async def test_a_stopped_process_is_killed_within_the_limit_and_a_look() -> None:
    async with watched() as child, standstill() as stood_s:
        began = time.monotonic()
        os.kill(child.pid, signal.SIGSTOP)
        assert await child.wait() == -signal.SIGKILL
        took_s = time.monotonic() - began
        # the last sixth is patience for a busy machine
        most_s = LIMIT_S + 2 * LOOK_S * max(patience(), 1.0) + 1.0 + stood_s()
        assert LIMIT_S - 2 * LOOK_S < took_s < most_s
        assert child.last_words() == "was killed by SIGKILL, stopped for 1.2 s"


async def test_a_process_that_was_stopped_for_less_than_the_limit_is_alive() -> None:
    async with watched() as child:
        for _ in range(3):
            os.kill(child.pid, signal.SIGSTOP)
            await asyncio.sleep(LIMIT_S / 2)
            os.kill(child.pid, signal.SIGCONT)
            order(child, "spin 0.01")
            assert await says(child) == "spin"
        assert not child.ended.done()


@pytest.mark.slow
async def test_on_a_machine_loaded_five_times_over_nobody_is_killed() -> None:
    with five_times_over():
        async with watched() as one, watched() as other:
            order(one, f"spin {3 * LIMIT_S}")
            order(other, f"spin {3 * LIMIT_S}")
            assert [await says(one, 60), await says(other, 60)] == ["spin", "spin"]
            assert not one.ended.done()
            assert not other.ended.done()


@pytest.mark.slow
async def test_a_parent_that_was_stopped_kills_nobody() -> None:
    script = (
        "import asyncio\n"
        "from test_child import watched\n"
        "async def main():\n"
        "    async with watched() as one:\n"
        "        print('begins', flush=True)\n"
        f"        await asyncio.wait({{one.ended}}, timeout={5 * LIMIT_S})\n"
        "        print('killed' if one.ended.done() else 'alive', flush=True)\n"
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
    async with watched() as child:
        order(child, "exit 7")
        assert await child.wait() == 7
        assert child.last_words() == "exited with status 7"


async def test_a_limit_of_zero_watches_nobody() -> None:
    async with watched(0.0) as child:
        os.kill(child.pid, signal.SIGSTOP)
        await asyncio.wait({child.ended}, timeout=2 * LIMIT_S)
        assert psutil.Process(child.pid).status() == psutil.STATUS_STOPPED
        assert not child.ended.done()


@pytest.mark.parametrize("end", ["stop", "kill", "exit"])
async def test_the_processes_that_it_started_end_with_it(end: str) -> None:
    async with watched() as child:
        order(child, "child")
        below = psutil.Process(int(await says(child)))
        if end == "exit":
            order(child, "exit 0")
        elif end == "kill":
            child.kill(", for a test")
        else:
            await child.stop(1.0)
        await child.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, [below], patient(5))
        assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


async def test_a_stopped_descendant_counts_where_the_tree_is_watched() -> None:
    async with watched(0.0) as parent:
        order(parent, "child")
        below = int(await says(parent))
        tree = Child(parent.process, tree=True, stop_s=LIMIT_S)
        os.kill(below, signal.SIGSTOP)
        assert await asyncio.wait_for(tree.wait(), patient(10 * LIMIT_S)) == -signal.SIGKILL
        assert tree.verdict == ", stopped for 1.2 s"


@pytest.mark.parametrize("tree", [False, True])
async def test_a_parent_that_can_open_no_file_kills_nobody(tree: bool) -> None:
    async with watched(0.0) as parent:
        child = Child(parent.process, tree=tree, stop_s=LIMIT_S)
        _, most = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
        try:
            await asyncio.wait({child.ended}, timeout=3 * LOOK_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not child.ended.done()
        os.kill(child.pid, signal.SIGSTOP)  # found afterwards
        assert await asyncio.wait_for(child.wait(), patient(10 * LIMIT_S)) == -signal.SIGKILL
        assert child.verdict == ", stopped for 1.2 s"
