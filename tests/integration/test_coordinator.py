"""The coordinator against scripted peers: real gRPC sockets, real Redis, real ZeroMQ."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from certificates import authority
from google.protobuf.json_format import Parse
from integration.coordinator_world import (
    SECURITY,
    WAIT_S,
    Script,
    check_slots,
    config_of,
    journal_of,
    overrides,
    process_of,
    records_of,
    run_to_end,
    running_peers,
)
from rich.console import Console

from paceline.cli.access import coordinator_of
from paceline.cli.active import show_status, stop_run
from paceline.config.load import write_tables
from paceline.errors import (
    ConfigError,
    FailedPrecondition,
    RunFailed,
    Unavailable,
)
from paceline.events import FactSubscriber
from paceline.local.news import heard, news_pipe
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.local.processes import NEWS_VARIABLE
from paceline.report.journal import copy_journal, read_history
from paceline.report.solved import total_unscored
from paceline.rpc import EpochGuard, channel, leases
from paceline.rpc.progress import ask_progress
from paceline.services.coordinator import server
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.journal.journal import TOGETHER, Journal
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.state import Phase
from paceline.services.coordinator.runner import Runner
from paceline.services.coordinator.server import serve
from paceline.streams import connect
from paceline.tasks.file import TaskFile
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import rollout_pb2
from paceline.v1.coordinator_pb2 import StepRecord
from paceline.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from paceline.v1.trajectory_pb2 import PURPOSE_TRAIN

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_late_readers")]


async def test_a_run_trains_policy_and_drafter_and_reports_every_step(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.speculators.costs.LEAST_ROUNDS", 10)
    async with running_peers(script := Script(hold_step=0)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, trackers='["tensorboard"]'))
        subscriber = FactSubscriber(config.addresses.events, config.run.id, _ignore_gap)
        monitor = subscriber._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(
            asyncio.gather(monitor.recv_multipart(), script.holding.wait()), WAIT_S
        )
        subscriber._socket.disable_monitor()
        script.released.set()
        facts = [await subscriber.next(WAIT_S)]
        while not facts[-1].HasField("run_finished"):
            facts.append(await subscriber.next(WAIT_S))
        await run
        subscriber.close()
    assert script.commits == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]
    assert script.trained == [0, 1, 2]
    known = {"eagle:3_1_4": 2.5}  # from the rollouts that finished before
    assert (script.accept_lengths[0], script.accept_lengths[-1]) == ({}, known)
    entries = await journal_of(config)
    assert check_slots(entries) > 0
    records = records_of(entries)
    assert [int(record.get("step", 0)) for record in records] == [0, 1, 2]
    last = records[-1]
    assert (last["drafter_steps"], last["accept_length"], last["reward_mean"]) == ("2", 2.5, 0.25)
    assert last["drafter_slot_s"] > 0
    assert len({record["tokens_hash"] for record in records}) == 1
    evaluated = [
        (e["data"]["kind"], e["data"]["value"], e["step"])
        for e in entries
        if e["event"] == "EvaluationDone"
    ]
    both = [("accuracy", 0.0), ("accept_length_probe", 3.0)]
    assert evaluated == [(*one, step) for step in (0, 3) for one in both]
    finished = [fact.step_finished.record for fact in facts if fact.HasField("step_finished")]
    assert finished[-1].evaluations["accept_length_probe"] == 3.0
    assert dict(finished[-1].staleness) == {"0": 3, "1": 1}
    assert facts[-1].run_finished.failure == ""
    assert script.evaluations == [0.0], "of the start policy there is no checkpoint"
    (tracked,) = (tmp_path / "tensorboard").iterdir()
    told = tracked.read_bytes()
    assert all(name in told for name in (b"policy/loss", b"reward", b"evaluation/accuracy"))


async def _ignore_gap(first: int, last: int) -> None:
    """Ignores facts from before the subscription."""


async def test_a_slot_is_leased_only_after_its_worker_has_given_its_memory_back(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script()) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1, heldout_path=""))
        await run_to_end(config)
    # Released workers that get no slot again before the run ends resume for external agents.
    assert script.order == [
        *("resume []", "generate"),
        *("release [0]", "draft"),
        *("release [0, 1]", "train"),
        "resume [0, 1]",
    ]
    entries = await journal_of(config)
    released = [one["data"] for one in entries if one["event"] == "WorkersReleased"]
    assert [(one["holder"], one["details"]["bytes"]) for one in released] == [
        ("drafter", 100),
        ("policy", 200),
    ]


async def test_the_drafter_trains_during_a_push_and_leaves_with_the_commit(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(push_drafts=True)) as peers:
        more = {"steps": 2, "heldout_path": ""}
        config = config_of(overrides(peers, redis_url, tmp_path, **more))
        await run_to_end(config)
    step = [
        *("generate", "release [0]", "draft"),
        *("release [0, 1]", "train"),
        *("release [0]", "draft"),
    ]
    assert [one for one in script.order if not one.startswith("resume")] == step * 2
    entries = await journal_of(config)
    assert check_slots(entries) > 0
    assert [one["event"] for one in entries].count("DrafterActivated") == 4
    served = [one["data"]["versions"]["drafter"] for one in entries if one["event"] == "Committed"]
    assert served[0] in (1, 2), "what the push's lease promotes may come too late for its commit"
    assert served[1] in (3, 4)


async def test_rollouts_get_the_arms_that_all_gateways_measured_with_the_same_drafter(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(same := Script(bubbles=False)) as peers:
        more = {"steps": 2, "heldout_path": "", "drafter_enabled": False}
        await run_to_end(config_of(overrides(peers, redis_url, tmp_path, **more)))
    async with running_peers(new := Script()) as peers:
        more = {"steps": 2, "heldout_path": ""}
        await run_to_end(config_of(overrides(peers, redis_url, tmp_path, **more)))
    arms = [[[arm.arm for arm in one.arms] for one in script.rollouts] for script in (same, new)]
    assert arms == [[[], ["ngram:4_1_5"]], [[], []]]


async def test_slots_go_back_to_the_engine_for_callers_that_wait(
    redis_url: str, tmp_path: Path
) -> None:
    script = Script(hold_step=0)
    async with running_peers(script) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1, heldout_path=""))
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        for epoch in (1, 2):  # an unknown lease, and the drafter's lease
            script.traffic.put_nowait(rollout_pb2.WatchTrafficResponse(epoch=epoch, requests=3))
        await asyncio.wait_for(script.preempted.wait(), WAIT_S)
        await asyncio.wait_for(script.resumed.wait(), WAIT_S)
        assert script.order[-1] == "resume [0]"
        assert not script.lent
        script.released.set()
        await run
    assert script.order[-3:] == ["release [0, 1]", "train", "resume [0, 1]"]
    assert script.order.count("draft") == 1, "not again in this step"
    entries = await journal_of(config)
    assert check_slots(entries) > 0
    waits = [one["data"]["requests"] for one in entries if one["event"] == "TrafficWaits"]
    assert waits == [3]


@pytest.mark.parametrize("fails", [False, True], ids=["taken in", "refused"])
async def test_a_slot_that_is_released_later_joins_the_drafter(
    redis_url: str, tmp_path: Path, *, fails: bool
) -> None:
    script = Script(workers=3, join_fails=fails)
    async with running_peers(script) as peers:
        more = {"steps": 1, "heldout_path": "", "max_drafter_slots": 2}
        config = config_of(overrides(peers, redis_url, tmp_path, **more))
        await run_to_end(config)
    assert script.order == [
        *("resume []", "generate"),
        *("release [0]", "draft"),
        *("release [1]", "join [0, 1]"),
        *(("resume [0, 1]",) if fails else ()),  # the rollouts resume
        *("release [0, 1, 2]", "train"),
        "resume [0, 1, 2]",
    ]
    entries = await journal_of(config)
    assert check_slots(entries, slots=3) > 0
    news = [one["event"] for one in entries]
    assert news.count("JoinFailed" if fails else "DrafterJoined") == 1
    granted = [one["slots"] for one in entries if one["event"] in ("ShareDone", "DrafterActivated")]
    held = [slot for slots in granted for slot in slots if slot[2] == "drafter"]
    assert [(first, epoch) for first, _, _, epoch in held] == [(0, 2), (1, 2)], "one lease"


@pytest.mark.parametrize("workers", [1, 2], ids=["for the drafter", "for the policy"])
async def test_without_released_workers_the_drafter_does_not_train_and_the_policy_waits(
    redis_url: str, tmp_path: Path, workers: int
) -> None:
    async with running_peers(script := Script(release_fails=workers)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1))
        await run_to_end(config)
    assert script.trained == [0]
    check_slots(entries := await journal_of(config))
    lost = "TrainerFailed" if workers == 1 else "ServiceLost"
    assert [one["event"] for one in entries].count(lost) == 1
    assert script.order.count("draft") == workers - 1


async def test_epochs_only_grow_for_each_receiver(redis_url: str, tmp_path: Path) -> None:
    async with running_peers(script := Script()) as peers:
        await run_to_end(config_of(overrides(peers, redis_url, tmp_path)))
    for receiver in ("gateway", "drafter"):
        epochs = [epoch for name, epoch in script.epochs if name == receiver]
        assert epochs == sorted(set(epochs))


@pytest.mark.few(1)
@pytest.mark.parametrize("snapshot_entries", [1, 1000])
async def test_a_killed_coordinator_takes_its_run_up_again(
    redis_url: str, tmp_path: Path, snapshot_entries: int
) -> None:
    async with running_peers(script := Script(hold_step=1)) as peers:
        words = overrides(peers, redis_url, tmp_path)
        first = await process_of(words, snapshot_entries)
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        script.released.set()
        second = await process_of(words, snapshot_entries)
        assert await asyncio.wait_for(second.wait(), WAIT_S) == 0
    train = [request for request in script.rollouts if request.purpose == PURPOSE_TRAIN]
    assert [request.context.step for request in train] == [0, 1, 1, 2]
    assert train[1].tasks == train[2].tasks
    assert train[2].context.epoch > train[1].context.epoch
    assert script.trained == [0, 1, 2]
    entries = await journal_of(config_of(words))
    assert check_slots(entries) > 0
    records = records_of(entries)
    traces = {entry["data"]["traceparent"] for entry in entries if entry["event"] == "StepBegan"}
    assert len(records) == len(traces) == 3


async def test_the_trainer_is_asked_for_the_scored_sessions_of_each_group(
    redis_url: str, tmp_path: Path
) -> None:
    script = Script(unscored=frozenset({(0, 1), (1, 0), (1, 1)}))
    async with running_peers(script) as peers:
        await run_to_end(config_of(overrides(peers, redis_url, tmp_path, steps=2)))
    assert script.waited_for == [(step, {f"s{step}.t0": 1, f"s{step}.t1": 0}) for step in range(2)]


async def test_samples_that_failed_are_counted_and_shown_in_status_and_report(
    redis_url: str, tmp_path: Path
) -> None:
    script = Script(
        unscored=frozenset({(0, 1), (1, 0), (1, 1)}), unscored_ends="error", hold_step=1
    )
    async with running_peers(script) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=2))
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        shown = io.StringIO()
        asked = coordinator_of([], config.addresses.coordinator)
        assert await show_status(asked, Console(file=shown, width=200)) == 0
        script.released.set()
        await run
    assert "samples without a reward: 3 failed" in shown.getvalue().splitlines()
    records = [Parse(json.dumps(one), StepRecord()) for one in records_of(await journal_of(config))]
    assert [dict(one.samples_unscored) for one in records] == [{"failed": 3}] * 2
    assert total_unscored(records) == {"failed": 6}  # a row of the report's table


def _damage(file: Path) -> None:
    file.write_bytes(b"\xff" * file.stat().st_size)


async def test_a_task_file_that_is_damaged_during_a_run_changes_no_task_of_the_run(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=0)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=2))
        prompts = {task.prompt for task in TaskFile(Path(config.tasks_path))}
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        _damage(Path(config.tasks_path))
        script.released.set()
        await run
    train = [request for request in script.rollouts if request.purpose == PURPOSE_TRAIN]
    assert {request.context.step for request in train} == {0, 1}
    assert all({task.prompt for task in request.tasks} <= prompts for request in train)


async def test_open_traffic_trains_the_groups_that_agents_bring(
    redis_url: str, tmp_path: Path
) -> None:
    evaluated = {"evaluation.environment": "single_turn", "evaluation.reward": "math_answer"}
    keys = {
        "tasks_path": "",
        "environment": "external",
        "reward": "agent",
        "prompts_per_step": 2,
        **evaluated,
    }
    async with running_peers(script := Script(open_sizes=(2, 5, 9))) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=2, **keys))
        await run_to_end(config)
    train = [request for request in script.rollouts if request.purpose == PURPOSE_TRAIN]
    assert [(request.open_groups, len(request.tasks), request.reward) for request in train] == [
        (2, 0, "agent")
    ] * 2
    others = [request for request in script.rollouts if request.purpose != PURPOSE_TRAIN]
    assert {(request.environment, request.reward) for request in others} == {
        ("single_turn", "math_answer")
    }
    assert script.waited_for == [
        (step, {f"agent-{step}-0": 2, f"agent-{step}-1": 5}) for step in range(2)
    ]
    entries = await journal_of(config)
    finished = [entry["data"]["details"] for entry in entries if entry["event"] == "TasksFinished"]
    assert [figures["samples"] for figures in finished] == [7, 7]
    assert len(records_of(entries)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("snapshot_entries", [1, 1000])
async def test_a_coordinator_killed_in_the_policy_step_asks_for_the_same_groups(
    redis_url: str, tmp_path: Path, snapshot_entries: int
) -> None:
    script = Script(hold_policy_step=1, unscored=frozenset({(1, 0)}))
    async with running_peers(script) as peers:
        words = overrides(peers, redis_url, tmp_path)
        first = await process_of(words, snapshot_entries)
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        second = await process_of(words, snapshot_entries)
        assert await asyncio.wait_for(second.wait(), WAIT_S) == 0
    train = [request for request in script.rollouts if request.purpose == PURPOSE_TRAIN]
    assert [request.context.step for request in train] == [0, 1, 2], "the rollouts had ended"
    assert script.waited_for == [
        (step, {f"s{step}.t0": 2, f"s{step}.t1": 1}) for step in (0, 1, 1, 2)
    ]


@pytest.mark.parametrize(
    "keys", [{"tasks_path": ""}, {"tasks_path": "", "environment": "external"}]
)
async def test_a_run_whose_settings_cannot_work_does_not_begin(
    redis_url: str, tmp_path: Path, keys: dict[str, object]
) -> None:
    async with running_peers(script := Script()) as peers:
        with pytest.raises(ConfigError):
            await run_to_end(config_of(overrides(peers, redis_url, tmp_path, **keys)))
    assert script.rollouts == []


async def test_a_gateway_that_is_away_for_two_seconds_gets_its_tasks_again(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        await peers.servers["gateway"].stop(0)
        await asyncio.sleep(2.0)  # the outage itself
        script.released.set()
        await peers.start("gateway")
        await run
    entries = await journal_of(config)
    assert {"ServiceLost", "ServiceBack"} <= {entry["event"] for entry in entries}
    assert [commit[1] for commit in script.commits] == [1, 2, 3]
    assert check_slots(entries) > 0


async def test_an_unanswered_preemption_costs_its_deadline_and_no_more(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "PREEMPT_S", 0.3)
    async with running_peers(Script(deaf_to_preempt=True)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1))
        await run_to_end(config)
    entries = await journal_of(config)
    names = [entry["event"] for entry in entries]
    at = names.index("Deadline")
    assert entries[at]["data"]["what"] == "preempt"
    changes = [(first, holder, epoch) for e in entries for first, _, holder, epoch in e["slots"]]
    leased = next(epoch for _, holder, epoch in changes if holder == "drafter")
    assert all(epoch > leased for _, _, _, epoch in entries[at]["slots"])
    assert 0.25 < records_of(entries)[0]["preempt_wait_s"] < patient(10)


async def test_a_preemption_that_a_stopped_trainer_has_missed_is_repeated_before_its_slots_move(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "PREEMPT_S", 0.5)
    async with running_peers(Script(missed_preempts=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1))
        await run_to_end(config)
    names = [entry["event"] for entry in await journal_of(config)]
    assert "Deadline" not in names
    assert "Preempted" in names


async def test_a_drafter_that_does_not_begin_in_time_is_preempted(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "ACTIVATION_S", 0.2)
    async with running_peers(script := Script(slow_to_attach=True, hold_step=0)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1))
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        await asyncio.wait_for(script.preempted.wait(), WAIT_S)
        script.released.set()
        await run
    entries = await journal_of(config)
    names = [entry["event"] for entry in entries]
    assert (
        names.index("ShareDone")
        < names.index("Deadline")
        < names.index("Preempted")
        < names.index("TasksFinished")
    )
    assert 0.15 < check_slots(entries) < patient(10)


async def test_a_failed_run_says_why_and_resumes(redis_url: str, tmp_path: Path) -> None:
    async with running_peers(script := Script(policy_failures=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        with pytest.raises(
            RunFailed, match="policy_trainer: policy: the loss is not finite; seen: nan"
        ):
            await run_to_end(config)
        await run_to_end(config)
    assert script.trained == [0, 1, 2]
    assert len(records_of(await journal_of(config))) == 3


@pytest.mark.parametrize("phase", ["rollout", "policy"])
async def test_a_run_that_fails_gives_its_slots_back_to_the_engine(
    redis_url: str, tmp_path: Path, phase: str
) -> None:
    script = Script(hold_step=0) if phase == "rollout" else Script(policy_failures=1)
    async with running_peers(script) as peers:
        more = {"step_deadline_s": 1.0} if phase == "rollout" else {}
        config = config_of(overrides(peers, redis_url, tmp_path, heldout_path="", **more))
        with pytest.raises(RunFailed):
            await run_to_end(config)
        assert not script.lent
        assert script.preempted.is_set()
        failed = script.order.copy()
        script.released.set()
        await run_to_end(config)
    before = "draft" if phase == "rollout" else "train"
    assert failed[-2:] == [before, "resume [0]" if phase == "rollout" else "resume [0, 1]"]
    assert len(records_of(await journal_of(config))) == 3


async def test_a_finished_run_ends_at_once_without_its_peers(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(Script()) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1))
        await run_to_end(config)
    await asyncio.wait_for(serve(config, asyncio.Event()), patient(5.0))
    assert len(records_of(await journal_of(config))) == 1


async def test_a_stopped_run_ends_with_the_running_step_and_answers_snapshots(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        async with channel(config.addresses.coordinator, SECURITY) as to:
            stub: Any = CoordinatorServiceStub(to)
            snapshot = await stub.GetSnapshot(pb.GetSnapshotRequest())
            assert (snapshot.step, snapshot.total_steps, snapshot.phase) == (1, 3, "rollout")
            assert [slot.holder for slot in snapshot.slots] == [pb.HOLDER_DRAFTER, pb.HOLDER_ENGINE]
            assert len((await stub.ListSteps(pb.ListStepsRequest())).steps) == 1
            assert (await stub.StopRun(pb.StopRunRequest())).total_steps == 2
        script.released.set()
        await run
    assert len(records_of(await journal_of(config))) == 2


async def test_paceline_stop_ends_the_run_with_the_running_step_and_says_what_it_waits_for(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        said = Said()
        stopping = asyncio.create_task(
            stop_run(coordinator_of([], config.addresses.coordinator), Console(file=said))
        )
        await asyncio.wait_for(said.waiting.wait(), WAIT_S)
        script.released.set()
        assert await asyncio.wait_for(stopping, WAIT_S) == 0
        await run
    lines = said.getvalue().splitlines()
    assert lines[:2] == ["the run ends with 2 steps", "waiting for step 1: rollout"]
    assert lines[-1] in ("the run has ended after 2 steps", "the coordinator has left")
    assert script.trained == [0, 1]
    assert len(records_of(await journal_of(config))) == 2


class Said(io.StringIO):
    """Text printed to a console, and an event for the first "waiting for"."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = asyncio.Event()

    def write(self, text: str) -> int:
        if "waiting for" in text:
            self.waiting.set()
        return super().write(text)


