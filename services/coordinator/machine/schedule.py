"""Conditions of schedule and placement for a step's tasks, a batch and a commit.

- `sync`: a step's tasks are drawn after the commit of the step before.
- `one_step_off`: a step's tasks run while the step before is trained. Its set is committed after
  they end, so a trajectory has one version.
- `fully_async`: tasks are drawn up to `capacity`. A batch is the next `groups_per_step` closed
  groups, older steps first, unless the remaining groups would then become too old. Its set is
  committed during rollouts.

Colocated tracks take turns on the slots. The policy trains when all rollouts have ended or, in
`fully_async`, are suspended. No rollout begins while the policy holds or needs the slots. Both
tracks rest before an evaluation, during a pause and before the run ends.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from paceline.services.coordinator.machine.settings import RunSettings, Schedule
from paceline.services.coordinator.machine.slots import Holder, WorkerState
from paceline.services.coordinator.machine.state import Evaluation, Phase, Portion, Service, State

FEW = 64
"""Up to this many bits, a loop over set bits is faster than one over all places."""


def capacity(*, running: int, max_lag: int, version: int, batch: int, accepted: int) -> int:
    """Groups that may begin: (max_lag + version + 1) * batch - (accepted + running), the admission
    of AReaL (arXiv:2505.24298, section 5.1).

    `running`: groups that have begun and not closed. `accepted`: groups that have closed, trained
    or not; a group that the trainer dropped as too old counts too, since its place in a batch was
    used. `version`: batches committed, of `batch` groups each.
    """
    return (max_lag + version + 1) * batch - (accepted + running)


def may_draw(state: State) -> bool:
    """Whether the next step's tasks may begin."""
    settings, rollouts = state.settings, state.rollouts
    if state.paused or rollouts.drawing or rollouts.step >= settings.total_steps:
        return False
    if not _before_evaluations(state):
        return False
    overlaps = settings.schedule is Schedule.FULLY_ASYNC
    if not overlaps and (rollouts.running or state.committing is not None):
        return False
    if learner_needs_slots(state) or rollouts.phase is Phase.SUSPENDED:
        return False
    batch, open_groups = settings.groups_per_step, groups_running(state)
    return batch <= capacity(
        running=open_groups,
        max_lag=settings.max_policy_lag,
        version=state.step,
        batch=batch,
        accepted=rollouts.step * batch - open_groups,
    )


def groups_running(state: State) -> int:
    """Open groups that have begun."""
    batch = state.settings.groups_per_step
    return sum(batch - draw.closed.bit_count() for draw in state.rollouts.running)


def learner_needs_slots(state: State) -> bool:
    """Whether colocated rollouts must wait for the policy."""
    if not state.settings.colocated:
        return False
    if state.settings.schedule is Schedule.FULLY_ASYNC:
        return state.learner.phase is not Phase.IDLE
    return state.learner.phase is Phase.PREEMPT or bool(state.slots.counted(Holder.POLICY))


def may_call(state: State) -> bool:
    """Whether drawn or interrupted tasks may be issued."""
    if state.rollouts.damaged or Service.GATEWAY in state.lost:
        return False
    if state.settings.colocated and state.slots.counted(Holder.POLICY):
        return False
    suspends = state.settings.colocated and state.settings.schedule is Schedule.FULLY_ASYNC
    return state.learner.phase is Phase.IDLE or not suspends


def next_batch(state: State) -> tuple[Portion, ...]:
    """The learner's next batch; empty while it is incomplete."""
    draws, wanted = state.rollouts.draws, state.settings.groups_per_step
    if state.settings.schedule is not Schedule.FULLY_ASYNC:
        ended = any(draw.step == state.step and draw.finished for draw in draws)
        return (Portion(state.step),) if ended else ()
    if sum((draw.closed & ~draw.taken).bit_count() for draw in draws) < wanted:
        return ()  # the usual case: thousands of groups close singly
    portions: list[Portion] = []
    for draw in draws:
        chosen = islice(bits(draw.closed & ~draw.taken), wanted)  # the lowest
        groups = sum(1 << place for place in chosen)
        wanted -= groups.bit_count()
        if groups:
            portions.append(Portion(draw.step, groups))
    return () if wanted or not leaves_time(state, portions) else tuple(portions)


def leaves_time(state: State, batch: Sequence[Portion]) -> bool:
    """Whether the groups left by a batch can still be trained within `max_policy_lag`: a group
    drawn at version v by version v + max_policy_lag, one batch per version. Otherwise the learner
    waits for late groups. `capacity` has left room for them, so no token becomes too old.
    """
    settings, left, running = state.settings, 0, 0
    takes = {portion.step: portion.groups or 0 for portion in batch}
    for draw in state.rollouts.draws:
        left += settings.groups_per_step - (draw.taken | takes.get(draw.step, 0)).bit_count()
        running += settings.groups_per_step - draw.closed.bit_count()
        later = max(0, draw.version + settings.max_policy_lag - state.step)
        if running and left > later * settings.groups_per_step:
            return False
    return True


def may_take_turn(state: State) -> bool:
    """Whether rollouts leave the policy its slots, unasked or on request."""
    if not state.settings.colocated or state.settings.schedule is Schedule.FULLY_ASYNC:
        return True
    return not state.rollouts.running or state.rollouts.damaged


def may_commit(state: State) -> bool:
    """Whether no single-version rollout would get two versions."""
    rollouts = state.rollouts
    alone = not rollouts.running and not rollouts.drawing
    return alone or rollouts.damaged or state.settings.schedule is Schedule.FULLY_ASYNC


def trains_during_push(state: State) -> bool:
    """Whether the drafter may use the slots that the policy has left while its weights are pushed.
    If tracks take turns, these slots are free until the commit.
    """
    pushes = state.learner.phase is Phase.POLICY and not state.slots.counted(Holder.POLICY)
    return state.settings.train_during_push and state.settings.takes_turns and pushes


def can_judge(state: State) -> bool:
    """Whether a worker can be the canary: there are two or more, and at least one is without the
    drafter.
    """
    workers = state.workers
    return len(workers) < 2 or workers.counted(WorkerState.TRAINING) < len(workers)


def at_rest(state: State) -> bool:
    """Whether no rollout and no training runs or waits."""
    rollouts, learner = state.rollouts, state.learner
    idle = rollouts.phase is Phase.READY and learner.phase is Phase.IDLE
    return idle and not rollouts.drawing and rollouts.step == learner.step


def pauses(state: State) -> bool:
    """Whether the run should stay at rest; a run with all steps done ends instead."""
    return state.paused and state.step < state.settings.total_steps


def evaluations_due(settings: RunSettings, finished: int) -> tuple[Evaluation, ...]:
    """Evaluations due after that many finished steps."""
    ends = finished in (0, settings.total_steps)
    kinds = (
        (Evaluation.ACCURACY, settings.accuracy_enabled, settings.accuracy_every),
        (Evaluation.PROBE, settings.probe_enabled, settings.probe_every),
    )
    return tuple(
        kind for kind, on, every in kinds if on and (ends or (every and finished % every == 0))
    )


def _before_evaluations(state: State) -> bool:
    """Whether no evaluation is due before the next step's tasks."""
    between = range(state.step + 1, state.rollouts.step + 1)
    return not state.evaluations and not any(
        evaluations_due(state.settings, finished) for finished in between
    )


def bits(number: int) -> Iterator[int]:
    """Places of the bits that are set, in order."""
    if number.bit_count() > FEW:  # each loop below copies the whole number
        digits = enumerate(reversed(bin(number)))
        yield from (place for place, digit in digits if digit == "1")
        return
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
