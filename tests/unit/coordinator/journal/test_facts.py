"""The facts that subscribers receive about a transition."""

from __future__ import annotations

from paceline.services.coordinator.journal.entry import Transition, all_slots, changed_slots
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.state import Service, State
from paceline.services.coordinator.machine.step import step
from paceline.trajectory import VersionSet
from paceline.v1 import coordinator_pb2 as pb


def told(state: State, event: Event) -> tuple[State, pb.Fact | None]:
    after, issued = step(state, event)
    changed = changed_slots(state, after)
    return after, Transition(state, event, after, issued, changed).fact("r", 8)


def fact(state: State, event: Event) -> tuple[State, pb.Fact]:
    after, found = told(state, event)
    assert found is not None
    return after, found


def test_one_fact_says_everything_that_an_event_changed() -> None:
    state, _ = told(State(), events.RunStarted(1.0, RunSettings(workers=2), VersionSet()))
    state, found = fact(state, events.StepBegan(2.0, 0))
    assert found.step_began.samples == 8
    assert list(found.slots) == [
        pb.SlotRange(
            first=0,
            count=2,
            holder=pb.HOLDER_ENGINE,
            epoch=1,
            worker_state=pb.WORKER_STATE_GENERATING,
        )
    ]
    assert (found.context.run_id, found.context.epoch, found.at_s) == ("r", 1, 2.0)


def test_only_slots_that_changed_are_told() -> None:
    wanted = RunSettings(workers=1000, slots_per_worker=4)
    state, _ = told(State(), events.RunStarted(1.0, wanted, VersionSet()))
    state, _ = told(state, events.StepBegan(2.0, 0))
    state, found = fact(state, events.ShareDone(3.0, 1, 500))
    assert [(one.first, one.count, one.holder) for one in found.slots] == [
        (2000, 4, pb.HOLDER_DRAFTER)
    ]
    found = fact(state, events.TasksFinished(4.0, 1))[1]
    assert [(one.first, one.count) for one in found.slots] == [(0, 2000), (2004, 1996)]
    assert sum(one.count for one in all_slots(state)) == 4000


def test_a_refused_event_is_no_fact() -> None:
    state, _ = told(State(), events.RunStarted(1.0, RunSettings(), VersionSet()))
    state, _ = told(state, events.StepBegan(2.0, 0))
    assert told(state, events.ShareDone(3.0, 0, 0))[1] is None


def test_a_failure_and_a_new_set_are_facts() -> None:
    state, _ = told(State(), events.RunStarted(1.0, RunSettings(), VersionSet()))
    for event in (
        events.StepBegan(2.0, 0),
        events.TasksFinished(3.0, 1),
        events.PolicyPrepared(4.0, 2, 1),
    ):
        state, _ = told(state, event)
    failed = fact(state, events.Deadline(6.0, state.learner.epoch, "commit", 9.0))[1]
    assert failed.run_finished.failure == "commit of step 0 took longer than 9 s"
    assert not failed.HasField("version_committed")
    found = fact(state, events.Committed(5.0, VersionSet(1, 1, 0)))[1]
    assert found.version_committed.versions.policy == 1
    assert not found.HasField("run_finished")


def test_a_run_that_comes_to_rest_in_a_pause_and_goes_on_is_a_fact_each() -> None:
    state, _ = told(State(), events.RunStarted(1.0, RunSettings(total_steps=2), VersionSet()))
    found: list[bool] = []
    for event in (
        events.StepBegan(2.0, 0),
        events.Paused(2.5),
        events.TasksFinished(3.0, 1),
        events.PolicyPrepared(4.0, 2, 1),
        events.Committed(5.0, VersionSet(1, 1, 0)),
        events.Paused(6.0),
        events.Continued(7.0),
        events.Continued(8.0),
    ):
        state, one = told(state, event)
        if one is not None and one.HasField("paused"):
            found.append(one.paused)
    assert found == [True, False]


def test_services_that_are_lost_and_back_are_facts() -> None:
    state, _ = told(State(), events.RunStarted(1.0, RunSettings(), VersionSet()))
    found: list[list[str]] = []
    for event in (
        events.ServiceLost(2.0, Service.DRAFTER_TRAINER, "gone"),
        events.ServiceLost(3.0, Service.DRAFTER_TRAINER, "gone"),
        events.ServiceLost(4.0, Service.GATEWAY, "gone"),
        events.ServiceBack(5.0, Service.DRAFTER_TRAINER),
    ):
        state, one = told(state, event)
        found += [list(one.services_away.services)] if one is not None else []
    assert found == [["drafter_trainer"], ["drafter_trainer", "gateway"], ["gateway"]]