async def test_ctrl_c_ends_the_waiting_of_paceline_stop_and_not_the_run(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        stopping = await _stop_process(config.addresses.coordinator)
        assert stopping.stdout is not None
        said = [await asyncio.wait_for(stopping.stdout.readline(), WAIT_S) for _ in range(2)]
        assert said == [b"the run ends with 2 steps\n", b"waiting for step 1: rollout\n"]
        stopping.send_signal(signal.SIGINT)
        rest, error = await asyncio.wait_for(stopping.communicate(), WAIT_S)
        assert (stopping.returncode, rest) == (130, b"not waiting any longer; the run still ends\n")
        assert b"Traceback" not in error
        script.released.set()
        await run
    assert script.trained == [0, 1]


async def test_paceline_stop_where_nothing_runs_names_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    stopping = await _stop_process(address)
    said, error = await asyncio.wait_for(stopping.communicate(), WAIT_S)
    assert (stopping.returncode, said) == (2, b"")
    assert f"no coordinator answers; seen: {address}" in " ".join(error.decode().split())


async def test_a_run_that_has_not_begun_or_is_over_cannot_be_stopped(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(Script()) as peers:
        words = overrides(peers, redis_url, tmp_path, steps=1)
        config = config_of(words)
        await run_to_end(config)
        client = connect(config.redis.durable_url)
        runner = Runner(config, Journal(client, config.run.id), None, None, lambda: 0.0)  # type: ignore[arg-type]
        servicer: Any = server.CoordinatorServicer(config.run.id, runner)
        with pytest.raises(FailedPrecondition, match="no run goes on; seen: new"):
            await servicer.StopRun(pb.StopRunRequest(), None)
        finished = replace(runner.transitions.state, phase=Phase.FINISHED)
        runner.transitions.state = finished
        with pytest.raises(FailedPrecondition, match="no run goes on; seen: finished"):
            await servicer.StopRun(pb.StopRunRequest(), None)
        await client.aclose()


async def test_all_events_that_wait_are_taken_together_and_a_defect_ends_the_run(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(Script()) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        client = connect(config.redis.durable_url)
        runner = Runner(config, Journal(client, config.run.id), None, None, lambda: 0.0)  # type: ignore[arg-type]
        waiting = [events.StopRequested(float(n)) for n in range(TOGETHER + 3)]
        for event in waiting:
            runner._queue.put_nowait(event)
        assert await runner._waiting() == waiting[:TOGETHER]
        assert await runner._waiting() == waiting[TOGETHER:]
        runner._queue.put_nowait(waiting[0])
        runner._queue.put_nowait(RuntimeError("a defect of a call"))
        with pytest.raises(RuntimeError, match="a defect"):
            await runner._waiting()
        await client.aclose()


async def _stop_process(address: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "paceline.cli.main", "stop", "--address", address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_a_second_coordinator_of_the_same_run_cannot_write(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=0)) as peers:
        words = overrides(peers, redis_url, tmp_path)
        run = asyncio.create_task(run_to_end(config_of(words)))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        moved = [
            f"addresses.coordinator=127.0.0.1:{free_port()}",
            f"addresses.events=tcp://127.0.0.1:{free_port()}",
        ]
        other = asyncio.create_task(run_to_end(config_of([*words, *moved])))
        # The new coordinator preempts the drafter; the first coordinator then finds the journal
        # taken.
        with pytest.raises(FailedPrecondition) as refused:
            await run
        script.released.set()
        await other
    assert refused.value.reason == "JOURNAL_TAKEN"


async def test_a_durable_redis_that_is_away_for_two_seconds_loses_nothing(
    durable_server: Any, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=1)) as peers:
        config = config_of(overrides(peers, durable_server.url, tmp_path))
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        durable_server.kill()
        script.released.set()
        await asyncio.sleep(2.0)  # the outage itself
        durable_server.start_without_waiting()
        await run
    entries = await journal_of(config)
    assert [int(record.get("step", 0)) for record in records_of(entries)] == [0, 1, 2]
    assert check_slots(entries) > 0


async def test_lost_workers_and_ranks_are_tried_again_under_new_epochs(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(workers_lost=1, policy_ranks_lost=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        await run_to_end(config)
    names = [entry["event"] for entry in await journal_of(config)]
    assert (
        names.count("WorkerLost"),
        names.count("TrainerFailed"),
        names.count("ServiceLost"),
    ) == (
        1,
        1,
        0,
    )
    assert script.trained == [0, 1, 2]


async def test_what_the_gateway_lost_of_the_serving_set_is_pushed_and_committed_again(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(spoiled=True)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        await run_to_end(config)
    assert script.trained == [0, 0, 1, 2]
    assert script.commits[0] == script.commits[1]
    assert [seq for seq, _, _ in script.commits[1:]] == [1, 2, 3]
    entries = await journal_of(config)
    (fell,) = [entry for entry in entries if entry["event"] == "AcceptanceFell"]
    assert "damaged in the spool" in str(fell)


async def test_a_rank_that_keeps_dying_ends_the_run_with_its_message(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(Script(policy_ranks_lost=9)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path))
        with pytest.raises(RunFailed, match=r"rank 1 died \(attempt 3 of 3\)"):
            await run_to_end(config)


async def test_a_service_that_stays_away_ends_the_run_in_time(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, service_recovery_s=1.0))
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        await peers.servers["policy_trainer"].stop(0)
        script.released.set()
        with pytest.raises(RunFailed, match="step 1: policy_trainer: recovery"):
            await run


async def test_a_probe_that_the_engine_cannot_make_is_left_out(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(Script(drafts=False)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=1))
        await run_to_end(config)
    done = [
        entry["data"] for entry in await journal_of(config) if entry["event"] == "EvaluationDone"
    ]
    assert [(one["kind"], one["value"]) for one in done] == [
        ("accuracy", 0.0),
        ("accept_length_probe", None),
    ] * 2


async def test_an_evaluation_of_several_samples_tells_what_one_of_them_is_enough_for(
    redis_url: str, tmp_path: Path
) -> None:
    more = {"evaluation.samples": 4, "evaluation.temperature": 0.7, "steps": 1}
    async with running_peers(script := Script(bubbles=False)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, **more))
        await run_to_end(config)
    asked = [one for one in script.rollouts if one.purpose != PURPOSE_TRAIN]
    assert {one.samples_per_task for one in asked} == {1, 4}
    assert script.evaluations == [0.5], "the best checkpoint is chosen by the accuracy"
    client = connect(config.redis.durable_url)
    await copy_journal(client, config.run.id, tmp_path / "journal.jsonl")
    await client.aclose()
    history = read_history(tmp_path / "journal.jsonl")
    (record,) = history.records
    assert record.evaluations["accuracy"] == 0.5
    assert record.evaluations["pass@2"] == pytest.approx(5 / 6), "2 of 4 samples are right"
    assert history.widest_pass == "pass@4"
    assert history.evaluated("pass@4") == [(0, 1.0), (1, 1.0)]


async def test_a_candidate_that_cannot_be_served_is_left_out_of_the_set(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(commits_failed=1)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, steps=2))
        await run_to_end(config)
    assert script.commits == [(2, 1, 0), (3, 2, 2)]


async def test_a_run_without_a_drafter_needs_no_drafter_trainer(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script()) as peers:
        await peers.servers["drafter_trainer"].stop(0)
        no_straggler_waits_for_the_drafter(script)
        config = config_of(overrides(peers, redis_url, tmp_path, drafter_enabled=False))
        await run_to_end(config)
    assert script.commits == [(1, 1, 0), (2, 2, 0), (3, 3, 0)]
    assert check_slots(await journal_of(config)) == 0


@pytest.mark.parametrize("dies", ["before", "training"])
async def test_a_drafter_trainer_that_is_gone_for_good_ends_nothing(
    redis_url: str, tmp_path: Path, dies: str
) -> None:
    async with running_peers(script := Script(hold_step=0)) as peers:
        if dies == "before":
            await peers.servers["drafter_trainer"].stop(0)
            no_straggler_waits_for_the_drafter(script)
        config = config_of(overrides(peers, redis_url, tmp_path, service_recovery_s=0.3))
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        if dies == "training":
            await peers.servers["drafter_trainer"].stop(0)
            no_straggler_waits_for_the_drafter(script)
        await until_away(config, ["drafter_trainer"])
        console = Console(file=io.StringIO())
        assert await show_status(coordinator_of([], config.addresses.coordinator), console) == 0
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "away: drafter_trainer; the run goes on without it" in shown
        script.released.set()
        await run
    promoted = int(dies == "training")  # before it died
    assert script.commits == [(seq, seq, promoted) for seq in (1, 2, 3)]
    entries = await journal_of(config)
    assert "CallFailed" not in {entry["event"] for entry in entries}
    assert entries[-1]["phase"] == "finished"


async def test_an_alarm_says_whom_all_wait_for_until_the_run_goes_on(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = news_pipe()
    monkeypatch.setenv(NEWS_VARIABLE, str(writing))
    told = heard(reading)
    async with running_peers(script := Script(hold_step=0)) as peers:
        config = config_of(overrides(peers, redis_url, tmp_path, stall_alarm_s=0.5))
        run = asyncio.create_task(run_to_end(config))
        while True:
            kind, alarm = await asyncio.wait_for(anext(told), WAIT_S)
            if script.holding.is_set() and "rollout of step 0" in alarm:
                break
        assert kind == "impaired"
        assert "coordinator waits for gateway (rollout of step 0, " in alarm
        assert "gateway (does not answer: " in alarm  # this gateway has no ProgressService
        async with channel(config.addresses.coordinator, SECURITY) as to:
            assert (await ask_progress(to, WAIT_S)).alarm.startswith("no progress for ")
        script.released.set()
        kind, _ = await asyncio.wait_for(anext(told), WAIT_S)
        assert kind == "recovered"
        await run
    await told.aclose()
    os.close(writing)


async def test_status_reads_a_run_behind_tls_and_a_token(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATUS_TOKEN", "correct horse")
    security = authority(tmp_path, "ours", "STATUS_TOKEN")
    async with running_peers(script := Script(hold_step=0), security) as peers:
        for guard in peers.guards:
            peers.guards[guard] = EpochGuard(security)
        secured = security.model_dump(exclude_defaults=True)
        settings = {f"security.{name}": value for name, value in secured.items()}
        config = config_of(overrides(peers, redis_url, tmp_path, **settings))
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        there = tmp_path / "status.toml"
        address = {"coordinator": config.addresses.coordinator}
        write_tables(there, {"security": secured, "addresses": address})
        shown = io.StringIO()
        assert await show_status(coordinator_of([there]), Console(file=shown, width=200)) == 0
        with pytest.raises(Unavailable):
            await show_status(coordinator_of([], config.addresses.coordinator), Console(file=shown))
        script.released.set()
        await run
    lines = shown.getvalue().splitlines()
    assert lines[0].split("  ")[1:3] == ["step 0 of 3", "phase rollout"]
    assert any("drafter" in line and "training" in line for line in lines)


async def test_a_drafter_trainer_that_comes_back_takes_part_again(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=1)) as peers:
        await peers.servers["drafter_trainer"].stop(0)
        no_straggler_waits_for_the_drafter(script)
        config = config_of(overrides(peers, redis_url, tmp_path, service_recovery_s=0.3))
        run = asyncio.create_task(run_to_end(config))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        del script.activated.clear  # type: ignore[method-assign]
        script.activated.clear()
        await peers.start("drafter_trainer")
        await asyncio.wait_for(script.activated.wait(), WAIT_S)  # on the slot released meanwhile
        script.released.set()
        await run
    assert script.commits == [(1, 1, 0), (2, 2, 1), (3, 3, 2)]


def no_straggler_waits_for_the_drafter(script: Script) -> None:
    script.activated.set()
    script.activated.clear = lambda: None  # type: ignore[method-assign]


async def until_away(config: CoordinatorConfig, services: list[str]) -> None:
    """Returns when the coordinator reports exactly these services as away."""
    async with asyncio.timeout(WAIT_S), channel(config.addresses.coordinator, SECURITY) as peer:
        stub = CoordinatorServiceStub(peer)
        while True:
            snapshot = await stub.GetSnapshot(pb.GetSnapshotRequest())
            if list(snapshot.away) == services:
                return
            await asyncio.sleep(0.02)
