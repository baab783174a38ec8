"""The shared state of all calls: channels to the peers, tasks and the event queue of the
machine."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.config import AddressesConfig, SecurityConfig
from paceline.errors import DeadlineExceeded, PacelineError, ResourceExhausted, Unavailable
from paceline.local.news import tell_supervisor
from paceline.rpc import channel, leased, rpc_errors, wait_healthy
from paceline.rpc.progress import while_moving
from paceline.services.coordinator.calls.figures import FinishedSamples
from paceline.services.coordinator.calls.tasks import OpenSteps, TaskSource
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.journal.groups import ClosedGroups
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.commands import StepCommand
from paceline.services.coordinator.machine.state import Service, State
from paceline.streams.connection import REDIS_FULL
from paceline.telemetry import get_logger
from paceline.v1.drafter_pb2_grpc import DrafterServiceStub
from paceline.v1.policy_pb2 import SavePolicyCheckpointRequest, SavePolicyCheckpointResponse
from paceline.v1.policy_pb2_grpc import PolicyServiceStub
from paceline.v1.rollout_pb2 import TasksFinished
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2_grpc import WeightServiceStub
from paceline.whole_files import DISK_FULL

T = TypeVar("T")
log = get_logger("coordinator")


class Peers:
    """Lazy channels to all processes of each service, and their stubs; gateways by number."""

    def __init__(self, addresses: AddressesConfig, security: SecurityConfig) -> None:
        """Call it on the running event loop. Raises ConfigError for an insecure address."""
        self._security = security
        self._addresses: dict[Service, tuple[str, ...]] = {
            service: (addresses.of(service.value),) for service in Service
        }
        self._addresses[Service.GATEWAY] = addresses.gateways
        self.channels = {
            service: [channel(address, security) for address in found]
            for service, found in self._addresses.items()
        }
        self.gateways = self.channels[Service.GATEWAY]
        (self.policy_trainer,) = self.channels[Service.POLICY_TRAINER]
        (self.drafter_trainer,) = self.channels[Service.DRAFTER_TRAINER]
        # stubs of generated code have no types
        self.rollouts: list[Any] = [RolloutServiceStub(one) for one in self.gateways]  # type: ignore[no-untyped-call]
        self.weights: list[Any] = [WeightServiceStub(one) for one in self.gateways]  # type: ignore[no-untyped-call]
        self.policy: Any = PolicyServiceStub(self.policy_trainer)  # type: ignore[no-untyped-call]
        self.drafter: Any = DrafterServiceStub(self.drafter_trainer)  # type: ignore[no-untyped-call]

    async def save_policy(
        self, request: SavePolicyCheckpointRequest, still_s: float
    ) -> SavePolicyCheckpointResponse:
        """Saves a policy checkpoint and returns the policy trainer's answer.

        The trainer first finishes a running step; the wait lasts as long as the trainer makes
        progress. Raises DeadlineExceeded after `still_s` seconds without progress, and errors of
        the call.
        """
        with rpc_errors():
            async with while_moving(self.policy_trainer, still_s) as timeout:
                saved: SavePolicyCheckpointResponse = await self.policy.SavePolicyCheckpoint(
                    request, timeout=timeout
                )
            return saved

    async def unhealthy(self, service: Service, deadline_s: float) -> dict[int, PacelineError]:
        """Waits until every process of the service serves. Returns the errors of processes that do
        not serve after `deadline_s` seconds, by number.
        """

        async def health(address: str) -> PacelineError | None:
            try:
                await wait_healthy(address, self._security, deadline_s)
            except PacelineError as error:
                return error
            return None

        found = await each(map(health, self._addresses[service]))
        return {number: error for number, error in enumerate(found) if error is not None}

    async def close(self) -> None:
        """Closes all channels; running calls are cancelled."""
        await each(one.close() for found in self.channels.values() for one in found)


async def each(calls: Iterable[Awaitable[T]]) -> list[T]:
    """All answers, in order, after all calls have ended. Raises the first failure."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in found if not isinstance(answer, BaseException)]


