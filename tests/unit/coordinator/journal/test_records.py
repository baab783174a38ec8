"""The published records of finished steps."""

from __future__ import annotations

from paceline.services.coordinator.journal.records import PAGE, StepRecords
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.settings import Placement, RunSettings, Schedule
from paceline.services.coordinator.machine.state import State
from paceline.services.coordinator.machine.step import step
from paceline.trajectory import VersionSet
from paceline.v1.coordinator_pb2 import StepRecord


def test_records_are_told_page_by_page() -> None:
    records = StepRecords()
    records.finished = [StepRecord(step=step) for step in range(2 * PAGE + 3)]
    told: list[int] = []
    sizes = []
    while page := records.page(len(told)):
        told += [record.step for record in page]
        sizes.append(len(page))
    assert told == list(range(2 * PAGE + 3))
    assert sizes == [PAGE, PAGE, 3]


def test_a_batch_that_waits_while_a_set_is_committed_is_taken_at_the_commit() -> None:
    settings = RunSettings(
        workers=2,
        total_steps=2,
        max_policy_lag=1,
        schedule=Schedule.ONE_STEP_OFF,
        placement=Placement.DISAGGREGATED,
        learner_slots=1,
        drafter_enabled=False,
    )
    state, records = State(), StepRecords()
    for event in (
        events.RunStarted(0, settings, VersionSet()),
        events.StepBegan(1, 0),
        events.TasksFinished(2, 1),
        events.StepBegan(3, 1),
        events.TasksFinished(5, 3),  # this batch waits for the learner until second 10
        events.PolicyPrepared(9, 2, 1),
        events.Committed(10, VersionSet(1, 1, 0)),
        events.PolicyPrepared(17, 5, 2),
        events.Committed(18, VersionSet(2, 2, 0)),
    ):
        after, _ = step(state, event)
        records.observe(state, event, after)
        state = after

    told = [(one.policy_s, one.preempt_wait_s, one.step_s) for one in records.finished]
    assert told == [(8.0, 0.0, 9.0), (8.0, 0.0, 8.0)]


def idle(settings: RunSettings, *happened: events.Event) -> dict[str, float]:
    """Idle slot-seconds of the only step, by cause."""
    state, records = State(), StepRecords()
    for event in (events.RunStarted(0, settings, VersionSet()), *happened):
        after, _ = step(state, event)
        records.observe(state, event, after)
        state = after
    return dict(records.finished[0].idle_s)


def test_every_idle_second_has_its_cause() -> None:
    """Worker 0 is released at 2, its slot trains from 2 to 5 and is free until 7, when both go to
    the policy; the set is committed from 9 to 10.
    """
    settings = RunSettings(workers=2, total_steps=1)
    found = idle(
        settings,
        events.StepBegan(1, 0),
        events.ShareDone(2, 1, 0),
        events.DrafterActivated(2, 2),
        events.Detached(5, 2, "epochs"),
        events.ShareDone(7, 1, 1),
        events.TasksFinished(7, 1),
        events.PolicyPrepared(9, 3, 1),
        events.Committed(10, VersionSet(1, 1, 0)),
    )
    assert found == {"trainer_done": 2.0}


def test_what_is_idle_beside_a_drafter_that_trains_says_why() -> None:
    """Worker 0 of four trains the drafter from 2 on; worker 1 is free from 3, worker 2 from 4.

    The last worker ends at 6. The coordinator then requests the drafter's slot, which is free at 8.
    """
    settings = RunSettings(workers=4, total_steps=1, max_drafter_slots=1)
    found = idle(
        settings,
        events.StepBegan(1, 0),
        events.ShareDone(2, 1, 0),
        events.DrafterActivated(2, 2),
        events.ShareDone(3, 1, 1),
        events.ShareDone(4, 1, 2),
        events.ShareDone(6, 1, 3),
        events.TasksFinished(6, 1),
        events.Detached(8, 2, "preempted"),
        events.PolicyPrepared(9, 3, 1),
        events.Committed(10, VersionSet(1, 1, 0)),
    )
    assert found == {"enough": 1.0 * 1 + 2.0 * 2, "giving_back": 2.0 * 3}


def test_slots_of_a_serial_run_wait_for_the_drafters_turn() -> None:
    settings = RunSettings(workers=2, total_steps=1, serial_drafter=True)
    found = idle(
        settings,
        events.StepBegan(1, 0),
        events.ShareDone(2, 1, 0),
        events.ShareDone(7, 1, 1),
        events.TasksFinished(7, 1),
        events.PolicyPrepared(9, 2, 1),
        events.DrafterActivated(9, 3),
        events.Detached(10, 3, "epochs"),
        events.Committed(11, VersionSet(1, 1, 0)),
    )
    assert found == {"serial": 5.0, "enough": 1.0}


def test_idle_seconds_of_a_run_that_trains_no_drafter_say_so() -> None:
    settings = RunSettings(workers=2, total_steps=1, drafter_enabled=False)
    found = idle(
        settings,
        events.StepBegan(1, 0),
        events.ShareDone(2, 1, 0),
        events.TasksFinished(7, 1),
        events.PolicyPrepared(9, 2, 1),
        events.Committed(10, VersionSet(1, 1, 0)),
    )
    assert found["untrained"] == 5.0
