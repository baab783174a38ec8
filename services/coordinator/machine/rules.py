"""The rules that start a track's next work, in order, and everything between two steps."""

from collections.abc import Callable
from dataclasses import replace

from paceline.services.coordinator.machine import commands, drafter, events, losses, schedule, slots
from paceline.services.coordinator.machine.commands import Decision
from paceline.services.coordinator.machine.state import MachineError, Phase, State


def run_started(state: State, event: events.RunStarted) -> Decision:
    """Frees all slots and sets all workers idle; the start policy may be evaluated first."""
    settings = event.settings
    state = State(
        settings=settings,
        slots=slots.slot_row((slots.Slot(),) * settings.slots),
        workers=slots.worker_row((slots.WorkerState.IDLE,) * settings.workers),
        versions=event.versions,
        seq=event.versions.seq,
        evaluations=schedule.evaluations_due(settings, 0),
    )
    return Decision(state, enters=Phase.RUNNING)


def resumed(state: State, event: events.Resumed) -> Decision:
    """Repeats every pending call of the run and its tracks, because the former coordinator's calls
    are gone.
    """
    total_steps = max(event.total_steps, state.rollouts.step)
    phase = state.failed_phase or state.phase
    state = replace(
        losses.interrupted(state),
        settings=replace(state.settings, total_steps=total_steps),
        phase=phase,
        lost=frozenset(),
        lease=state.lease and replace(state.lease, preempting=False),
        failed_phase=None,
        failure="",
    )
    state = state.with_rollouts(drawing=False, attempts=0)
    state = state.with_learner(attempts=0)
    if phase is Phase.RUNNING:
        return Decision(state, enters=losses.again_from(state.learner.phase))
    if phase in (Phase.CLOSING, Phase.FINISHED) and state.step < total_steps:
        phase = Phase.RUNNING
    return Decision(state, enters=phase)


def evaluate(state: State) -> Decision:
    """Leases the workers' slots to the engine and makes the first due evaluation."""
    state = _all_to_engine(state)
    command = commands.Evaluate(state.step, state.epoch, state.evaluations[0], state.versions)
    return Decision(state, (command,))


def pause(state: State) -> Decision:
    """Leases the workers' slots to the engine, which serves callers until the run continues."""
    state = _all_to_engine(state)
    return Decision(state, (commands.ResumeWorkers(state.step, state.epoch),))


def _all_to_engine(state: State) -> State:
    """The workers' slots leased under a new epoch, that of the phase's call."""
    state = state.free_slots(state.held_by(slots.Holder.ENGINE), fence=True)
    state = state.lease_slots(range(state.settings.engine_slots), slots.Holder.ENGINE)
    return replace(state, phase_epoch=state.epoch)


def evaluation_done(state: State, event: events.EvaluationDone) -> Decision:
    """Takes back the engine's slots. Raises MachineError for an evaluation that is not due."""
    if event.kind is not state.evaluations[0]:
        raise MachineError(f"EvaluationDone({event.kind})", state.describe())
    state = state.free_slots(state.held_by(slots.Holder.ENGINE))
    return Decision(replace(state, evaluations=state.evaluations[1:]), enters=Phase.RUNNING)


def close(state: State) -> Decision:
    """Saves the trainers' checkpoints under a new epoch."""
    epoch = state.epoch + 1
    state = replace(state, epoch=epoch, phase_epoch=epoch)
    return Decision(state, (commands.SaveCheckpoints(state.step, epoch),))


def checkpoints_saved(state: State, event: events.CheckpointsSaved) -> Decision:
    """Ends the run."""
    return Decision(state, enters=Phase.FINISHED)


def finish(state: State) -> Decision:
    """Ends the run; only Resumed with more steps continues it."""
    return Decision(replace(state, paused=False), (commands.FinishRun(""),))


def stop_requested(state: State, event: events.StopRequested) -> Decision:
    """Makes the newest step with tasks drawn or being drawn the last step, and ends a pause."""
    last = min(state.settings.total_steps, state.rollouts.begun)
    settings = replace(state.settings, total_steps=last)
    return Decision(replace(state, settings=settings, paused=False))


