"""Has the policy trained on another number of ranks, as an operator wants it.

The number travels with the call that trains the next step: then the slots are the policy's, and no
rank is in the middle of a step. Its trainer says what has become of it; until then every call for a
step carries the number again.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.decision import Decision, Objection, refused
from paceline.services.coordinator.machine.state import Phase, Resharding, State

_TRAINED = (Phase.POLICY, Phase.DRAFTER, Phase.COMMIT)
"""Phases of a learner whose step has begun to train."""


def ranks_requested(state: State, event: events.RanksRequested) -> Decision:
    """The next step that begins to train has so many ranks; refused where that cannot be."""
    if against_ranks(state, event) is not None:
        return refused(state, event, event.ranks, state.settings.most_ranks)
    wanted = replace(state.resharding, ranks=event.ranks, epoch=0, failure="")
    return Decision(replace(state, resharding=wanted))


def against_ranks(state: State, event: events.RanksRequested) -> Objection | None:
    """What speaks against another number of ranks."""
    slots, wanted = state.settings.most_ranks, state.resharding.ranks
    if not 1 <= event.ranks <= slots:
        setting = (
            "gateway.engine.most_workers and coordinator.slots_per_worker say how many slots"
            if state.settings.colocated
            else "coordinator.learner_slots says how many slots"
        )
        message = "the policy's ranks compute on slots, one each"
        return Objection(message, f"{event.ranks} ranks", f"1 to {slots}; {setting}")
    if wanted:
        message = "another change of the ranks is under way"
        return Objection(message, f"to {wanted} from step {first_step(state)} on", "after it")
    if first_step(state) >= state.settings.total_steps:
        steps = state.settings.total_steps
        seen = f"step {state.step} of {steps}, {state.doing}"
        return Objection("no step is left to train", seen, "a run with steps to train")
    return None


def first_step(state: State) -> int:
    """The step that begins to train next."""
    return state.step + (state.learner.phase in _TRAINED)


def ranks_changed(state: State, event: events.RanksChanged) -> Decision:
    """As many as was wanted train the step that has begun."""
    return Decision(replace(state, resharding=Resharding(had=event.ranks)))


def ranks_kept(state: State, event: events.RanksKept) -> Decision:
    """As many as before train it; nothing is wanted any more."""
    kept = Resharding(had=event.ranks, failure=event.message)
    return Decision(replace(state, resharding=kept))
