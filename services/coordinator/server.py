"""Serves CoordinatorService and publishes facts while the runner runs the run."""

import asyncio
import time
from contextlib import suppress
from typing import Any

from paceline.errors import FailedPrecondition, RunFailed
from paceline.events import FactPublisher
from paceline.messages import versions_to_proto
from paceline.report.solved import total_unscored
from paceline.rpc import Server, check_events
from paceline.rpc.progress import add_progress
from paceline.services.coordinator.calls.base import Peers
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.journal.entry import all_slots
from paceline.services.coordinator.journal.journal import Journal
from paceline.services.coordinator.machine import events, step
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.state import Phase, State
from paceline.services.coordinator.runner import Runner
from paceline.streams import Ledger, connect
from paceline.telemetry import get_logger
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc

SERVICE_NAME = "paceline.v1.CoordinatorService"
FINISH_GRACE_S = 1.0
"""Seconds between the last fact and the end of the process, for subscribers that missed a fact."""
_STOP_GRACE_S = 1.0


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers from the runner's memory."""

    def __init__(self, run_id: str, runner: Runner) -> None:
        self._run_id = run_id
        self._runner = runner

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Any) -> Any:
        """Returns the whole state."""
        state, records = self._runner.transitions.state, self._runner.transitions.records
        return pb.GetSnapshotResponse(
            run_id=self._run_id,
            step=state.step,
            total_steps=state.settings.total_steps,
            phase=state.doing,
            slots=all_slots(state),
            versions=versions_to_proto(state.versions),
            last_step=records.finished[-1] if records.finished else None,
            failure=state.failure,
            away=sorted(state.lost),
            promoted_drafter=state.promoted,
            paused=state.paused,
            samples_unscored=total_unscored(records.finished),
        )

    async def ListSteps(self, request: pb.ListStepsRequest, context: Any) -> Any:
        """Returns one page of records of finished steps, starting at `from_step`."""
        return pb.ListStepsResponse(steps=self._runner.transitions.records.page(request.from_step))

    async def StopRun(self, request: pb.StopRunRequest, context: Any) -> Any:
        """Ends the run after the running step. Raises FailedPrecondition when no run is live."""
        _require_live(self._runner.transitions.state)
        return pb.StopRunResponse(total_steps=self._runner.request_stop())

    async def PauseRun(self, request: pb.PauseRunRequest, context: Any) -> Any:
        """Pauses the run. Raises FailedPrecondition when no run is live or all steps have begun."""
        before = await self._choose(events.Paused(self._runner.now()))
        begun, steps = before.rollouts.begun, before.settings.total_steps
        if before.all_begun:
            raise FailedPrecondition(
                "no step is left for a pause to hold back",
                seen=f"{begun} of {steps} steps have begun, {before.doing}",
                allowed="a run with steps that have not begun",
            )
        return pb.PauseRunResponse(steps=begun)

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Any) -> Any:
        """Continues a paused run. Raises FailedPrecondition when no run is live."""
        before = await self._choose(events.Continued(self._runner.now()))
        return pb.ResumeRunResponse(was_paused=before.paused)

    async def _choose(self, event: Event) -> State:
        """Applies an operator's event and returns the state before it. Raises FailedPrecondition
        when no run is live.
        """
        _require_live(self._runner.transitions.state)
        before = await self._runner.choose(event)
        _require_live(before)
        return before


def _require_live(state: State) -> None:
    if state.phase not in step.LIVE:
        allowed = ", ".join(one for one in Phase if one in step.LIVE)
        raise FailedPrecondition("no run goes on", seen=state.phase, allowed=f"phase {allowed}")


async def serve(config: CoordinatorConfig, stop: asyncio.Event) -> None:
    """Runs the run; returns when it is finished or `stop` is set. Raises ConfigError for
    contradictory settings, RunFailed when the run failed.
    """
    config.check()
    events, curve_key = config.addresses.events, config.security.curve_key
    check_events(events, config.security)
    client = connect(config.redis.durable_url)
    peers = Peers(config.addresses, config.security)
    facts = FactPublisher(events, config.run.id, curve_key=curve_key)
    server = Server(config.addresses.coordinator, config.security)
    try:
        journal, ledger = Journal(client, config.run.id), Ledger(client, config.run.id)
        runner = Runner(config, journal, peers, facts.publish, time.time, ledger)
        servicer = CoordinatorServicer(config.run.id, runner)
        add = coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server
        server.add(add, servicer, SERVICE_NAME)
        add_progress(server, runner.stall.progress)
        await server.start()
        if await runner.run(stop):
            await _leave(config, runner, stop)
    finally:
        await server.stop(_STOP_GRACE_S)
        facts.close()
        await peers.close()
        await client.aclose()


async def _leave(config: CoordinatorConfig, runner: Runner, stop: asyncio.Event) -> None:
    """Waits FINISH_GRACE_S for subscribers to read the last facts. Raises RunFailed for a failed
    run.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(FINISH_GRACE_S):
            await stop.wait()
    state = runner.transitions.state
    if state.phase is Phase.FAILED:
        raise RunFailed(f"run {config.run.id} failed in step {state.step}: {state.failure}")
    get_logger("coordinator").info("run finished", run=config.run.id, steps=state.step)
