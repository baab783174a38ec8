"""The rules that start a track's next work: RULES, in order. The first rule with an effect is
followed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.services.coordinator.machine.commands import BeginStep
from paceline.services.coordinator.machine.decision import Decision
from paceline.services.coordinator.machine.drafter import lease_released, preempt
from paceline.services.coordinator.machine.moves import free_slots, held_by
from paceline.services.coordinator.machine.schedule import (
    at_rest,
    can_judge,
    may_call,
    may_commit,
    may_draw,
    may_take_turn,
    next_batch,
    pauses,
)
from paceline.services.coordinator.machine.slots import Holder
from paceline.services.coordinator.machine.state import (
    DrawnStep,
    Phase,
    Portion,
    State,
    with_learner,
    with_rollouts,
)


def commit_set(state: State) -> Decision | None:
    """Commits the prepared set after the last rollout of the former version, when a worker is free
    for the canary.
    """
    waits = state.learner.phase is Phase.COMMIT and state.committing is None
    if not waits or not may_commit(state):
        return None
    return Decision(state, enters=Phase.COMMIT) if can_judge(state) else preempt(state)


def train_policy(state: State) -> Decision | None:
    """Trains the policy when drafter and rollouts have left its slots; requests that they leave."""
    if state.learner.phase is not Phase.PREEMPT or not may_take_turn(state):
        return None
    if state.settings.colocated and state.lease is not None:
        return preempt(state)
    if state.settings.colocated and state.rollouts.phase is Phase.ROLLOUT:
        return Decision(state, enters=Phase.SUSPENDED)
    return Decision(state, enters=Phase.POLICY)


def take_batch(state: State) -> Decision | None:
    """Takes the next batch when it is complete."""
    if state.learner.phase is not Phase.IDLE or not may_take_turn(state):
        return None
    batch = next_batch(state)
    if not batch:
        return None
    portions = {portion.step: portion for portion in batch}
    draws = tuple(_taken(draw, portions.get(draw.step)) for draw in state.rollouts.draws)
    state = with_learner(with_rollouts(state, draws=draws), batch=batch, attempts=0)
    return Decision(state, enters=Phase.PREEMPT)


def roll_out(state: State) -> Decision | None:
    """Calls drawn or interrupted tasks when the drafter has left their slots; continues suspended
    rollouts.
    """
    if not may_call(state):
        return None
    if state.rollouts.phase is Phase.SUSPENDED:
        return Decision(state, enters=Phase.ROLLOUT)
    if all(draw.called for draw in state.rollouts.running):
        return None
    return preempt(state) if state.lease is not None else Decision(state, enters=Phase.ROLLOUT)


def draw_tasks(state: State) -> Decision | None:
    """Draws the next step's tasks."""
    if not may_draw(state):
        return None
    return Decision(with_rollouts(state, drawing=True), (BeginStep(state.rollouts.step),))


def rest(state: State) -> Decision | None:
    """Between two steps: pauses, evaluates or ends the run, without a drafter on the slots."""
    over = state.step >= state.settings.total_steps
    if state.phase is Phase.PAUSED or not at_rest(state):
        return None
    if not (pauses(state) or state.evaluations or over):
        return None
    if state.lease is not None:
        return preempt(state)
    if pauses(state):
        return Decision(state, enters=Phase.PAUSED)
    return Decision(state, enters=Phase.EVALUATE if state.evaluations else Phase.CLOSING)


def go_on(state: State) -> Decision | None:
    """Ends a pause when the run is no longer paused or has no steps left."""
    if state.phase is not Phase.PAUSED or pauses(state):
        return None
    return Decision(free_slots(state, held_by(state, Holder.ENGINE)), enters=Phase.RUNNING)


RULES: tuple[Callable[[State], Decision | None], ...] = (
    go_on,
    commit_set,
    train_policy,
    take_batch,
    roll_out,
    draw_tasks,
    rest,
    lease_released,
)


def follow(state: State) -> Decision | None:
    """The next decision of RULES, or None."""
    if state.phase not in (Phase.RUNNING, Phase.PAUSED):
        return None
    for rule in RULES:
        decision = rule(state)
        if decision is None:
            continue
        changed = decision.state is not state
        if changed or decision.commands or decision.enters is not None:
            return decision
    return None


def _taken(draw: DrawnStep, portion: Portion | None) -> DrawnStep:
    if portion is None:
        return draw
    groups = draw.closed if portion.groups is None else portion.groups
    return replace(draw, taken=draw.taken | groups)
