"""What an operator's word about the policy's ranks does, event by event."""

from __future__ import annotations

from dataclasses import replace

from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.choice import objection
from paceline.services.coordinator.machine.settings import Placement, RunSettings
from paceline.services.coordinator.machine.state import Phase, Resharding, State
from paceline.services.coordinator.machine.step import step
from paceline.trajectory import VersionSet

TWO = RunSettings(workers=2, total_steps=2, drafter_enabled=False)
WANT = events.RanksRequested(2, 2)


def rolled_out(settings: RunSettings = TWO) -> State:
    """The tasks of step 0 run."""
    state = step(State(), events.RunStarted(0, settings, VersionSet()))[0]
    return step(state, events.StepBegan(1, 0))[0]


def trains(state: State) -> tuple[State, commands.TrainPolicy]:
    """The policy trains, and how it was called."""
    state, issued = step(state, events.TasksFinished(3, state.rollouts.epoch))
    (call,) = [one for one in issued if isinstance(one, commands.TrainPolicy)]
    assert Phase.POLICY in state.phases
    return state, call


def test_ranks_asked_for_while_a_step_trains_are_those_of_the_next_one() -> None:
    state, call = trains(rolled_out())
    assert call.ranks == 0
    state = step(state, WANT)[0]
    late = events.RanksChanged(4, call.epoch, 2)
    refusal = commands.Refuse("RanksChanged", call.epoch, call.epoch)
    assert step(state, late) == (state, (refusal,)), "that call has named no ranks"
    state = step(state, events.PolicyPrepared(5, call.epoch, 1))[0]
    assert state.committing is not None
    state = step(state, events.Committed(6, state.committing))[0]
    state, call = trains(step(state, events.StepBegan(7, 1))[0])
    assert call.ranks == 2
    assert step(state, events.RanksChanged(8, call.epoch, 2))[0].resharding == Resharding(had=2)


def test_a_call_that_is_made_again_names_the_ranks_until_they_are_answered_for() -> None:
    state, call = trains(step(rolled_out(), WANT)[0])
    state, issued = step(state, events.Resumed(4, 2))
    (again,) = [one for one in issued if isinstance(one, commands.TrainPolicy)]
    assert (again.ranks, again.epoch > call.epoch) == (2, True)
    assert step(state, events.RanksChanged(5, call.epoch, 2))[0] == state, "of the former call"
    state = step(state, events.RanksKept(5, again.epoch, 1, "no GPU"))[0]
    assert state.resharding == Resharding(had=1, failure="no GPU")
    issued = step(state, events.Resumed(6, 2))[1]
    assert [one.ranks for one in issued if isinstance(one, commands.TrainPolicy)] == [0]


def test_a_policy_with_slots_of_its_own_has_as_many_ranks_as_these_at_most() -> None:
    apart = replace(TWO, placement=Placement.DISAGGREGATED, learner_slots=1)
    state = rolled_out(apart)
    against = objection(state, WANT)
    assert against is not None
    assert (against.seen, against.allowed) == (
        "2 ranks",
        "1 to 1; coordinator.learner_slots says how many slots",
    )
    assert objection(state, events.RanksRequested(2, 1)) is None
    assert step(state, WANT) == (state, (commands.Refuse("RanksRequested", 2, 1),))


def test_ranks_that_no_step_would_be_trained_by_are_refused() -> None:
    state, _ = trains(rolled_out(replace(TWO, total_steps=1)))
    against = objection(state, WANT)
    assert against is not None
    assert against.message == "no step is left to train"


def test_slots_of_other_hosts_are_none_of_the_trainers() -> None:
    state = rolled_out(replace(TWO, workers=3, elsewhere=0b110, slots_per_worker=2))
    assert objection(state, events.RanksRequested(2, 2)) is None
    against = objection(state, events.RanksRequested(2, 3))
    assert against is not None
    assert against.allowed.startswith("1 to 2;")
