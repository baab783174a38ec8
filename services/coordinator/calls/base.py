"""Gives every call what it shares with the others: peers, tasks, the way back to the machine, and
how a failure becomes an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import DeadlineExceeded, PacelineError, ResourceExhausted, Unavailable
from paceline.local.news import tell_supervisor
from paceline.rpc import leased, responses, rpc_errors
from paceline.services.coordinator.calls.figures import FinishedSamples
from paceline.services.coordinator.calls.peers import Peers
from paceline.services.coordinator.calls.tasks import TaskSource
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.journal.groups import ClosedGroups
from paceline.services.coordinator.machine.commands import StepCommand
from paceline.services.coordinator.machine.events import CallFailed, Deadline, Event, ServiceLost
from paceline.services.coordinator.machine.state import Service, State
from paceline.streams.connection import REDIS_FULL
from paceline.telemetry import get_logger
from paceline.v1.drafter_pb2 import RoundCosts
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.whole_files import DISK_FULL

RANK_LOST = "RANK_LOST"
WORKER_LOST = "WORKER_LOST"
STEP_ORDER = "STEP_ORDER"
NO_ROOM_REASONS = (DISK_FULL, REDIS_FULL)
"""Of errors that end when somebody makes room."""
_FIRST_PAUSE_S = 0.1


class Reported(Exception):
    """A call has failed and its event is out: the coroutine has nothing left to do."""


@dataclass(slots=True)
class Absence:
    """Since when a service fails, and how long to wait before the next try."""

    since_s: float
    pause_s: float = _FIRST_PAUSE_S
    why: str = ""  # what it failed of last
    full: bool = False  # it had no room, which was told


def no_event(error: PacelineError) -> Event | None:
    return None


@dataclass(slots=True)
class Calls:
    """What the calls of one run share."""

    config: CoordinatorConfig
    peers: Peers
    source: TaskSource
    groups: ClosedGroups
    emit: Callable[[Event], None]
    now: Callable[[], float]
    state: Callable[[], State]
    samples: dict[int, FinishedSamples] = field(default_factory=dict)  # of steps rolled out
    round_costs: list[RoundCosts] = field(default_factory=list)  # of the last rollouts
    accept_lengths: dict[str, float] = field(default_factory=dict)  # of them, by arm
    absent: dict[Service, Absence] = field(default_factory=dict)
    handing_over: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while slots change hands: the gateway hears of their leases in the order of epochs."""

    def context(self, command: StepCommand) -> CommandContext:
        """What every request carries."""
        config = self.config
        return leased(config.security, config.run.id, command.step, command.epoch)

    def learner_context(self) -> CommandContext:
        """What a repetition carries of what the learner track has done last."""
        config, learner = self.config, self.state().learner
        step = max(0, learner.step - 1)
        return leased(config.security, config.run.id, step, learner.epoch)

    @contextmanager
    def reported(
        self,
        service: Service,
        what: str,
        command: StepCommand,
        *,
        deadline_s: float,
        event_of: Callable[[PacelineError], Event | None] = no_event,
    ) -> Iterator[None]:
        """Emits a failure of the block as an event and ends the call with Reported.

        `event_of`: the events of failures that this call alone can have.
        """
        try:
            yield
        except TimeoutError as error:
            self.emit(Deadline(self.now(), command.epoch, what, deadline_s))
            raise Reported from error
        except PacelineError as error:
            known = event_of(error)
            self.emit(known or self._failure(error, service, what, command.epoch, deadline_s))
            raise Reported from error
        absence = self.absent.pop(service, None)
        if absence is not None and absence.full:
            tell_supervisor("recovered", f"{service} has room again")

    def went_without(self, service: Service, what: str, error: PacelineError) -> None:
        """Notes that a call of an optional service has failed, on which nothing waits."""
        get_logger("coordinator").warning(
            "the run goes on without an answer", service=service, call=what, error=str(error)
        )
        if isinstance(error, Unavailable):
            self.emit(ServiceLost(self.now(), service, str(error)))

    def _failure(
        self, error: PacelineError, service: Service, what: str, epoch: int, deadline_s: float
    ) -> Event:
        if isinstance(error, Unavailable | ResourceExhausted):
            self._miss(service, error)
            return ServiceLost(self.now(), service, str(error))
        if isinstance(error, DeadlineExceeded):
            return Deadline(self.now(), epoch, what, deadline_s)
        return CallFailed(self.now(), service, what, str(error))

    def _miss(self, service: Service, error: PacelineError) -> None:
        """A service fails, from now on where it did not before.

        One without room is waited for however long that takes: its time begins anew.
        """
        absence = self.absent.setdefault(service, Absence(self.now()))
        if error.reason in NO_ROOM_REASONS:
            absence.since_s = self.now()
            if not absence.full:
                absence.full = True
                tell_supervisor("impaired", f"{error}; the run goes on when there is room")
        absence.why = f": {error}"


async def accepted(call: Any) -> None:
    """Returns when the peer has taken a streaming call up; raises why it has not."""
    with rpc_errors():
        await call.wait_for_connection()


async def answers(call: Any, last: str) -> AsyncGenerator[tuple[str, Any]]:
    """What a streaming call answers, each with its name, up to the one named `last`.

    Raises Unavailable when the stream ends before it.
    """
    with rpc_errors():
        async with aclosing(responses(call)) as stream:
            async for response in stream:
                name = response.WhichOneof("event")
                yield name, getattr(response, name)
                if name == last:
                    return
    raise Unavailable(f"the stream ended before its {last!r} message", seen="end of stream")
