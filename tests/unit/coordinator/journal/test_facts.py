"""What subscribers are told of a transition."""

from __future__ import annotations

from coordinator.journal.facts import facts_of
from coordinator.machine import events
from coordinator.machine.events import Event
from coordinator.machine.state import RunSettings, Service, State
from coordinator.machine.step import step
from paceline.trajectory import VersionSet
from paceline.v1 import coordinator_pb2 as pb


def told(state: State, event: Event) -> tuple[State, list[pb.Fact]]:
    after, issued = step(state, event)
    return after, facts_of("r", state, event, after, issued, record=None, samples=8)


def test_a_step_s_facts_begin_with_its_begin_and_name_every_slot() -> None:
    state, _ = told(State(), events.RunStarted(1.0, RunSettings(workers=2), VersionSet()))
    state, facts = told(state, events.StepBegan(2.0, 0))
    assert [fact.WhichOneof("fact") for fact in facts] == [
        "step_began",
        "slot_changed",
        "slot_changed",
    ]
    assert facts[0].step_began.samples == 8
    slot = facts[1].slot_changed.slot
    assert (slot.slot, slot.holder, slot.epoch, slot.worker_state) == (
        0,
        pb.HOLDER_ENGINE,
        1,
        pb.WORKER_STATE_GENERATING,
    )
    assert {(fact.context.run_id, fact.context.epoch, fact.at_s) for fact in facts} == {
        ("r", 1, 2.0)
    }


def test_a_refused_event_is_no_fact() -> None:
    state, _ = told(State(), events.RunStarted(1.0, RunSettings(), VersionSet()))
    state, _ = told(state, events.StepBegan(2.0, 0))
    assert told(state, events.ShareDone(3.0, 0, 0))[1] == []


def test_a_failure_and_a_new_set_are_facts() -> None:
    state, _ = told(State(), events.RunStarted(1.0, RunSettings(), VersionSet()))
    for event in (
        events.StepBegan(2.0, 0),
        events.TasksFinished(3.0, 1),
        events.PolicyPrepared(4.0, 2, 1),
    ):
        state, _ = told(state, event)
    failed = told(state, events.Deadline(6.0, state.phase_epoch, "commit", 9.0))[1]
    assert [fact.run_finished.failure for fact in failed] == [
        "commit of step 0 took longer than 9 s"
    ]
    facts = told(state, events.Committed(5.0, VersionSet(1, 1, 0)))[1]
    assert [
        fact.version_committed.versions.policy
        for fact in facts
        if fact.HasField("version_committed")
    ] == [1]


def test_services_that_are_lost_and_back_are_facts() -> None:
    state, _ = told(State(), events.RunStarted(1.0, RunSettings(), VersionSet()))
    found = []
    for event in (
        events.ServiceLost(2.0, Service.DRAFTER_TRAINER, "gone"),
        events.ServiceLost(3.0, Service.DRAFTER_TRAINER, "gone"),
        events.ServiceLost(4.0, Service.GATEWAY, "gone"),
        events.ServiceBack(5.0, Service.DRAFTER_TRAINER),
    ):
        state, facts = told(state, event)
        found += [list(one.services_away.services) for one in facts]
    assert found == [["drafter_trainer"], ["drafter_trainer", "gateway"], ["gateway"]]
