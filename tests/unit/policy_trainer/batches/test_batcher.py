"""Batches from a memory stream: groups that a step trains, drops (and why), or leaves."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from counted import counted
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_stream import MemoryStream
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from paceline.errors import DataLoss, ResourceExhausted
from paceline.local.patience import patient
from paceline.services.policy_trainer.batches.batcher import CONSUMER, GROUP, Batcher
from paceline.services.policy_trainer.batches.groups import ABANDONED, Batch
from paceline.services.policy_trainer.batches.records import RecordFile, StepRecord
from paceline.services.policy_trainer.messages import Wanted
from paceline.streams import encode_trajectory
from paceline.trajectory import BranchKey, Trajectory, VersionSpan


@dataclass
class Notes:
    """Marks in memory."""

    trained: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    async def mark_trained(self, keys: Sequence[str], step: int) -> None:
        self.trained.update(dict.fromkeys(keys, step))

    async def mark_dropped(self, reasons: Mapping[str, str]) -> None:
        self.dropped.update(reasons)


def trajectory(
    group: str,
    sample: int,
    *,
    step: int = 3,
    version: int = 3,
    reward: float | None = 1.0,
    task: int = 0,
    branch: int = 0,
    of: int = 1,
    group_size: int = 2,
    logprob: float = -1.0,
) -> Trajectory:
    return Trajectory(
        key=BranchKey("run", f"{group}-{sample}-{step}", str(branch)),
        step=step,
        task_id=f"t{task}",
        group_id=group,
        group_size=group_size,
        task_index=task,
        sample_index=sample,
        token_ids=(1, 2, 3),
        loss_mask=(0, 1, 1),
        behavior_logprobs=(0.0, -1.0, logprob),
        version_spans=(VersionSpan(1, 3, version),),
        reward=reward,
        seed=0,
        temperature=1.0,
        branch_count=of,
    )


def session(group: str, sample: int, branches: int, **more: Any) -> list[Trajectory]:
    """Return all branches of one session."""
    return [
        trajectory(group, sample, branch=branch, of=branches, **more) for branch in range(branches)
    ]


class Bench:
    """A batcher over a memory stream."""

    def __init__(self, max_staleness: int = 0, max_pending: int = 100) -> None:
        self.stream = MemoryStream("trajectories")
        self.notes = Notes()
        self.batcher = Batcher(
            self.stream, self.notes, max_staleness=max_staleness, max_pending=max_pending
        )

    async def append(self, *trajectories: Trajectory) -> None:
        for made in trajectories:
            await self.stream.append(*encode_trajectory(made))

    async def begin(self, *trajectories: Trajectory) -> None:
        """Open the batcher with all its input: no deadline is too short to read it."""
        await self.stream.create_group(GROUP)
        await self.append(*trajectories)
        await self.stream.read(GROUP, CONSUMER, len(trajectories), 0)
        await self.batcher.open()


def wanted(
    *groups: str, deadline_s: float = 60.0, step: int = 3, version: int = 3, size: int = 2
) -> Wanted:
    return Wanted(step, version, tuple((group, size) for group in groups), deadline_s)


async def test_a_group_that_others_stand_in_for_is_waited_for_dropped_and_counted() -> None:
    bench = Bench()
    await bench.batcher.open()
    await bench.append(trajectory("a", 0), trajectory("a", 1), trajectory("b", 0, reward=0.0))
    asked = replace(wanted("a", "b"), left_out=frozenset({"a"}))
    collecting = asyncio.create_task(bench.batcher.collect(asked))
    done, _ = await asyncio.wait({collecting}, timeout=0.05)
    assert not done, "closed without a sibling"
    await bench.append(trajectory("b", 1))
    batch = await collecting
    await bench.batcher.settle(batch.record)
    assert [one.group_id for one in batch.trajectories] == ["b", "b"]
    assert batch.record.dropped_groups == {"no_variance": 1}
    assert bench.notes.dropped == {
        str(trajectory("a", sample).key): "no_variance" for sample in (0, 1)
    }


async def test_a_step_of_nothing_but_groups_left_out_has_an_empty_batch() -> None:
    bench = Bench()
    await bench.batcher.open()
    await bench.append(trajectory("a", 0), trajectory("a", 1))
    asked = replace(wanted("a"), left_out=frozenset({"a"}))
    batch = await bench.batcher.collect(asked)
    assert (batch.trajectories, batch.record.dropped_groups) == ([], {"no_variance": 1})


async def test_a_step_waits_for_all_siblings_and_is_sorted_by_task_and_sample() -> None:
    bench = Bench()
    await bench.batcher.open()
    await bench.append(trajectory("b", 1, task=1), trajectory("a", 1), trajectory("b", 0, task=1))
    collecting = asyncio.create_task(bench.batcher.collect(wanted("a", "b")))
    done, _ = await asyncio.wait({collecting}, timeout=0.05)
    assert not done, "closed without a sibling"
    await bench.append(trajectory("a", 0))
    batch = await collecting
    assert [(t.task_index, t.sample_index) for t in batch.trajectories] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert batch.record.dropped == {}


async def test_at_the_deadline_a_group_closes_with_two_scored_siblings_and_is_dropped_with_fewer() -> (
    None
):
    bench = Bench()
    await bench.begin(
        *(trajectory("a", 0), trajectory("a", 1), trajectory("b", 0), trajectory("c", 0)),
        *(trajectory("c", 1, reward=None), trajectory("c", 2, reward=None)),
    )
    batch = await bench.batcher.collect(wanted("a", "b", "c", deadline_s=0.05, size=3))
    assert [t.group_id for t in batch.trajectories] == ["a", "a"]
    assert batch.record.dropped_groups == {"too_few_siblings": 1, "unscored": 1}
    await bench.batcher.settle(batch.record)
    assert bench.notes.dropped == {
        "b-0-3/0": "too_few_siblings",
        "c-0-3/0": "too_few_siblings",
        "c-1-3/0": "unscored",
        "c-2-3/0": "unscored",
    }
    assert (await bench.stream.depth()).entries == 2


async def test_what_waits_in_the_stream_counts_though_the_deadline_has_passed() -> None:
    bench = Bench()
    await bench.batcher.open()
    others = [trajectory("z", sample) for sample in range(40)]
    await bench.append(*others, trajectory("a", 0), trajectory("a", 1))
    batch = await bench.batcher.collect(wanted("a", deadline_s=0.0))
    assert [t.group_id for t in batch.trajectories] == ["a", "a"]
    late = await bench.batcher.collect(wanted("b", deadline_s=0.0))
    assert late.trajectories == []


async def test_a_group_waits_for_every_branch_of_its_sessions_and_not_for_more_of_one() -> None:
    bench = Bench()
    await bench.batcher.open()
    await bench.append(*session("a", 0, 3), *session("a", 1, 2)[:1])
    collecting = asyncio.create_task(bench.batcher.collect(wanted("a")))
    done, _ = await asyncio.wait({collecting}, timeout=0.05)
    assert not done, "three branches of one session are no two sessions"
    await bench.append(*session("a", 1, 2)[1:])
    batch = await collecting
    assert [str(t.key) for t in batch.trajectories] == [
        "a-0-3/0",
        "a-0-3/1",
        "a-0-3/2",
        "a-1-3/0",
        "a-1-3/1",
    ]


async def test_at_the_deadline_the_branches_of_incomplete_sessions_are_dropped() -> None:
    bench = Bench()
    await bench.begin(
        *(*session("a", 0, 2), *session("a", 1, 1), *session("a", 2, 3)[:2]),
        *(*session("b", 0, 2, task=1), *session("b", 1, 2, task=1)[:1]),
    )
    batch = await bench.batcher.collect(wanted("a", "b", deadline_s=0.05, size=3))
    assert [str(t.key) for t in batch.trajectories] == ["a-0-3/0", "a-0-3/1", "a-1-3/0"]
    assert batch.record.dropped_groups == {"incomplete_session": 1}
    await bench.batcher.settle(batch.record)
    assert bench.notes.dropped == {
        "a-2-3/0": "incomplete_session",
        "a-2-3/1": "incomplete_session",
        "b-0-3/0": "too_few_siblings",
        "b-0-3/1": "too_few_siblings",
        "b-1-3/0": "incomplete_session",
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reward": None}, "unscored"),
        ({"reward": math.inf}, "not_finite"),
        ({"reward": -1e16}, "not_finite"),
        ({"logprob": math.nan}, "not_finite"),
        ({"logprob": -math.inf}, "not_finite"),
    ],
)
async def test_one_branch_that_cannot_be_trained_drops_its_session(
    change: dict[str, Any], reason: str, metric_reader: InMemoryMetricReader
) -> None:
    bench = Bench()
    await bench.batcher.open()
    await bench.append(*session("a", 0, 1), *session("a", 1, 1))
    await bench.append(trajectory("a", 2, of=2), trajectory("a", 2, branch=1, of=2, **change))
    batch = await bench.batcher.collect(wanted("a", size=3))
    assert [str(t.key) for t in batch.trajectories] == ["a-0-3/0", "a-1-3/0"]
    assert set(batch.record.dropped.values()) == {("a-2-3/0", reason), ("a-2-3/1", reason)}
    left_out = counted(metric_reader, "paceline.policy.not_finite", what="session")
    assert left_out == (reason == "not_finite")


async def test_a_group_of_size_zero_is_not_waited_for_and_counts_as_dropped() -> None:
    bench = Bench()
    await bench.batcher.open()
    await bench.append(trajectory("a", 0), trajectory("a", 1))
    groups = (("a", 2), ("none", 0))
    batch = await asyncio.wait_for(
        bench.batcher.collect(Wanted(3, 3, groups, deadline_s=60)), patient(5)
    )
    assert len(batch.trajectories) == 2
    assert batch.record.dropped_groups == {"unscored": 1}
    only_empty = await asyncio.wait_for(
        bench.batcher.collect(Wanted(3, 3, (("none", 0),), deadline_s=60)), patient(5)
    )
    assert only_empty.trajectories == []


@pytest.mark.parametrize(("group_size", "trained"), [(1, 1), (2, 0), (8, 0)])
async def test_a_lone_session_is_trained_only_where_its_group_was_opened_for_one(
    group_size: int, trained: int
) -> None:
    bench = Bench()
    await bench.batcher.open()
    await bench.append(trajectory("a", 0, group_size=group_size))
    batch = await bench.batcher.collect(wanted("a", size=1))
    assert len(batch.trajectories) == trained
    assert batch.record.dropped_groups == ({} if trained else {"too_few_siblings": 1})


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.lists(st.integers(1, 4), min_size=2, max_size=4), min_size=1, max_size=3),
    draw=st.randoms(use_true_random=False),
    data=st.data(),
)
def test_whatever_the_order_of_arrival_a_batch_is_the_complete_sessions_in_one_order(
    counts: list[list[int]], draw: Any, data: st.DataObject
) -> None:
    groups = [chr(ord("a") + number) for number in range(len(counts))]
    whole = [
        session(group, sample, branches, task=task, group_size=len(sizes))
        for task, (group, sizes) in enumerate(zip(groups, counts, strict=True))
        for sample, branches in enumerate(sizes)
    ]
    cut = [data.draw(st.integers(0, len(one))) for one in whole]
    arrived = [branch for one, keep in zip(whole, cut, strict=True) for branch in one[:keep]]
    draw.shuffle(arrived)
    complete = [one for one, keep in zip(whole, cut, strict=True) if keep == len(one)]
    siblings = {group: sum(one[0].group_id == group for one in complete) for group in groups}
    expected = [str(b.key) for one in complete if siblings[one[0].group_id] >= 2 for b in one]

    async def collect() -> Batch:
        bench = Bench()
        await bench.begin(*arrived)
        sizes = tuple(
            (group, len(sessions)) for group, sessions in zip(groups, counts, strict=True)
        )
        return await bench.batcher.collect(Wanted(3, 3, sizes, deadline_s=0))

    batch = asyncio.run(collect())
    assert [str(t.key) for t in batch.trajectories] == expected
    dropped = {key for key, _ in batch.record.dropped.values()}
    assert dropped | set(expected) == {str(b.key) for b in arrived}
    assert not dropped & set(expected)


def spanned(one: Trajectory, *versions: int) -> Trajectory:
    """The same with a response of a token per policy version."""
    count = len(versions)
    return replace(
        one,
        token_ids=(1, *range(2, 2 + count)),
        loss_mask=(0, *[1] * count),
        behavior_logprobs=(0.0, *[-1.0] * count),
        version_spans=tuple(VersionSpan(1 + n, 2 + n, v) for n, v in enumerate(versions)),
    )


async def test_one_stale_token_takes_its_whole_group_with_it() -> None:
    bench = Bench(max_staleness=1)
    await bench.batcher.open()
    old = spanned(trajectory("a", 1, branch=1, of=2), 9, 7, 9)  # the middle token is two behind
    await bench.append(trajectory("a", 0, version=9), trajectory("a", 1, of=2, version=9), old)
    await bench.append(trajectory("a", 2, version=9, reward=None))
    await bench.append(*(spanned(trajectory("b", n, task=1), 8, 9) for n in (0, 1)))
    batch = await bench.batcher.collect(wanted("a", "b", version=9))
    assert [t.group_id for t in batch.trajectories] == ["b", "b"]
    assert batch.record.dropped_groups == {"stale": 1}
    assert batch.staleness == {1: 2}
    await bench.batcher.settle(batch.record)
    assert bench.notes.dropped == {
        "a-0-3/0": "stale",
        "a-1-3/0": "stale",
        "a-1-3/1": "stale",
        "a-2-3/0": "unscored",
    }


async def test_a_step_trains_groups_of_several_draws_and_keeps_those_of_others() -> None:
    bench = Bench(max_staleness=2)
    await bench.batcher.open()
    for step, group in ((2, "early"), (3, "a"), (4, "next"), (4, "ahead")):
        drawn = [trajectory(group, n, step=step, version=step, task=step) for n in (0, 1)]
        await bench.append(*drawn)
    batch = await bench.batcher.collect(wanted("ahead", "early", step=3, version=4))
    assert [t.group_id for t in batch.trajectories] == ["early", "early", "ahead", "ahead"]
    assert batch.staleness == {0: 2, 2: 2}
    await bench.batcher.settle(batch.record)
    rest = await bench.batcher.collect(wanted("a", "next", step=4, version=5))
    assert [t.group_id for t in rest.trajectories] == ["a", "a", "next", "next"]
    assert bench.notes.dropped == {}


async def test_of_a_group_name_that_was_used_again_the_newest_draw_is_trained() -> None:
    bench = Bench(max_staleness=9)
    await bench.batcher.open()
    await bench.append(trajectory("g", 5, step=1, version=1), trajectory("g", 6, step=1, version=1))
    await bench.append(trajectory("g", 0), trajectory("g", 1))
    batch = await bench.batcher.collect(wanted("g"))
    assert [t.step for t in batch.trajectories] == [3, 3]


async def test_groups_that_nobody_asks_for_are_given_up_whole_and_late() -> None:
    bench = Bench(max_staleness=1)
    await bench.begin(
        trajectory("old", 0, step=1, version=1),
        trajectory("old", 1, step=1, version=2),
        trajectory("younger", 0, step=1, version=2),
    )
    for version in (1 + 1 + ABANDONED, 1 + 1 + ABANDONED + 1):
        batch = await bench.batcher.collect(Wanted(version, version, (), deadline_s=0))
        await bench.batcher.settle(batch.record)
        late = version == 1 + 1 + ABANDONED + 1
        dropped = {"old-0-1/0": "stale", "old-1-1/0": "stale"} if late else {}
        assert bench.notes.dropped == dropped
        assert batch.record.dropped_groups == {}


lags = st.integers(0, 5)
drawn_sessions = st.lists(
    st.lists(st.lists(lags, min_size=1, max_size=3), min_size=1, max_size=2), min_size=1, max_size=4
)


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(0, 4), drawn_sessions), min_size=1, max_size=4),
    eta=st.integers(0, 4),
    draw=st.randoms(use_true_random=False),
)
def test_no_token_older_than_the_bound_is_trained_and_every_group_ages_as_one(
    groups: list[tuple[int, list[list[list[int]]]]], eta: int, draw: Any
) -> None:
    now = 9
    made: dict[str, list[Trajectory]] = {
        f"g{task}": [
            spanned(
                trajectory(
                    f"g{task}", sample, step=step, task=task, branch=branch, of=len(branches)
                ),
                *(now - lag for lag in of_branch),
            )
            for sample, branches in enumerate(sessions)
            for branch, of_branch in enumerate(branches)
        ]
        for task, (step, sessions) in enumerate(groups)
    }
    worst = {
        f"g{task}": max(lag for branches in sessions for one in branches for lag in one)
        for task, (_, sessions) in enumerate(groups)
    }
    count = {f"g{task}": len(sessions) for task, (_, sessions) in enumerate(groups)}
    arrived = [one for several in made.values() for one in several]
    draw.shuffle(arrived)

    async def collect() -> Batch:
        bench = Bench(max_staleness=eta)
        await bench.begin(*arrived)
        return await bench.batcher.collect(Wanted(7, now, tuple(count.items()), deadline_s=0))

    batch = asyncio.run(collect())
    fresh = [group for group in made if worst[group] <= eta]
    trained = [group for group in fresh if count[group] >= 2]
    assert [t.key for t in batch.trajectories] == [one.key for g in trained for one in made[g]]
    by_lag = Counter(
        now - min(span.policy_version for span in one.version_spans)
        for group in trained
        for one in made[group]
    )
    assert batch.staleness == dict(by_lag)
    assert max(batch.staleness, default=0) <= eta
    expected = {"stale": len(made) - len(fresh), "too_few_siblings": len(fresh) - len(trained)}
    assert batch.record.dropped_groups == {why: n for why, n in expected.items() if n}
    reasons = dict(batch.record.dropped.values())
    for group, several in made.items():
        for one in several:
            if group not in trained:
                why = "too_few_siblings" if group in fresh else "stale"
                assert reasons.pop(str(one.key)) == why
    assert not reasons


async def test_an_entry_that_does_not_decode_is_a_dead_letter_and_counted_as_dropped(
    metric_reader: InMemoryMetricReader,
) -> None:
    bench = Bench()
    await bench.batcher.open()
    fields, payload = encode_trajectory(trajectory("a", 7))
    await bench.stream.append(fields, payload[:-3])
    await bench.stream.append({"what": "ever"}, b"")
    await bench.append(trajectory("a", 0), trajectory("a", 1))
    batch = await bench.batcher.collect(wanted("a"))
    assert len(batch.trajectories) == 2
    assert bench.batcher.dead_letters == (await bench.stream.depth()).dead == 2
    assert counted(metric_reader, "paceline.policy.dead_letters") == 2
    assert bench.notes.dropped == {"a-7-3/0": "undecodable"}


async def test_entries_stay_until_a_checkpoint_and_a_restart_replays_exactly_the_recorded_batch() -> (
    None
):
    bench = Bench()
    await bench.begin(trajectory("a", 1), trajectory("a", 0))
    batch = await bench.batcher.collect(wanted("a", deadline_s=0.05, size=3))
    await bench.batcher.settle(batch.record)
    await bench.batcher.mark(batch.record)
    await bench.append(trajectory("a", 2))
    await bench.stream.read(GROUP, CONSUMER, 10, 0)

    again = Batcher(bench.stream, bench.notes, max_staleness=0, max_pending=100)
    await again.open()
    assert again.replay(batch.record).trajectories == batch.trajectories
    await again.settle(batch.record)
    await again.release(batch.record)
    assert bench.notes.trained == {"a-0-3/0": 3, "a-1-3/0": 3}
    assert (await bench.stream.depth()).entries == 1
    with pytest.raises(DataLoss, match="step 3"):
        again.replay(batch.record)


async def test_no_more_than_the_bound_is_held_for_later_steps() -> None:
    bench = Bench(max_pending=3)
    await bench.batcher.open()
    await bench.append(*(trajectory("later", i, step=9) for i in range(4)))
    with pytest.raises(ResourceExhausted):
        await bench.batcher.collect(wanted("a"))


def record(step: int) -> StepRecord:
    return StepRecord(
        step, step, {f"{step}-0": f"s{step}/0"}, {"9-0": ("x/0", "stale")}, {"stale": 1}
    )


def test_records_leave_with_their_checkpoint_and_no_flipped_byte_goes_unseen(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run" / "records.jsonl"
    records = RecordFile(path)
    assert records.load() == []
    for step in (1, 2, 3):
        records.append(record(step))
    assert RecordFile(path).load() == [record(1), record(2), record(3)]
    records.forget(2)
    assert records.load() == [record(3)]
    data = path.read_bytes()
    for at in range(len(data) - 1):  # but for the end of the line
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(DataLoss, match=r"records\.jsonl line \d is damaged"):
            records.load()


def test_an_appended_record_is_on_the_disk_and_so_is_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, list[str]]] = []

    def note(handle: int) -> None:
        there = sorted(path.name for path in tmp_path.iterdir())
        synced.append((Path(f"/proc/self/fd/{handle}").readlink().name, there))

    monkeypatch.setattr("os.fsync", note)
    RecordFile(tmp_path / "records.jsonl").append(record(1))
    half = ".tmp-records.jsonl"
    assert synced == [(half, [half]), (tmp_path.name, ["records.jsonl"])]