RANK_LOST = "RANK_LOST"
WORKER_LOST = "WORKER_LOST"
STEP_ORDER = "STEP_ORDER"
NO_ROOM_REASONS = (DISK_FULL, REDIS_FULL)
"""Reasons of errors that end when somebody frees disk space or Redis memory."""
_FIRST_PAUSE_S = 0.1


class Reported(Exception):
    """A call has failed and its event has been emitted, so the coroutine can end."""


@dataclass(slots=True)
class Absence:
    """The time since which a service fails, and the pause before the next attempt."""

    since_s: float
    pause_s: float = _FIRST_PAUSE_S
    why: str = ""  # the last failure, for messages
    full: bool = False  # the service had no disk or Redis space, and an event reported it


@dataclass(slots=True)
class Calls:
    """State shared by all calls of one run."""

    config: CoordinatorConfig
    peers: Peers
    source: TaskSource
    groups: ClosedGroups
    emit: Callable[[events.Event], None]
    now: Callable[[], float]
    state: Callable[[], State]
    samples: dict[int, FinishedSamples] = field(default_factory=dict)  # by step, after its rollouts
    rolled_out: TasksFinished = field(default_factory=TasksFinished)  # the last rollouts of a step
    absent: dict[Service, Absence] = field(default_factory=dict)
    open_steps: OpenSteps = field(default_factory=OpenSteps)
    handing_over: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while slots change hands, so that the gateway receives the leases in the order of their
    epochs.
    """

    @property
    def workers_of_each(self) -> int:
        """Workers of each gateway."""
        return self.state().settings.workers // len(self.peers.gateways)

    def context(self, command: StepCommand) -> CommandContext:
        """The context of a command's requests: run, step and epoch."""
        config = self.config
        return leased(config.security, config.run.id, command.step, command.epoch)

    def learner_context(self) -> CommandContext:
        """The context for repeating the learner track's last completed work."""
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
        event_of: Callable[[PacelineError], events.Event | None] | None = None,
    ) -> Iterator[None]:
        """Emits a failure of the block as an event and ends the call with Reported.

        `event_of` returns the event of a failure that is specific to this call, else None.
        """
        try:
            yield
        except TimeoutError as error:
            self.emit(events.Deadline(self.now(), command.epoch, what, deadline_s))
            raise Reported from error
        except PacelineError as error:
            known = event_of(error) if event_of is not None else None
            self.emit(known or self._failure(error, service, what, command.epoch, deadline_s))
            raise Reported from error
        absence = self.absent.pop(service, None)
        if absence is not None and absence.full:
            tell_supervisor("recovered", f"{service} has room again")

    def went_without(self, service: Service, what: str, error: PacelineError) -> None:
        """Records the failed call of an optional service that no phase waits for."""
        log.warning(
            "the run goes on without an answer", service=service, call=what, error=str(error)
        )
        if isinstance(error, Unavailable):
            self.emit(events.ServiceLost(self.now(), service, str(error)))

    def _failure(
        self, error: PacelineError, service: Service, what: str, epoch: int, deadline_s: float
    ) -> events.Event:
        if isinstance(error, Unavailable | ResourceExhausted):
            self._miss(service, error)
            return events.ServiceLost(self.now(), service, str(error))
        if isinstance(error, DeadlineExceeded):
            return events.Deadline(self.now(), epoch, what, deadline_s)
        return events.CallFailed(self.now(), service, what, str(error))

    def _miss(self, service: Service, error: PacelineError) -> None:
        """Records that a service fails, and since when.

        A service without disk or Redis space may recover at any time, so its recovery time starts
        again.
        """
        absence = self.absent.setdefault(service, Absence(self.now()))
        if error.reason in NO_ROOM_REASONS:
            absence.since_s = self.now()
            if not absence.full:
                absence.full = True
                tell_supervisor("impaired", f"{error}; the run goes on when there is room")
        absence.why = f": {error}"
