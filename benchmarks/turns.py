"""Lets demo runs take turns of one step each, so that a machine's changes of speed affect all runs.

All runs live from the beginning to the end. One run continues for a step, as by `paceline resume`.
The other runs rest between two steps, as by `paceline pause`: their processes take no core.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from google.protobuf.message import Message

from benchmarks.demo_runs import DemoPlan, DemoRun, run_to_end
from benchmarks.result import say
from paceline.cli.access import DEADLINE_S, find_coordinator
from paceline.config import SecurityConfig
from paceline.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from paceline.local.patience import patient
from paceline.rpc import rpc_errors
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1.coordinator_pb2_grpc import CoordinatorServiceStub

START_S, STEP_S = 240.0, 300.0
"""Deadlines on a quiet machine: from a run's start to its first rest, and for one of its steps."""
SAY_EVERY = 10
_ASK_AGAIN_S = 0.2


async def finished_in_turns(
    plans: Sequence[DemoPlan], beside: Callable[[], Awaitable[None]] | None = None
) -> list[DemoRun]:
    """Returns the finished runs of the given plans, in their order.

    `beside`: other work that takes a turn in each round.

    Makes the missing runs; their output goes to a file beside each run. Raises the errors of
    demo_runs.finished_run, and DeadlineExceeded if a run neither rests nor ends.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(_one_token())
        turns: list[_RunInTurns] = []
        for plan in plans:
            if not plan.is_finished():
                turns.append(_RunInTurns(plan, await plan.command(), stack))
                await turns[-1].first_rest()
        await _take_turns(turns, beside)
        for one in turns:
            plan = one.plan
            plan.finish(await one.ended, one.resumed)
    return [plan.read() for plan in plans]


@contextmanager
def _one_token() -> Iterator[None]:
    """Gives all runs of this process one operator token."""
    variable = SecurityConfig().token_env
    if os.environ.get(variable):
        yield
        return
    os.environ[variable] = secrets.token_urlsafe(32)
    try:
        yield
    finally:
        del os.environ[variable]


async def _take_turns(
    turns: Sequence[_RunInTurns], beside: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Continues the runs with the fewest steps, round by round.

    The order reverses after each round, so that no run gains by its place.
    """
    order = list(turns)
    while going := [one for one in order if not one.ended.done()]:
        done = min(one.steps for one in going)
        for one in going:
            if one.steps == done:
                await one.one_step()
        if beside is not None:
            await beside()
        if (done + 1) % SAY_EVERY == 0:
            say(f"seed {going[0].plan.seed}: {done + 1} of {going[0].plan.steps} steps")
        order.reverse()


class _RunInTurns:
    """One run among several that take turns."""

    def __init__(self, plan: DemoPlan, command: Sequence[str], stack: AsyncExitStack) -> None:
        """Starts the run; `stack` closes its connections."""
        self.plan = plan
        self.resumed = plan.resumes
        self.steps = 0  # done
        self._before = self._written_ns()
        log = plan.directory.parent / "demo.log"
        self.ended = asyncio.create_task(run_to_end(command, log))
        self._stack = stack
        self._address = ""  # of its coordinator
        self._stub: Any = None

    async def first_rest(self) -> None:
        """Waits until the run rests for the first time or has ended."""
        await self._within(START_S, self._pause_when_begun())

    async def one_step(self) -> None:
        """Waits until the run rests after another step or has ended."""
        await self._within(STEP_S, self._next_step())

    async def _within(self, seconds: float, work: Awaitable[None]) -> None:
        """Awaits `work`. Raises DeadlineExceeded, and the error that ended the run."""
        try:
            async with asyncio.timeout(patient(seconds)):
                await work
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.plan.arm}, seed {self.plan.seed}, neither rests nor ends",
                seen=f"{patient(seconds):.0f} s",
            ) from error
        if self.ended.done():
            self.ended.result()

    async def _pause_when_begun(self) -> None:
        while not self.ended.done():
            try:
                await self._find()
                begun = (await self._snapshot()).phase != "ready"
            except Unavailable:  # the coordinator is not up yet
                begun = False
            if begun:
                await self._pause()
                await self._rest()
                break
            await self._moment()

    async def _next_step(self) -> None:
        before = self.steps
        while self.steps == before and not self.ended.done():  # a pause may forestall the step
            await self._asked(self._stub.ResumeRun, pb.ResumeRunRequest())
            await self._pause()
            await self._rest()

    async def _pause(self) -> None:
        try:
            await self._asked(self._stub.PauseRun, pb.PauseRunRequest())
        except FailedPrecondition:  # the last step has begun, and the run ends with it
            await asyncio.wait((self.ended,))

    async def _rest(self) -> None:
        while not self.ended.done():
            snapshot = await self._snapshot()
            if snapshot.phase == "paused":
                self.steps = int(snapshot.step)
                return
            await self._moment()

    async def _moment(self) -> None:
        await asyncio.wait((self.ended,), timeout=_ASK_AGAIN_S)

    async def _find(self) -> None:
        """Finds the run's coordinator; a resumed run has a new address.

        Raises Unavailable if the run has not begun.
        """
        if self._written_ns() == self._before:
            raise Unavailable("the run has not begun", seen=self.plan.directory)
        coordinator = find_coordinator(str(self.plan.directory), [])
        if coordinator.address != self._address:
            connection = await self._stack.enter_async_context(coordinator.channel())
            self._address, self._stub = coordinator.address, CoordinatorServiceStub(connection)

    def _written_ns(self) -> int:
        """Time at which its settings were written; 0 without settings."""
        file = self.plan.directory / "config.toml"
        return file.stat().st_mtime_ns if file.is_file() else 0

    async def _snapshot(self) -> pb.GetSnapshotResponse:
        answer: pb.GetSnapshotResponse = await self._asked(
            self._stub.GetSnapshot, pb.GetSnapshotRequest()
        )
        return answer

    async def _asked(self, method: Any, request: Message) -> Any:
        """Calls the coordinator, and repeats a call that is slow, as long as a step may take.

        The methods called may therefore run twice.
        """
        while True:
            try:
                with rpc_errors():
                    return await method(request, timeout=patient(DEADLINE_S))
            except DeadlineExceeded:
                await self._moment()
