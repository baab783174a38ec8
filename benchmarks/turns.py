"""Has demo runs take turns, a step each, so that a machine's changes of speed meet all of them.

All runs are up from the beginning to the end. One goes on for a step, as by `paceline resume`,
while the others rest between two of theirs, as by `paceline pause`: their processes take no core.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Iterator, Sequence
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
"""From a run's start to its first rest, and for one of its steps, on a quiet machine."""
SAY_EVERY = 10
_ASK_AGAIN_S = 0.2


async def finished_in_turns(plans: Sequence[DemoPlan]) -> list[DemoRun]:
    """The finished runs of these plans, in their order; those that are not there are made now, and
    what they print goes to a file beside each.

    Raises as demo_runs.finished_run; DeadlineExceeded when a run neither rests nor ends.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(_one_token())
        turns: list[_RunInTurns] = []
        for plan in plans:
            if not plan.is_finished():
                turns.append(_RunInTurns(plan, await plan.command(), stack))
                await turns[-1].first_rest()
        await _take_turns(turns)
        for one in turns:
            plan = one.plan
            plan.finish(await one.ended, one.resumed)
    return [plan.read() for plan in plans]


@contextmanager
def _one_token() -> Iterator[None]:
    """This process is the operator of all runs that it starts, and has one token for them."""
    variable = SecurityConfig().token_env
    if os.environ.get(variable):
        yield
        return
    os.environ[variable] = secrets.token_urlsafe(32)
    try:
        yield
    finally:
        del os.environ[variable]


async def _take_turns(turns: Sequence[_RunInTurns]) -> None:
    """Those that have done fewest steps go on; the last of a round is the first of the next, so
    that none gains by its place.
    """
    order = list(turns)
    while going := [one for one in order if not one.ended.done()]:
        done = min(one.steps for one in going)
        for one in going:
            if one.steps == done:
                await one.one_step()
        if (done + 1) % SAY_EVERY == 0:
            say(f"seed {going[0].plan.seed}: {done + 1} of {going[0].plan.steps} steps")
        order.reverse()


class _RunInTurns:
    """One run among others."""

    def __init__(self, plan: DemoPlan, command: Sequence[str], stack: AsyncExitStack) -> None:
        """Starts it; the stack closes what talks to it."""
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
        """Until it rests for the first time, or has ended."""
        await self._within(START_S, self._pause_when_begun())

    async def one_step(self) -> None:
        """Until it rests after another step, or has ended."""
        await self._within(STEP_S, self._next_step())

    async def _within(self, seconds: float, work: Awaitable[None]) -> None:
        """Raises DeadlineExceeded, and what ended the run."""
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
            except Unavailable:  # it is not up yet
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
        except FailedPrecondition:  # its last step has begun, with which it ends
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
        """Where its coordinator is: of one that was broken off not where it was before."""
        if self._written_ns() == self._before:
            raise Unavailable("the run has not begun", seen=self.plan.directory)
        coordinator = find_coordinator(str(self.plan.directory), [])
        if coordinator.address != self._address:
            connection = await self._stack.enter_async_context(coordinator.channel())
            self._address, self._stub = coordinator.address, CoordinatorServiceStub(connection)

    def _written_ns(self) -> int:
        """When its settings were written; 0 where there are none."""
        file = self.plan.directory / "config.toml"
        return file.stat().st_mtime_ns if file.is_file() else 0

    async def _snapshot(self) -> pb.GetSnapshotResponse:
        answer: pb.GetSnapshotResponse = await self._asked(
            self._stub.GetSnapshot, pb.GetSnapshotRequest()
        )
        return answer

    async def _asked(self, method: Any, request: Message) -> Any:
        """A coordinator that is slow to answer is asked again, as long as a step may take: what it
        is asked for may be asked for twice.
        """
        while True:
            try:
                with rpc_errors():
                    return await method(request, timeout=patient(DEADLINE_S))
            except DeadlineExceeded:
                await self._moment()
