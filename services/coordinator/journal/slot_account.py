"""Counts each step's slot-seconds by use, from the transitions alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.services.coordinator.machine.drafter import enough_released, most_workers, wanted
from paceline.services.coordinator.machine.events import Event, WorkersReleased
from paceline.services.coordinator.machine.slots import DrafterLease, Holder, WorkerState
from paceline.services.coordinator.machine.state import Phase, Service, State
from paceline.streams.journal_line import IdleCause, SlotUse


@dataclass(frozen=True, slots=True)
class Account:
    """Counts so far."""

    last_s: float = 0.0
    released: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    idle: Mapping[str, float] = field(default_factory=dict)


class SlotAccount:
    """Slot-seconds since the last `open`."""

    def __init__(self, account: Account = Account()) -> None:
        """`account`: from `kept`."""
        self._last_s = account.last_s
        # epoch of the policy's lease with returned worker memory
        self._released = account.released
        self._seconds = {use: account.seconds.get(use, 0.0) for use in SlotUse}
        self._idle = {cause: account.idle.get(cause, 0.0) for cause in IdleCause}

    def kept(self) -> Account:
        """The input of `__init__`."""
        return Account(self._last_s, self._released, self.seconds(), self.idle())

    def open(self) -> None:
        """Starts a step with zero counts."""
        self._seconds = dict.fromkeys(SlotUse, 0.0)
        self._idle = dict.fromkeys(IdleCause, 0.0)

    def observe(self, before: State, event: Event, after: State) -> None:
        """Processes one transition: until now the slots had their earlier use."""
        elapsed_s = event.at_s - self._last_s
        uses = self._uses(before)
        for use, slots in uses.items():
            self._seconds[use] += slots * elapsed_s
        self._idle[_idle_cause(before)] += uses[SlotUse.IDLE] * elapsed_s
        self._last_s = event.at_s
        if isinstance(event, WorkersReleased) and event.holder is Holder.POLICY:
            self._released = max(self._released, event.epoch)

    def seconds(self) -> dict[str, float]:
        """Slot-seconds by use."""
        return {use.value: seconds for use, seconds in self._seconds.items()}

    def idle(self) -> dict[str, float]:
        """Idle slot-seconds by cause, without zeros."""
        return {cause.value: seconds for cause, seconds in self._idle.items() if seconds}

    def _uses(self, state: State) -> dict[SlotUse, int]:
        """Number of slots by use."""
        held = state.slots.counted
        attached = state.lease.attached if state.lease is not None else 0
        pushing, policy = _free_while_pushing(state), held(Holder.POLICY)
        apart = not state.settings.colocated  # then no worker must leave its slots
        trains = policy if apart or state.learner.epoch == self._released else 0
        arriving = held(Holder.DRAFTER) - attached + policy - trains
        return {
            SlotUse.GENERATING: held(Holder.ENGINE),
            SlotUse.POLICY: trains,
            SlotUse.DRAFTER: attached,
            SlotUse.TRANSFERRING: arriving + pushing,
            SlotUse.IDLE: held(Holder.NONE) - pushing,
        }


def _free_while_pushing(state: State) -> int:
    """Free slots while weights travel to the gateway."""
    if state.learner.phase is not Phase.POLICY and state.committing is None:
        return 0  # also if a prepared set waits for rollouts to end
    if not state.settings.colocated:
        return state.settings.learner_slots - state.slots.counted(Holder.POLICY)
    return 0 if state.rollouts.phase is Phase.ROLLOUT else state.slots.counted(Holder.NONE)


def _idle_cause(state: State) -> IdleCause:
    """The reason that the drafter is not trained on free slots."""
    settings, workers = state.settings, state.workers
    if state.committing is not None:
        return IdleCause.COMMIT
    if not wanted(state):
        return IdleCause.UNTRAINED
    if state.drafter_benched or Service.DRAFTER_TRAINER in state.lost:
        return IdleCause.TRAINER_AWAY
    if state.lease is not None:
        return _beside(state, state.lease)
    if settings.serial_drafter:
        return IdleCause.SERIAL
    if workers.counted(WorkerState.COMPLETED):
        return IdleCause.TRAINER_DONE
    if not workers.counted(WorkerState.GENERATING) and settings.colocated:
        return IdleCause.HAND_OVER
    if not enough_released(state):
        return IdleCause.TOO_FEW
    return IdleCause.LEASING


def _beside(state: State, lease: DrafterLease) -> IdleCause:
    """The reason for idle slots beside the drafter's lease."""
    if lease.preempting:
        return IdleCause.GIVING_BACK
    full = len(lease.slots) // state.settings.slots_per_worker >= most_workers(state.settings)
    return IdleCause.ENOUGH if full else IdleCause.LEASING
