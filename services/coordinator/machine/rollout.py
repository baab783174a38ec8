"""Rolls steps out: every worker gets its share and releases its slots after it."""

from collections.abc import Mapping
from dataclasses import replace

from paceline.services.coordinator.machine import commands, drafter, events, losses, schedule, slots
from paceline.services.coordinator.machine.commands import Decision
from paceline.services.coordinator.machine.state import DrawnStep, MachineError, Phase, State


def step_began(state: State, event: events.StepBegan) -> Decision:
    """Queues the step's tasks for their call."""
    drawn = DrawnStep(event.step, state.step, places=every_group(state))
    draws = (*state.rollouts.draws, drawn)
    state = state.with_rollouts(step=event.step + 1, drawing=False, attempts=0, draws=draws)
    return Decision(replace(state, drafter_benched=False))


def generate(state: State) -> Decision:
    """Leases the workers' free slots to the engine under a new epoch, continues suspended workers,
    and calls the waiting tasks, each step under its own epoch.

    Without a running call, earlier calls are fenced.
    """
    rollouts = state.rollouts
    goes_on = any(draw.called for draw in rollouts.running)
    waiting = [draw for draw in rollouts.running if not draw.called]
    if not goes_on:
        state = state.free_slots(state.held_by(slots.Holder.ENGINE), fence=True)
    suspended = list(state.workers.where(slots.WorkerState.SUSPENDED))
    state = state.move_workers(suspended, slots.Cause.RESUMED)
    if waiting:  # each worker may get samples
        idle = [i for i, one in enumerate(state.workers) if one is not slots.WorkerState.GENERATING]
        state = state.move_workers(idle, slots.Cause.STEP_BEGAN)
        free = [i for i in state.slots.where(slots.Holder.NONE) if i < state.settings.engine_slots]
    else:
        free = [slot for one in suspended for slot in state.settings.worker_slots(one)]
    state = state.lease_slots(free, slots.Holder.ENGINE)
    epochs = {draw.step: state.epoch + number for number, draw in enumerate(waiting)}
    issued: list[commands.Command] = [
        commands.RunTasks(
            draw.step,
            epochs[draw.step],
            state.versions,
            draw.round,
            draw.places,
            capture=drafter.captured(state, draw.step),
        )
        for draw in waiting
    ]
    if suspended and goes_on:
        issued.insert(0, commands.ResumeWorkers(state.step, state.epoch))
    return Decision(_called(state, epochs), tuple(issued))


def suspend(state: State) -> Decision:
    """Takes the slots of generating workers; their requests are held and continue later."""
    workers = list(state.workers.where(slots.WorkerState.GENERATING))
    state = state.move_workers(workers, slots.Cause.SUSPENDED)
    return Decision(state.free_slots(state.held_by(slots.Holder.ENGINE)))


def share_done(state: State, event: events.ShareDone) -> Decision:
    """Releases the slots of a worker without a share of another step, for the drafter's lease.

    Raises MachineError for an unknown worker.
    """
    draw = draw_of(state, event.epoch)
    if event.worker >= len(state.workers) or draw is None:
        raise MachineError(f"ShareDone(worker={event.worker})", state.describe())
    state = _with(state, replace(draw, owed=draw.owed & ~(1 << event.worker)))
    return Decision(_release(state, 1 << event.worker))


def group_closed(state: State, event: events.GroupClosed) -> Decision:
    """Allows the group to be trained before the rest of its step, unless a replacement is due.

    Raises MachineError for a group outside the round.
    """
    draw = draw_of(state, event.epoch)
    if draw is None or not draw.places >> event.index & 1:
        raise MachineError(f"GroupClosed(index={event.index})", state.describe())
    if event.equal_rewards and draws_again(state, draw):
        return Decision(state)
    return Decision(_with(state, replace(draw, closed=draw.closed | 1 << event.index)))


def tasks_finished(state: State, event: events.TasksFinished) -> Decision:
    """Releases idle workers and closes the step's groups. While rounds of dynamic sampling are
    left, groups with equal rewards stay open and are drawn again with other tasks.
    """
    draw = draw_of(state, event.epoch)
    assert draw is not None  # otherwise the event would be late
    everything = every_group(state)
    again = event.equal_rewards & draw.places if draws_again(state, draw) else 0
    ended = replace(
        draw,
        called=False,
        finished=not again,
        owed=0,
        closed=everything & ~again,
        round=draw.round + bool(again),
        places=again or draw.places,
    )
    state = _release(_with(state, ended), draw.owed).with_rollouts(attempts=0)
    if ended.taken == everything and all(one.step != draw.step for one in state.learner.batch):
        left = tuple(one for one in state.rollouts.draws if one.step != draw.step)
        state = state.with_rollouts(draws=left)  # trained before its last sample was reported
    if state.rollouts.running:
        return Decision(state)
    return Decision(state.free_slots(state.held_by(slots.Holder.ENGINE)), enters=Phase.READY)


def worker_lost(state: State, event: events.WorkerLost) -> Decision:
    """Repeats the tasks after the gateway has restarted the worker."""
    return losses.roll_out_again(state, f"worker {event.worker} of the gateway died")


def set_damaged(state: State, event: events.SetDamaged) -> Decision:
    """Holds the tasks until the learner's next version set, and then begins them again."""
    if state.learner.phase is Phase.IDLE:  # the set has been committed meanwhile
        return losses.roll_out_again(state, "the set to roll out with is damaged")
    return Decision(losses.interrupted(state).with_rollouts(damaged=True))


def draw_of(state: State, epoch: int) -> DrawnStep | None:
    """The draw with a running call of this epoch; None if the run has none."""
    draws = state.rollouts.running if state.phase is Phase.RUNNING else ()
    return next((draw for draw in draws if draw.called and draw.epoch == epoch), None)


def every_group(state: State) -> int:
    """The places of a step's groups, a bit each."""
    return (1 << state.settings.groups_per_step) - 1


def draws_again(state: State, draw: DrawnStep) -> bool:
    """Whether groups of equal rewards in the draw's round are drawn again."""
    return draw.round < state.settings.dynamic_sampling_rounds


def _called(state: State, epochs: Mapping[int, int]) -> State:
    """Marks the draws of the given steps as called: every worker owes a share of each draw."""
    owed = (1 << len(state.workers)) - 1
    draws = tuple(
        replace(draw, epoch=epochs[draw.step], called=True, owed=owed)
        if draw.step in epochs
        else draw
        for draw in state.rollouts.draws
    )
    newest = max(epochs.values(), default=state.rollouts.epoch)
    state = replace(state, epoch=max(state.epoch, newest))
    return state.with_rollouts(draws=draws, epoch=newest)


def _with(state: State, changed: DrawnStep) -> State:
    draws = tuple(changed if draw.step == changed.step else draw for draw in state.rollouts.draws)
    return state.with_rollouts(draws=draws)


def _release(state: State, workers: int) -> State:
    """Releases the slots of the given workers, a bit each, if they owe no share."""
    for draw in state.rollouts.running:
        workers &= ~draw.owed
    leaving = list(schedule.bits(workers))
    held = [
        slot
        for worker in leaving
        if state.workers[worker] is slots.WorkerState.GENERATING
        for slot in state.settings.worker_slots(worker)
    ]
    state = state.move_workers(leaving, slots.Cause.SHARE_DONE)
    return replace(state, drafter_benched=False).free_slots(held)
