"""A real engine worker that reports every step. Its rounds over a long request end only once a
command waits.

A test can therefore determine the round that is under way when a command arrives, at any speed of
the machine.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import zmq

from examples.scripted_engine.engine import SCRIPTED
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.worker import process as worker
from paceline.v1 import engine_pb2 as pb

ADDRESS_VARIABLE = "PACELINE_TEST_EVENTS"
HELD_WORKER = "integration.gateway.held_worker"
HELD_SCRIPTED = replace(SCRIPTED, process=HELD_WORKER)
"""The scripted engine with this worker."""
LONG_TOKENS = 100
"""Requests for more tokens are held."""
HOLD_MS = 30_000


def running(engine: Engine) -> dict[int, int]:
    """Maximum token counts of the requests in the batch, by request id."""
    inside: Any = engine
    batch = inside._scheduler.running if hasattr(inside, "_scheduler") else inside._running
    return {one.request.request_id: one.request.sampling.max_tokens for one in batch}


class HeldWorker(worker.Worker):
    """worker.Worker that holds rounds and reports events."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._events: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._events.setsockopt(zmq.LINGER, 1000)
        self._events.connect(os.environ[ADDRESS_VARIABLE])
        self._execute = self._peer.execute
        self._peer.execute = self._execute_and_tell  # type: ignore[method-assign]

    def _tell(self, event: str, request_ids: list[int]) -> None:
        load = self._engine.load
        told = {
            "event": event,
            "ids": request_ids,
            "running": load.running,
            "waiting": load.waiting,
        }
        self._events.send_json(told)

    def _execute_and_tell(self, engine: Any, command: pb.WorkerCommand, **options: Any) -> None:
        self._execute(engine, command, **options)
        if command.HasField("enqueue"):
            self._tell("enqueue", [one.request_id for one in command.enqueue.requests])
        if command.HasField("abort"):
            self._tell("abort", list(command.abort.request_ids))

    def _round(self) -> None:
        before = running(self._engine)
        super()._round()
        batch = before | running(self._engine)
        self._tell("round", sorted(batch))
        if max(batch.values(), default=0) > LONG_TOKENS and not self._peer.poll(HOLD_MS):
            raise TimeoutError("no command came")


if __name__ == "__main__":
    worker.Worker = HeldWorker  # type: ignore[misc]
    raise SystemExit(worker.main())
