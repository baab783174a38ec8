"""An operator's pause, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.commands import Command
from paceline.services.coordinator.machine.settings import Placement, RunSettings, Schedule
from paceline.services.coordinator.machine.slots import Holder
from paceline.services.coordinator.machine.state import Evaluation, Phase, Service, State
from paceline.services.coordinator.machine.step import step
from paceline.trajectory import VersionSet

TWO = RunSettings(workers=2, total_steps=3, training_interval_steps=1)
THREE = replace(TWO, workers=3, max_drafter_slots=2)
APART = replace(TWO, placement=Placement.DISAGGREGATED, learner_slots=1)
ASYNC = replace(
    APART, schedule=Schedule.FULLY_ASYNC, max_policy_lag=1, drafter_enabled=False, total_steps=9
)
PAUSE, CONTINUE, STOP = events.Paused(2), events.Continued(3), events.StopRequested(4)


def run(state: State, *happened: events.Event) -> tuple[State, tuple[Command, ...]]:
    """The state after the events, and the commands of the last one."""
    issued: tuple[Command, ...] = ()
    for event in happened:
        state, issued = step(state, event)
    return state, issued


def begun(settings: RunSettings = TWO) -> State:
    """Step 0 generates."""
    return run(State(), events.RunStarted(0, settings, VersionSet()), events.StepBegan(1, 0))[0]


def answer(command: Command) -> events.Event | None:
    """Return a peer's final answer to a command."""
    match command:
        case commands.BeginStep(number):
            return events.StepBegan(5, number)
        case commands.RunTasks(_, epoch):
            return events.TasksFinished(5, epoch)
        case commands.PreemptDrafter(_, epoch):
            return events.Preempted(5, epoch)
        case commands.TrainPolicy(_, epoch, _, version):
            return events.PolicyPrepared(5, epoch, version + 1)
        case commands.Commit(_, _, versions):
            return events.Committed(5, versions)
        case commands.Evaluate(_, epoch, kind):
            return events.EvaluationDone(5, epoch, kind, 0.5)
        case commands.SaveCheckpoints(_, epoch):
            return events.CheckpointsSaved(5, epoch)
    return None


def until_quiet(state: State, *issued: Command) -> tuple[State, list[Command]]:
    """Answer commands until none is left; return the final state and all commands."""
    waiting, seen = list(issued), list[Command]()
    if not issued:
        draws = [draw for draw in state.rollouts.running if draw.called]
        waiting = [commands.RunTasks(draw.step, draw.epoch, state.versions) for draw in draws]
    while waiting:
        if (event := answer(waiting.pop(0))) is not None:
            state, more = step(state, event)
            seen += more
            waiting += more
    return state, seen


def at_rest(settings: RunSettings = TWO) -> State:
    """One step has ended since the pause."""
    return until_quiet(run(begun(settings), PAUSE)[0])[0]


def test_a_paused_run_ends_what_is_under_way_draws_nothing_and_gives_its_slots_to_the_engine() -> (
    None
):
    paused, issued = run(begun(), PAUSE)
    assert (paused.doing, issued) == ("rollout", ())
    state, seen = until_quiet(paused)
    kinds = [type(command) for command in seen]
    expected = [commands.TrainPolicy, commands.Commit, commands.CloseStep, commands.ResumeWorkers]
    assert kinds == expected
    assert seen[-1] == commands.ResumeWorkers(1, state.epoch)
    assert (state.doing, state.step, state.rollouts.begun) == ("paused", 1, 1)
    assert {slot.holder for slot in state.slots} == {Holder.ENGINE}


def test_pausing_twice_and_resuming_twice_changes_nothing() -> None:
    for once in (run(begun(), PAUSE)[0], at_rest()):
        assert step(once, PAUSE) == (once, ())
    state = run(at_rest(), CONTINUE)[0]
    assert step(state, CONTINUE) == (state, ())


def test_workers_are_handed_back_once_in_a_pause_whatever_is_heard_meanwhile() -> None:
    state = begun()
    state = run(state, events.ShareDone(2, state.rollouts.epoch, 0), PAUSE)[0]
    state, seen = until_quiet(state)
    assert seen.count(commands.ResumeWorkers(1, state.epoch)) == 1
    late = events.Detached(6, state.lease_epoch, "epochs")
    decided = events.GateDecided(6, state.lease_epoch, "kept", 1)
    for event in (late, decided, events.ServiceLost(6, Service.DRAFTER_TRAINER, "away")):
        state, issued = step(state, event)
        assert not any(isinstance(command, commands.ResumeWorkers) for command in issued)
        assert state.phase is Phase.PAUSED


def test_a_continued_run_draws_the_next_step_on_slots_that_are_free_again() -> None:
    state, issued = run(at_rest(), CONTINUE)
    assert issued == (commands.BeginStep(1),)
    assert (state.phase, state.slots.counted(Holder.NONE)) == (Phase.RUNNING, 2)
    state, seen = until_quiet(state, *issued)
    assert (state.phase, state.step) == (Phase.FINISHED, 3)
    assert not any(isinstance(command, commands.ResumeWorkers) for command in seen)


def test_a_run_that_is_continued_before_it_rests_goes_on_as_if_never_paused() -> None:
    assert run(begun(), PAUSE, CONTINUE) == (begun(), ())


