"""Runs that take turns, their coordinators from a script."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import turns
from benchmarks.demo_runs import DemoPlan, run_to_end
from paceline.errors import DeadlineExceeded
from paceline.local.patience import patient
from paceline.v1 import coordinator_pb2 as pb


@dataclass
class Scripted:
    """A scripted run of some steps that records when it continues."""

    plan: DemoPlan
    told: list[str]
    steps: int = 0
    ended: asyncio.Future[float] = field(default_factory=asyncio.Future)

    async def one_step(self) -> None:
        self.told.append(self.plan.arm)
        self.steps += 1
        if self.steps == self.plan.steps:
            self.ended.set_result(0.0)


async def order_of(**done: int) -> str:
    told: list[str] = []
    plans = {arm: DemoPlan(Path("runs"), 0, arm, 4, ()) for arm in done}
    runs: list[Any] = [Scripted(plans[arm], told, steps) for arm, steps in done.items()]
    await turns._take_turns(runs)
    return "".join(told)


async def test_who_was_last_is_first_in_the_next_round() -> None:
    assert await order_of(a=0, b=0, c=0) == "abccbaabccba"


async def test_other_work_has_a_turn_in_each_round() -> None:
    told: list[str] = []
    run: Any = Scripted(DemoPlan(Path("runs"), 0, "a", 3, ()), told)

    async def beside() -> None:
        told.append("+")

    await turns._take_turns([run], beside)
    assert "".join(told) == "a+a+a+"


async def test_who_is_behind_catches_up_first() -> None:
    assert await order_of(a=1, b=3) == "aaab"


async def test_a_coordinator_that_is_slow_to_answer_is_asked_again() -> None:
    answers: list[Any] = [DeadlineExceeded("late"), DeadlineExceeded("late"), "answer"]

    async def method(request: Any, *, timeout: float) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    run: Any = SimpleNamespace(_moment=partial(asyncio.sleep, 0))
    assert await turns._RunInTurns._asked(run, method, pb.PauseRunRequest()) == "answer"
    assert answers == []


async def test_a_run_ends_with_the_bench_that_is_cancelled(tmp_path: Path) -> None:
    said = tmp_path / "fifo"
    os.mkfifo(said)
    program = (
        "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    )
    running = asyncio.create_task(run_to_end([sys.executable, "-c", program, str(said)]))
    process = psutil.Process(int(await asyncio.to_thread(said.read_text)))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    psutil.wait_procs([process], timeout=patient(10))
    assert not process.is_running()
