"""Follows a run by its facts, with a snapshot where facts are missing.

Owns the subscription, not what is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.cli.run_state import RunState
from paceline.config import ServiceConfig
from paceline.errors import DeadlineExceeded, PacelineError
from paceline.events import FactSubscriber
from paceline.rpc import channel, rpc_errors
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1.coordinator_pb2_grpc import CoordinatorServiceStub

_SNAPSHOT_S = 5.0
_QUIET_S = 30.0
"""Without a fact for so long the coordinator is asked: it may have been restarted."""
_ASK_AGAIN_S = 1.0
"""A coordinator that did not answer is not asked again sooner, however many facts wait."""

OnRecord = Callable[[pb.StepRecord], None]


async def follow(config: ServiceConfig, state: RunState, on_record: OnRecord) -> None:
    """Keep `state` up to date until the run has ended; `on_record` hears of each finished step
    once.
    """
    async with channel(config.addresses.coordinator, config.security) as connection:
        stub = CoordinatorServiceStub(connection)  # type: ignore[no-untyped-call]

        behind, asked_s = False, 0.0

        async def catch_up(first: int, last: int) -> None:
            nonlocal behind, asked_s
            behind = True
            try:
                with rpc_errors():
                    snapshot = await stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=_SNAPSHOT_S)
                    wanted = pb.ListStepsRequest(from_step=state.complete)
                    steps = await stub.ListSteps(wanted, timeout=_SNAPSHOT_S)
            except PacelineError:
                return  # It restarts or has ended; asked again with a later fact.
            finally:
                asked_s = time.monotonic()
            behind = False
            for record in steps.steps:
                _take(state.take_record(record), on_record)
            _take(state.take_snapshot(snapshot, time.time()), on_record)

        with FactSubscriber(config.addresses.events, config.run.id, catch_up) as facts:
            await catch_up(0, 0)
            while (
                not state.finished or state.failure
            ):  # a failed run is taken up again by the next coordinator
                try:
                    _take(state.take_fact(await facts.next(_QUIET_S)), on_record)
                except DeadlineExceeded:
                    behind = True
                if behind and time.monotonic() - asked_s >= _ASK_AGAIN_S:
                    await catch_up(0, 0)
            if behind:
                await catch_up(0, 0)


def _take(record: pb.StepRecord | None, on_record: OnRecord) -> None:
    if record is not None:
        on_record(record)