def test_the_drafter_trains_in_the_step_that_ends_as_if_no_pause_were_asked_for() -> None:
    state = begun(THREE)
    for asked in ((), (PAUSE,)):
        one, leased = run(state, *asked, events.ShareDone(2, state.rollouts.epoch, 0))
        assert [type(command) for command in leased] == [commands.ActivateDrafter]
        activated = events.DrafterActivated(2, one.lease_epoch)
        _, joined = run(one, activated, events.ShareDone(3, one.rollouts.epoch, 1))
        assert [type(command) for command in joined] == [commands.JoinDrafter]


@pytest.mark.parametrize("paused", [True, False])
def test_so_it_does_beside_a_policy_on_slots_of_its_own(paused: bool) -> None:
    state = begun(APART)
    state = run(state, PAUSE)[0] if paused else state
    state, issued = run(state, events.TasksFinished(3, state.rollouts.epoch))
    assert state.learner.phase is Phase.POLICY
    assert any(isinstance(command, commands.ActivateDrafter) for command in issued)


def test_a_serial_drafter_trains_before_the_run_rests() -> None:
    state, seen = until_quiet(run(begun(replace(TWO, serial_drafter=True)), PAUSE)[0])
    assert isinstance(seen[-1], commands.ActivateDrafter)
    state, issued = run(state, events.Detached(6, state.lease_epoch, "steps"))
    state, _ = until_quiet(state, *issued)
    assert (state.phase, state.lease) == (Phase.PAUSED, None)


def test_a_lease_that_outlives_the_step_is_preempted_before_the_run_rests() -> None:
    state = begun(APART)
    state = run(state, events.TasksFinished(3, state.rollouts.epoch), PAUSE)[0]
    assert state.lease is not None
    state = run(state, events.PolicyPrepared(4, state.learner.epoch, 1))[0]
    assert state.committing is not None
    state, issued = run(state, events.Committed(5, state.committing))
    assert issued[-1] == commands.PreemptDrafter(1, state.lease_epoch)
    assert state.phase is Phase.RUNNING
    state, issued = run(state, events.Preempted(6, state.lease_epoch))
    assert issued == (commands.ResumeWorkers(1, state.epoch),)
    assert (state.phase, state.lease) == (Phase.PAUSED, None)
    holders = [slot.holder for slot in state.slots]
    assert holders == [Holder.ENGINE, Holder.ENGINE, Holder.NONE]


def test_every_step_that_has_begun_is_trained_before_an_asynchronous_run_rests() -> None:
    state = begun(ASYNC)
    state = run(state, events.StepBegan(2, 1), PAUSE)[0]
    assert len(state.rollouts.running) == 2
    state, seen = until_quiet(state)
    assert (state.phase, state.step) == (Phase.PAUSED, 2)
    assert not any(isinstance(command, commands.BeginStep) for command in seen)


def test_evaluations_that_are_due_wait_until_the_run_goes_on() -> None:
    settings = replace(TWO, probe_enabled=True, probe_every=1)
    state, issued = run(State(), events.RunStarted(0, settings, VersionSet()), PAUSE)
    assert state.phase is Phase.EVALUATE
    state, issued = run(state, events.EvaluationDone(1, state.epoch, Evaluation.PROBE, 1.0))
    assert state.phase is Phase.PAUSED
    state, issued = run(state, CONTINUE, events.StepBegan(1, 0), PAUSE)
    state, seen = until_quiet(state)
    assert (state.phase, state.evaluations) == (Phase.PAUSED, (Evaluation.PROBE,))
    assert not any(isinstance(command, commands.Evaluate) for command in seen)
    state, issued = run(state, CONTINUE)
    assert issued == (commands.Evaluate(1, state.epoch, Evaluation.PROBE, state.versions),)
    assert until_quiet(state, *issued)[0].phase is Phase.FINISHED


@pytest.mark.parametrize("state", [at_rest(), run(begun(), PAUSE)[0]], ids=["at rest", "before"])
def test_a_paused_run_that_is_told_to_stop_ends(state: State) -> None:
    state, issued = run(state, STOP)
    state, _ = until_quiet(state, *issued)
    assert (state.phase, state.step, state.paused) == (Phase.FINISHED, 1, False)
    assert run(state, events.Resumed(9, 3))[1] == (commands.BeginStep(1),)


def test_a_run_that_is_over_before_it_rests_ends_and_its_pause_with_it() -> None:
    state = run(begun(), PAUSE)[0]
    state = replace(state, settings=replace(state.settings, total_steps=1))
    state, _ = until_quiet(state)
    assert (state.phase, state.paused) == (Phase.FINISHED, False)


def test_a_coordinator_that_takes_a_paused_run_over_leaves_it_paused() -> None:
    rested = at_rest()
    state, issued = run(rested, events.Resumed(9, 3))
    assert issued == (commands.ResumeWorkers(1, state.epoch),)
    assert (state.phase, state.epoch > rested.epoch) == (Phase.PAUSED, True)
    state, issued = run(run(begun(), PAUSE)[0], events.Resumed(9, 3))
    assert until_quiet(state, *issued)[0].phase is Phase.PAUSED


def test_a_paused_run_that_failed_is_paused_again_when_it_is_taken_up() -> None:
    failed = run(at_rest(), events.CallFailed(6, Service.GATEWAY, "resume", "broken"))[0]
    assert failed.phase is Phase.FAILED
    assert run(failed, events.Resumed(9, 3))[0].phase is Phase.PAUSED


def test_a_pause_of_a_run_whose_steps_have_all_begun_is_refused() -> None:
    state = begun(replace(TWO, total_steps=1))
    assert step(state, PAUSE) == (state, (commands.Refuse("Paused", 0, 0),))
