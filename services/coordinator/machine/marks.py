"""Compares the number of an event with the current value: a smaller number is late, a larger number
belongs to no call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.rollout import draw_of
from paceline.services.coordinator.machine.slots import Holder
from paceline.services.coordinator.machine.state import Phase, Service, State


class Mark(NamedTuple):
    """The event's value of `name` beside the current value; late if it is smaller, or if the call
    is over.
    """

    name: str
    seen: int
    current: int
    over: bool = False


def none(state: State, event: events.Event) -> Mark:
    """Never late."""
    return Mark("", 0, 0)


def begin(state: State, event: events.RunStarted) -> Mark:
    """Late when the run has begun."""
    return Mark("", 0, 0, over=state.phase is not Phase.NEW)


def step_number(state: State, event: events.StepBegan) -> Mark:
    """Late when the step has begun."""
    rollouts = state.rollouts
    newest = rollouts.step if rollouts.drawing else rollouts.step - 1
    return Mark("step", event.step, newest, over=not rollouts.drawing)


def call(state: State, event: events.CallAnswer) -> Mark:
    """Late when the call has been answered or issued again."""
    over = state.phase not in (Phase.EVALUATE, Phase.CLOSING)
    return Mark("epoch", event.epoch, state.phase_epoch, over)


def learner_call(state: State, event: events.CallAnswer) -> Mark:
    """Late when the learner's call has been answered or made again."""
    committing = state.learner.phase is Phase.COMMIT and state.committing is not None
    over = state.learner.phase is not Phase.POLICY and not committing
    return Mark("epoch", event.epoch, state.learner.epoch, over)


def rollout_call(state: State, event: events.CallAnswer) -> Mark:
    """Late when the step's call has been answered or made again."""
    over = draw_of(state, event.epoch) is None  # an older call may go on beside the newest
    return Mark("epoch", event.epoch, state.rollouts.epoch if over else event.epoch, over)


def share(state: State, event: events.ShareDone) -> Mark:
    """Late when the step's call has been answered or made again, or the worker's share is done."""
    mark, draw = rollout_call(state, event), draw_of(state, event.epoch)
    if draw is not None and event.worker < len(state.workers):
        return mark._replace(over=not draw.owed >> event.worker & 1)
    return mark


def group(state: State, event: events.GroupClosed) -> Mark:
    """Late when the step's call has been answered or made again, or the group is closed."""
    mark, draw = rollout_call(state, event), draw_of(state, event.epoch)
    return mark if draw is None else mark._replace(over=bool(draw.closed >> event.index & 1))


def lease(state: State, event: events.CallAnswer) -> Mark:
    """Late when the drafter's lease is over."""
    return Mark("epoch", event.epoch, state.lease_epoch, over=state.lease is None)


def newest_lease(state: State, event: events.GatePromoted) -> Mark:
    """Late when there is a newer lease or candidate; an ended lease does not matter."""
    over = (event.epoch, event.drafter_version) <= state.candidate
    return Mark("epoch", event.epoch, state.lease_epoch, over)


def lease_or_call(
    state: State, event: events.TrainerFailed | events.Deadline | events.WorkersReleased
) -> Mark:
    """Late when the lease is over, for events of the drafter; else when their call has been
    answered or made again.
    """
    if isinstance(event, events.TrainerFailed):
        of_drafter = event.service is Service.DRAFTER_TRAINER
    elif isinstance(event, events.WorkersReleased):
        of_drafter = event.holder is Holder.DRAFTER
    else:
        return DEADLINES.get(event.what, call)(state, event)
    return lease(state, event) if of_drafter else learner_call(state, event)


DEADLINES: dict[str, Callable[[State, events.CallAnswer], Mark]] = {
    "activation": lease,
    "join": lease,
    "preempt": lease,
    "rollout": rollout_call,
    "policy": learner_call,
    "commit": learner_call,
}
"""Mark of a Deadline by the kind of its wait; `call` for all other kinds."""


def set_number(state: State, event: events.Committed | events.CommitFailed) -> Mark:
    """Late when another set is being committed."""
    over = event.versions != state.committing
    return Mark("seq", event.versions.seq, state.seq, over)