def paused(state: State, event: events.Paused | events.Continued) -> Decision:
    """Stops the draw of tasks, or allows it again."""
    return Decision(replace(state, paused=isinstance(event, events.Paused)))


def commit_set(state: State) -> Decision | None:
    """Commits the prepared set after the last rollout of the former version, when a worker is free
    for the canary.
    """
    waits = state.learner.phase is Phase.COMMIT and state.committing is None
    if not waits or not schedule.may_commit(state):
        return None
    if not schedule.can_judge(state):
        return drafter.preempt(state)
    return Decision(state, enters=Phase.COMMIT)


def train_policy(state: State) -> Decision | None:
    """Trains the policy when drafter and rollouts have left its slots; requests that they leave."""
    if state.learner.phase is not Phase.PREEMPT or not schedule.may_take_turn(state):
        return None
    if state.settings.colocated and state.lease is not None:
        return drafter.preempt(state)
    if state.settings.colocated and state.rollouts.phase is Phase.ROLLOUT:
        return Decision(state, enters=Phase.SUSPENDED)
    return Decision(state, enters=Phase.POLICY)


def take_batch(state: State) -> Decision | None:
    """Takes the next batch when it is complete."""
    if state.learner.phase is not Phase.IDLE or not schedule.may_take_turn(state):
        return None
    batch = schedule.next_batch(state)
    if not batch:
        return None
    portions = {portion.step: portion for portion in batch}
    draws = tuple(draw.take(portions.get(draw.step)) for draw in state.rollouts.draws)
    state = state.with_rollouts(draws=draws).with_learner(batch=batch, attempts=0)
    return Decision(state, enters=Phase.PREEMPT)


def roll_out(state: State) -> Decision | None:
    """Calls drawn or interrupted tasks when the drafter has left their slots; continues suspended
    rollouts.
    """
    if not schedule.may_call(state):
        return None
    if state.rollouts.phase is Phase.SUSPENDED:
        return Decision(state, enters=Phase.ROLLOUT)
    if all(draw.called for draw in state.rollouts.running):
        return None
    if state.lease is not None:
        return drafter.preempt(state)
    return Decision(state, enters=Phase.ROLLOUT)


def draw_tasks(state: State) -> Decision | None:
    """Draws the next step's tasks."""
    if not schedule.may_draw(state):
        return None
    drawing = state.with_rollouts(drawing=True)
    return Decision(drawing, (commands.BeginStep(state.rollouts.step),))


def rest(state: State) -> Decision | None:
    """Between two steps: pauses, evaluates or ends the run, without a drafter on the slots."""
    over = state.step >= state.settings.total_steps
    if state.phase is Phase.PAUSED or not schedule.at_rest(state):
        return None
    if not (schedule.pauses(state) or state.evaluations or over):
        return None
    if state.lease is not None:
        return drafter.preempt(state)
    if schedule.pauses(state):
        return Decision(state, enters=Phase.PAUSED)
    return Decision(state, enters=Phase.EVALUATE if state.evaluations else Phase.CLOSING)


def go_on(state: State) -> Decision | None:
    """Ends a pause when the run is no longer paused or has no steps left."""
    if state.phase is not Phase.PAUSED or schedule.pauses(state):
        return None
    return Decision(state.free_slots(state.held_by(slots.Holder.ENGINE)), enters=Phase.RUNNING)


RULES: tuple[Callable[[State], Decision | None], ...] = (
    go_on,
    commit_set,
    train_policy,
    take_batch,
    roll_out,
    draw_tasks,
    rest,
    drafter.lease_released,
)


def follow(state: State) -> Decision | None:
    """The next decision of RULES, or None."""
    if state.phase not in (Phase.RUNNING, Phase.PAUSED):
        return None
    for rule in RULES:
        if (found := rule(state)) is None:
            continue
        if found.state is not state or found.commands or found.enters is not None:
            return found
    return None
