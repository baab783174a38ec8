"""A journal replays to the state, the records and the next command of the coordinator that wrote
it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis.asyncio

from paceline.errors import DataLoss, FailedPrecondition
from paceline.services.coordinator.journal.entry import VERSION, JournalEntry, changed_slots
from paceline.services.coordinator.journal.groups import ClosedGroups
from paceline.services.coordinator.journal.journal import Journal, Snapshot
from paceline.services.coordinator.journal.records import StepRecords
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.commands import Decision
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.slots import Holder
from paceline.services.coordinator.machine.state import Evaluation, Phase, Service, State
from paceline.services.coordinator.machine.step import EVENTS as EVENT_ROWS
from paceline.services.coordinator.machine.step import EventRow, none, step
from paceline.streams import run_key
from paceline.trajectory import VersionSet

SETTINGS = RunSettings(workers=2, total_steps=2, training_interval_steps=1, probe_enabled=True)
ROLLOUT = {
    "response_tokens": 50,
    "rollout_s": 2.0,
    "accept_length": 2.5,
    "drafted_rounds": 4,
    "pulls": {"off": 3},
    "arm_drafted_rounds": {"eagle:3_1_4": 3, "ngram:4_1_5": 1},
    "arm_round_tokens": {"eagle:3_1_4": 9, "ngram:4_1_5": 1},
    "tokens_hash": "ab",
}
EVENTS: list[Event] = [
    events.RunStarted(0.0, SETTINGS, VersionSet()),
    events.EvaluationDone(1.0, 1, Evaluation.PROBE, 1.1, {"pulls": {"off": 1}}),
    events.StepBegan(2.0, 0, "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"),
    events.ShareDone(4.0, 2, 1),
    events.DrafterActivated(4.5, 3, {"attach_s": 0.5}),
    events.GatePromoted(5.0, 3, 1),
    events.GateDecided(
        5.5,
        3,
        "kept",
        2,
        {"kind": "eagle", "survival": (0.5, 0.25)},
    ),
    events.TasksFinished(
        6.0,
        2,
        {
            **ROLLOUT,
            "length_quantiles": (5, 9, 11),
            "closed_groups": {"s0.t1": 7, "s0.t0": 0},
            "reward_parts": {"format": 0.75},
        },
    ),
    events.Preempted(6.5, 3),
    events.WorkersReleased(6.5, 4, Holder.POLICY),
    events.Detached(6.6, 3, "preempted", {"steps": 4}),
    events.PolicyStepped(8.0, 4, 1, {"loss": 0.5, "reward_mean": 0.75}),
    events.PolicyPrepared(8.5, 4, 1, {"push_s": 0.4}),
    events.Committed(9.0, VersionSet(1, 1, 1)),
    events.StepBegan(9.5, 1),
    events.ServiceLost(10.0, Service.GATEWAY, "connection refused"),
]


class Renamed(events.Event):
    """An event with the field names of other events, and other types."""

    kind: str
    service: str
    settings: int
    versions: tuple[int, ...]
    details: None


def played(happened: list[Event]) -> tuple[State, StepRecords, list[JournalEntry]]:
    state, records, entries = State(), StepRecords(), []
    for event in happened:
        after = step(state, event)[0]
        records.observe(state, event, after)
        changed = changed_slots(state, after)
        entries.append(JournalEntry(event, state.step, after.doing, changed))
        state = after
    return state, records, entries


async def test_a_replayed_journal_gives_the_same_state_and_records(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    state, records, entries = played(EVENTS)
    journal = Journal(redis_client, run_id)
    for entry in entries:
        await journal.append(entry)
    read = [entry async for entry in Journal(redis_client, run_id).entries()]
    assert read == entries
    replayed, again, _ = played([entry.event for entry in read])
    assert replayed == state
    assert again.finished == records.finished
    assert replayed.doing == "rollout"
    again = commands.RunTasks(1, state.epoch + 2, state.versions, places=1)
    assert step(replayed, events.Resumed(11.0, 2))[1] == (again,)


def test_each_slot_second_of_a_step_went_into_one_use() -> None:
    (record,) = played(EVENTS)[1].finished
    assert dict(record.slot_s) == {
        "generating": 2 * 2.0 + (6.0 - 4.0),  # both until ShareDone, one until TasksFinished
        "policy": 2 * (8.0 - 6.5),
        "drafter": 6.5 - 4.5,  # from DrafterActivated to Preempted
        "transferring": (4.5 - 4.0) + 2 * (9.0 - 8.0),  # its way onto the slot; push and commit
        "idle": 6.5 - 6.0,  # the other slot, until the drafter has left
    }
    assert sum(record.slot_s.values()) == 2 * record.step_s


async def test_a_replayed_journal_waits_for_the_same_groups(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    in_policy = EVENTS[
        : next(i for i, event in enumerate(EVENTS) if isinstance(event, events.PolicyStepped))
    ]
    journal = Journal(redis_client, run_id)
    for entry in played(in_policy)[2]:
        await journal.append(entry)
    state, groups = State(), ClosedGroups()
    async for entry in Journal(redis_client, run_id).entries():
        before, state = state, step(state, entry.event)[0]
        groups.observe(before, entry.event, state)
    assert state.doing == "policy"
    (command,) = step(state, events.Resumed(7.0, 2))[1]
    assert isinstance(command, commands.TrainPolicy)
    known = groups.of(command.batch)
    assert [(one.group_id, one.sessions) for one in known] == [("s0.t1", 7), ("s0.t0", 0)]


def two_steps() -> list[Event]:
    """EVENTS to the end of a second step, and the following evaluation."""
    happened = EVENTS[:-1]
    for answer in (
        lambda state: events.TasksFinished(
            11.0, state.rollouts.epoch, {**ROLLOUT, "pulls": {"off": 7}}
        ),
        lambda state: events.PolicyPrepared(12.0, state.learner.epoch, 2),
        lambda state: events.Committed(13.0, state.committing),
        lambda state: events.EvaluationDone(14.0, state.phase_epoch, Evaluation.PROBE, 3.3),
    ):
        happened = [*happened, answer(played(happened)[0])]
    return happened


async def test_a_replay_behind_a_snapshot_comes_to_where_that_of_all_entries_comes(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    happened = two_steps()
    journal, behind = Journal(redis_client, run_id), []
    for end in range(1, len(happened) + 1):
        state, records, entries = played(happened[:end])
        await journal.append(entries[-1])
        if state.step > entries[-1].step:
            at_s, carried = happened[end - 1].at_s, records.carried()
            snapshot = Snapshot(end, at_s, {"0": f"trace-{end}"}, state, carried, {}, (1, 2.5))
            await journal.save(snapshot, records.finished)

        again = Journal(redis_client, run_id)
        newest = await again.newest()
        if newest is None:
            continue
        snapshot, finished = newest
        replayed, told = snapshot.state, StepRecords(finished, snapshot.records)
        async for entry in again.entries():
            before, replayed = replayed, step(replayed, entry.event)[0]
            told.observe(before, entry.event, replayed)
        assert (replayed, told.finished) == (state, records.finished)
        assert told.carried() == records.carried()
        assert (snapshot.traceparents["0"], snapshot.at_s, snapshot.watched) == (
            f"trace-{snapshot.entries}",
            happened[snapshot.entries - 1].at_s,
            (1, 2.5),
        )
        behind.append(again.since_snapshot)
    assert behind == [0, 1, 2, 3, 0, 1]
    assert [dict(one.arm_rounds) for one in told.finished] == [{"off": 2}, {"off": 4}]
    assert dict(told.finished[1].evaluations) == {"accept_length_probe": 3.3}


async def test_a_snapshot_that_cannot_be_used_says_why(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    happened = EVENTS[:-2]
    state, records, entries = played(happened)
    journal, key = Journal(redis_client, run_id), run_key(run_id, "journal")
    for entry in entries:
        await journal.append(entry)
    snapshot = Snapshot(len(entries), 0.0, {}, state, records.carried(), {}, None)
    await journal.save(snapshot, records.finished)
    good = await redis_client.get(f"{key}:snapshot")

    async def says(message: str) -> None:
        with pytest.raises(DataLoss, match=message):
            await Journal(redis_client, run_id).newest()

    for damaged, message in (
        (b"{", "does not decode"),
        (b"[]", "does not decode"),
        (good.replace(b'"v":', b'"v":9'), "another version"),
        (good.replace(b'"phase":"', b'"phase":"x'), "snapshot.phase"),
        (good.replace(b'"entries":', b'"entries":9'), "ends before the snapshot"),
    ):
        await redis_client.set(f"{key}:snapshot", damaged)
        await says(message)
    await redis_client.set(f"{key}:snapshot", good)
    await redis_client.hset(f"{key}:steps", "0", b"\xff")
    await says("record of a step is gone or damaged")
    await redis_client.hdel(f"{key}:steps", "0")
    await says("record of a step is gone or damaged")


def test_a_record_holds_what_the_events_of_its_step_said() -> None:
    record = played(EVENTS)[1].finished[0]
    assert (record.response_tokens, record.rollout_s, record.accept_length) == (50, 2.0, 2.5)
    assert dict(record.arm_rounds) == {"off": 2}
    assert dict(record.arm_drafted_rounds) == {"eagle:3_1_4": 3, "ngram:4_1_5": 1}
    assert dict(record.arm_round_tokens) == {"eagle:3_1_4": 9, "ngram:4_1_5": 1}
    assert (record.drafter_steps, record.drafter_slot_s, record.preempt_wait_s) == (4, 2.5, 0.5)
    assert (record.step_s, record.policy_s, record.reward_mean) == (7.0, 2.5, 0.75)
    assert list(record.response_length_quantiles) == [5, 9, 11]
    assert dict(record.reward_parts) == {"format": 0.75}
    assert record.trace_id == "0123456789abcdef0123456789abcdef"
    assert record.versions.policy == 0
    assert dict(record.policy) == {"loss": 0.5, "reward_mean": 0.75, "push_s": 0.4}


def test_events_that_come_twice_are_recorded_once() -> None:
    twice = [event for event in EVENTS for _ in range(2)]
    once, again = played(EVENTS), played(twice)
    assert (again[0], again[1].finished) == (once[0], once[1].finished)


def test_evaluations_are_added_to_the_record_of_the_step_before_them() -> None:
    one_step = RunSettings(workers=1, total_steps=1, accuracy_enabled=True)
    _, records, _ = played(
        [
            events.RunStarted(0.0, one_step, VersionSet()),
            events.EvaluationDone(1.0, 1, Evaluation.ACCURACY, 0.5),
            events.StepBegan(2.0, 0),
            events.TasksFinished(3.0, 2),
            events.PolicyPrepared(4.0, 3, 1),
            events.Committed(5.0, VersionSet(1, 1, 0)),
            events.EvaluationDone(6.0, 5, Evaluation.ACCURACY, 0.9),
        ]
    )
    assert dict(records.finished[0].evaluations) == {"accuracy": 0.9}


async def test_an_event_that_is_added_replays_whatever_its_fields_are_called(
    redis_client: redis.asyncio.Redis, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def paused(state: State, event: Renamed) -> Decision:
        return Decision(replace(state, failure=f"{event.kind} by {event.service}"))

    monkeypatch.setitem(EVENT_ROWS, Renamed, EventRow(set(Phase), none, paused))
    event = Renamed(5.0, kind="brief", service="nobody", settings=3, versions=(1, 2), details=None)
    state, _, entries = played([EVENTS[0], event])
    journal = Journal(redis_client, run_id)
    for entry in entries:
        await journal.append(entry)
    read = [entry.event async for entry in Journal(redis_client, run_id).entries()]
    assert read == [EVENTS[0], event]
    assert played(read)[0] == state
    assert state.failure == "brief by nobody"


async def test_of_two_writers_only_one_appends(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    entries = played(EVENTS)[2]
    first, second = Journal(redis_client, run_id), Journal(redis_client, run_id)
    await first.append(entries[0])
    with pytest.raises(FailedPrecondition, match="another coordinator"):
        await second.append(entries[1])


async def test_of_entries_that_are_written_together_another_writer_finds_all_or_none(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    entries = played(EVENTS)[2]
    first, second = Journal(redis_client, run_id), Journal(redis_client, run_id)
    await first.append(entries[0])
    with pytest.raises(FailedPrecondition, match="another coordinator"):
        await second.append(*entries[1:4])
    with pytest.raises(FailedPrecondition, match="another coordinator"):
        await second.append(*entries[:2])
    assert [one async for one in Journal(redis_client, run_id).entries()] == entries[:1]


async def test_a_repeated_append_after_a_lost_answer_adds_nothing(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    entries = played(EVENTS)[2][:3]
    await Journal(redis_client, run_id).append(*entries)
    await Journal(redis_client, run_id).append(*entries)
    assert await redis_client.xlen(run_key(run_id, "journal")) == 3


@pytest.mark.parametrize(
    ("entry_id", "body", "says"),
    [
        ("2-0", b"{}", "gap"),
        ("1-0", b"no json", "does not decode"),
        ("1-0", b"[99]", "another version"),
        ("1-0", f'[{VERSION}, 1.0, "Vanished", {{}}]'.encode(), "names an event"),
        ("1-0", b"[]", "another version"),
        ("1-0", b'{"v": 3}', "does not decode"),
    ],
)
async def test_a_broken_journal_is_not_replayed(
    redis_client: redis.asyncio.Redis, run_id: str, entry_id: str, body: bytes, says: str
) -> None:
    await redis_client.xadd(run_key(run_id, "journal"), {b"entry": body}, id=entry_id)
    with pytest.raises(DataLoss, match=says):
        [entry async for entry in Journal(redis_client, run_id).entries()]


async def test_a_long_journal_is_read_in_pages(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    entry = played(EVENTS)[2][0]
    journal = Journal(redis_client, run_id)
    for _ in range(1203):
        await journal.append(entry)
    assert sum([1 async for _ in Journal(redis_client, run_id).entries()]) == 1203
