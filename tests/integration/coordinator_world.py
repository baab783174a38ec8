"""Scripted peers around a real coordinator, and readers of a run's records."""

from __future__ import annotations

import asyncio
import io
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from slot_overlaps import held_seconds, overlaps

from paceline.cli.access import coordinator_of
from paceline.cli.active import show_status
from paceline.config import SecurityConfig
from paceline.config.load import load_config
from paceline.errors import (
    FailedPrecondition,
    InternalError,
    InvalidInput,
    ResourceExhausted,
    Unavailable,
    WeightsError,
)
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.report.journal import SlotInterval, StepWindow, slot_intervals, step_windows
from paceline.rpc import EpochGuard, Server, Track
from paceline.services.coordinator import config
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.server import serve
from paceline.streams import connect
from paceline.streams.journal import journal_lines, unpack_entry
from paceline.tasks import Task, write_tasks
from paceline.v1 import drafter_pb2, policy_pb2, rollout_pb2, weights_pb2
from paceline.v1.drafter_pb2_grpc import (
    DrafterServiceServicer,
    add_DrafterServiceServicer_to_server,
)
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY
from paceline.v1.policy_pb2_grpc import PolicyServiceServicer, add_PolicyServiceServicer_to_server
from paceline.v1.rollout_pb2_grpc import (
    RolloutServiceServicer,
    add_RolloutServiceServicer_to_server,
)
from paceline.v1.trajectory_pb2 import PURPOSE_TRAIN, Reward, SpeculationStats, VersionSet
from paceline.v1.weights_pb2_grpc import WeightServiceServicer, add_WeightServiceServicer_to_server

SECURITY = SecurityConfig()
WAIT_S = patient(20.0)


@dataclass
class Script:
    """Orders for the peers, and their observations."""

    workers: int = 2
    hold_step: int | None = None  # the rollouts of this step wait until `released`
    hold_round: str = ""  # only a round that has this text in the ids of its groups
    equal: frozenset[str] = frozenset()  # ids of groups with equal rewards for all samples
    left_out: list[tuple[int, list[str]]] = field(default_factory=list)  # as waited_for
    released: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    deaf_to_preempt: bool = False
    missed_preempts: int = 0  # requests that arrive while the trainer is stopped
    slow_to_attach: bool = False
    unscored: frozenset[tuple[int, int]] = frozenset()  # (task index, sample index) of every step
    unscored_ends: str = "stop"  # finish reason of the unscored samples
    open_sizes: tuple[int, ...] = ()  # sessions of the groups that agents bring to every step
    hold_policy_step: int | None = None  # the first training of this step never ends
    policy_failures: int = 0
    policy_ranks_lost: int = 0
    workers_lost: int = 0
    drafts: bool = True  # the engine has the probe's arm
    commits_failed: int = 0
    beyond: dict[int, list[str]] = field(default_factory=dict)  # named by the audit, by step
    quarantines: list[tuple[str, ...]] = field(default_factory=list)
    quarantines_failed: int = 0
    modes: list[int] = field(default_factory=list)  # of the commits
    spoiled: bool = False  # the gateway's spool, after the first commit
    policy_gone: bool = False  # after spoiling, once the trainer has trained on
    activated: asyncio.Event = field(default_factory=asyncio.Event)
    resumed: asyncio.Event = field(default_factory=asyncio.Event)  # workers that were lent
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    join_fails: bool = False
    preempted: asyncio.Event = field(default_factory=asyncio.Event)
    rollouts: list[rollout_pb2.RunTasksRequest] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    waited_for: list[tuple[int, dict[str, int]]] = field(
        default_factory=list
    )  # step and groups of each TrainStep
    epochs: list[tuple[str, int]] = field(default_factory=list)
    commits: list[tuple[int, int, int]] = field(default_factory=list)
    serving: dict[str, VersionSet] = field(default_factory=dict)
    lent: set[int] = field(default_factory=set)  # workers that have given their memory back
    order: list[str] = field(default_factory=list)  # calls to the peers, in order
    listening: int = 0  # number of open WatchTraffic calls
    traffic: asyncio.Queue[rollout_pb2.WatchTrafficResponse] = field(default_factory=asyncio.Queue)
    release_fails: int = 0  # once, when so many workers are requested
    bubbles: bool = True  # the second worker waits for the drafter on the first one's slot
    disaggregated: bool = False  # the policy trains on slots of its own
    push_waits: bool = False  # for the rollouts of the next step
    push_drafts: bool = False  # each push waits until the drafter trains once more
    rollout_waits: bool = False  # from the second step on, for the commit of the former step
    one_version: bool = False  # nothing is rolled out while a set is committed
    rolling_out: set[int] = field(default_factory=set)  # steps
    drawn_at: dict[int, int] = field(default_factory=dict)  # by step, policy that began to serve it
    evaluations: list[float] = field(default_factory=list)
    accept_lengths: list[dict[str, float]] = field(default_factory=list)  # of Activate requests
    trained_from: dict[int, int] = field(default_factory=dict)  # by step, policy before it
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until a condition on the peers holds."""
        async with self.news:
            await asyncio.wait_for(self.news.wait_for(holds), WAIT_S)

    async def told(self) -> None:
        """Wakes all waiting tasks."""
        async with self.news:
            self.news.notify_all()


class Gateway(RolloutServiceServicer):
    """The second worker waits for the drafter, as a straggler would make it; a third one until the
    slot of the second has joined it, or until the engine has both slots back after a refusal.
    """

    def __init__(self, script: Script, guard: EpochGuard) -> None:
        self.script, self.guard = script, guard

    async def GetStatus(self, request: Any, context: Any) -> Any:
        count = self.script.workers
        workers = [rollout_pb2.WorkerStatus(worker_index=i, ready=True) for i in range(count)]
        return rollout_pb2.GetStatusResponse(workers=workers)

    async def RunTasks(self, request: Any, context: Any) -> AsyncIterator[Any]:
        script, step = self.script, request.context.step
        self.guard.check(request.context, Track.ROLLOUTS)
        await context.send_initial_metadata(())
        assert not script.lent
        script.order.append("generate")
        script.rollouts.append(request)
        script.epochs.append(("gateway", request.context.epoch))
        if request.forced_arm and not script.drafts:
            raise InvalidInput("unknown arm", seen=request.forced_arm, allowed="off")
        if script.workers_lost and request.purpose == PURPOSE_TRAIN:
            script.workers_lost -= 1
            raise Unavailable("the worker died", reason="WORKER_LOST", seen=1)
        train = request.purpose == PURPOSE_TRAIN
        scored: dict[str, list[float]] = {}  # rewards of sessions by group
        if train:
            script.activated.clear()
            script.joined.clear()
            served = script.serving.get("gateway", VersionSet())
            script.drawn_at.setdefault(step, served.policy)
            script.rolling_out.add(step)
            await script.told()
        for place in range(script.workers):
            if train and place == 1:
                if script.bubbles:
                    await asyncio.wait_for(script.activated.wait(), WAIT_S)
                if script.rollout_waits:
                    await script.until(lambda: len(script.commits) >= step)
                if step == script.hold_step and script.hold_round in str(request.tasks):
                    script.holding.set()
                    await asyncio.wait_for(script.released.wait(), WAIT_S)
            if train and place == 2 and script.bubbles:
                news = script.resumed if script.join_fails else script.joined
                await asyncio.wait_for(news.wait(), WAIT_S)
            for sample in self._samples(request, place, script.workers):
                rewards = scored.setdefault(sample.group_id, [])
                rewards += [sample.reward.value] if sample.HasField("reward") else []
                yield rollout_pb2.RunTasksResponse(sample=sample)
            yield rollout_pb2.RunTasksResponse(share=rollout_pb2.ShareDone(worker_index=place))
        count = sum(map(len, scored.values()))
        tokens = 25 if train else 30
        stats = SpeculationStats(
            drafted_rounds=10,
            drafted_round_tokens=tokens,
            arm_drafted_rounds={"eagle:3_1_4": 10},
            arm_round_tokens={"eagle:3_1_4": tokens},
        )
        finished = rollout_pb2.TasksFinished(
            scored=count, response_tokens=7 * count, rollout_s=0.1, speculation=stats
        )
        if train:
            finished.versions.CopyFrom(script.serving.get("gateway", VersionSet()))
            finished.arms.add(arm="ngram:4_1_5", batch_group=1, pulls=9, mean_tokens_per_s=5.0)
        for group in sorted(scored) if train else ():
            finished.closed_groups.add(
                group_id=group,
                scored_sessions=len(scored[group]),
                equal_rewards=len(set(scored[group])) < 2,
            )
        script.rolling_out.discard(step)
        yield rollout_pb2.RunTasksResponse(finished=finished)

    async def Quarantine(self, request: Any, context: Any) -> Any:
        self.guard.check(request.context, Track.LEARNER)
        self.script.order.append("quarantine")
        await self.script.told()
        if self.script.quarantines_failed:
            self.script.quarantines_failed -= 1
            raise ResourceExhausted("not now")
        self.script.quarantines.append(tuple(request.paths))
        return rollout_pb2.QuarantineResponse(unmet=[p for p in request.paths if p == "plain"])

    async def ReleaseWorkers(self, request: Any, context: Any) -> Any:
        if self.script.release_fails == len(request.workers):
            self.script.release_fails = 0
            self.script.activated.set()  # no drafter will be activated
            raise ResourceExhausted("lent.json cannot be written")
        self.script.lent.update(request.workers)
        self.script.order.append(f"release {list(request.workers)}")
        freed = dict.fromkeys(request.workers, 100)
        return rollout_pb2.ReleaseWorkersResponse(released_bytes=freed)

    async def ResumeWorkers(self, request: Any, context: Any) -> Any:
        back = sorted(self.script.lent)
        self.script.lent.clear()
        self.script.order.append(f"resume {back}")
        await self.script.told()
        if back:
            self.script.resumed.set()
        served = self.script.serving.get("gateway")
        return rollout_pb2.ResumeWorkersResponse(workers=back, versions=served)

    async def WatchTraffic(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.script.listening += 1
        try:
            while True:
                yield await self.script.traffic.get()
        finally:
            self.script.listening -= 1

    def _samples(self, request: Any, share: int, shares: int) -> Iterator[Any]:
        """The share's samples: of its tasks, or of the groups that agents have brought."""
        script, step = self.script, request.context.step
        for task in request.tasks[share::shares]:
            for index in range(request.samples_per_task):
                train = request.purpose == PURPOSE_TRAIN
                sample = _sample(
                    task, index, scored=not (train and (task.task_index, index) in script.unscored)
                )
                if not sample.HasField("reward"):
                    sample.finish_reason = f"FINISH_REASON_{script.unscored_ends.upper()}"
                if task.group_id in script.equal:
                    sample.reward.value = 0.0
                yield sample
        for group, size in list(enumerate(script.open_sizes))[: request.open_groups][share::shares]:
            task = rollout_pb2.TaskSpec(task_id="own", group_id=f"agent-{step}-{group}")
            for index in range(size):
                yield _sample(task, 0, session_id=f"{group}-{index}")


def _sample(task: Any, sample: int, *, scored: bool = True, session_id: str = "") -> Any:
    return rollout_pb2.SampleFinished(
        task_id=task.task_id,
        group_id=task.group_id,
        sample_index=sample,
        session_id=session_id,
        reward=Reward(value=float(sample % 2)) if scored else None,
        response_tokens=7,
        smallest_gap=1.0,
        tokens_hash=f"{task.task_index:08d}{sample:08d}",
    )


class Weights(WeightServiceServicer):
    """Serves every committed set, also after a restart; refuses old epochs."""

    def __init__(self, script: Script, guard: EpochGuard, name: str) -> None:
        self.script, self.guard, self.name = script, guard, name
        self.damaged: list[int] = []

    async def Commit(self, request: Any, context: Any) -> Any:
        self.guard.check(request.context, Track.LEARNER)
        if self.name == "gateway" and self.script.commits_failed:
            self.script.commits_failed -= 1
            raise WeightsError(
                "drafter version is not prepared", seen=request.versions.drafter, allowed=[0]
            )
        assert not (self.script.one_version and self.script.rolling_out)
        if self.name == "gateway":
            self.script.modes.append(request.mode)
        self.script.serving[self.name] = request.versions
        if self.name == "gateway":
            if self.script.spoiled and not self.script.commits:
                del self.script.serving[self.name]
                self.damaged = [1, 2]
            elif self.script.spoiled and len(self.script.commits) == 1:
                assert self.script.trained == [0, 0], "the policy is pushed before it serves"
                self.damaged = []
            self.script.commits.append(
                (request.versions.seq, request.versions.policy, request.versions.drafter)
            )
            await self.script.told()
        return weights_pb2.CommitResponse(versions=request.versions)

    async def Abort(self, request: Any, context: Any) -> Any:
        return weights_pb2.AbortResponse()

    async def GetVersions(self, request: Any, context: Any) -> Any:
        serving, damaged = self.script.serving.get(self.name), self.damaged
        if self.name == "gateway" and self.script.policy_gone and len(self.script.commits) == 1:
            await self.script.until(lambda: 1 in self.script.trained_from)
            damaged = [WEIGHT_TARGET_POLICY]
        return weights_pb2.GetVersionsResponse(versions=serving, damaged=damaged)


class Policy(PolicyServiceServicer):
    """Trains at once."""

    def __init__(self, script: Script) -> None:
        self.script, self.guard = script, EpochGuard(SecurityConfig())

    async def TrainStep(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.guard.check(request.context, Track.LEARNER)
        step, workers = request.context.step, set(range(self.script.workers))
        if request.policy_version < max(self.script.trained_from.values(), default=0):
            raise WeightsError("the trainer has trained on", reason="STEP_ORDER", seen=step)
        assert self.script.disaggregated or self.script.lent == workers
        self.script.order.append("train")
        self.script.waited_for.append(
            (step, {group.group_id: group.size for group in request.groups})
        )
        left_out = [group.group_id for group in request.groups if group.left_out]
        self.script.left_out.append((step, left_out))
        if step == self.script.hold_policy_step:
            self.script.hold_policy_step = None
            self.script.holding.set()
            await asyncio.sleep(WAIT_S)
        if self.script.policy_failures:
            self.script.policy_failures -= 1
            raise InternalError("the loss is not finite", seen="nan")
        if self.script.policy_ranks_lost:
            self.script.policy_ranks_lost -= 1
            raise Unavailable("rank 1 died", reason="RANK_LOST")
        self.script.trained.append(request.context.step)
        version = request.policy_version + 1
        batch = policy_pb2.BatchReady(trajectories=4, tokens=40, staleness={"0": 3, "1": 1})
        yield policy_pb2.TrainStepResponse(batch=batch)
        stepped = policy_pb2.PolicyStepped(
            policy_version=version, figures={"loss": 0.5}, reward_mean=0.25, world_size=2
        )
        for path in self.script.beyond.get(step, []):
            stepped.beyond.add(path=path, tokens=300, mean=0.5, upper=2.0, mean_bound=1e-3)
        self.script.trained_from[step] = request.policy_version
        asked = self.script.order.count("quarantine")
        await self.script.told()
        yield policy_pb2.TrainStepResponse(stepped=stepped)
        if stepped.beyond:  # a push takes longer than the call that follows the audit's finding
            await self.script.until(lambda: self.script.order.count("quarantine") > asked)
        if self.script.push_waits:
            await self.script.until(lambda: step + 1 in self.script.drawn_at)
        if self.script.push_drafts:
            drafts = self.script.order.count("train") * 2
            await self.script.until(lambda: self.script.order.count("draft") == drafts)
        yield policy_pb2.TrainStepResponse(
            prepared=policy_pb2.PolicyPrepared(policy_version=version, bytes=1)
        )

    async def SavePolicyCheckpoint(self, request: Any, context: Any) -> Any:
        if request.HasField("evaluation"):
            self.script.evaluations.append(request.evaluation)
        return policy_pb2.SavePolicyCheckpointResponse(path="policy", policy_version=1)


class Drafter(DrafterServiceServicer):
    """Promotes a candidate in every activation and trains until it is preempted."""

    def __init__(self, script: Script, guard: EpochGuard) -> None:
        self.script, self.guard = script, guard
        self.versions = 0

    async def Activate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.guard.check(request.context, Track.DRAFTER)
        script = self.script
        script.epochs.append(("drafter", request.context.epoch))
        assert set(request.slots) <= script.lent
        script.order.append("draft")
        script.accept_lengths.append(dict(request.accept_lengths))
        preempted = script.preempted = asyncio.Event()
        self.versions += 1
        if script.slow_to_attach:
            script.activated.set()
            await asyncio.sleep(WAIT_S)
        yield drafter_pb2.ActivateResponse(
            activated=drafter_pb2.Activated(attach_s=0.01, world_size=1)
        )
        gate = drafter_pb2.GateDecision(drafter_version=self.versions, promoted=True)
        yield drafter_pb2.ActivateResponse(gate=gate)
        script.activated.set()
        await script.told()
        await asyncio.wait_for(preempted.wait(), WAIT_S)
        yield drafter_pb2.ActivateResponse(
            detached=drafter_pb2.Detached(reason="preempted", steps=2, tokens=64)
        )

    async def Join(self, request: Any, context: Any) -> Any:
        self.guard.check(request.context, Track.DRAFTER)
        script = self.script
        assert set(request.slots) <= script.lent
        script.order.append(f"join {list(request.slots)}")
        script.joined.set()
        if script.join_fails:
            raise FailedPrecondition("no activation of this lease trains")
        return drafter_pb2.JoinResponse(join_s=0.01, world_size=len(request.slots))

    async def Preempt(self, request: Any, context: Any) -> Any:
        self.script.missed_preempts -= 1
        if self.script.deaf_to_preempt or self.script.missed_preempts >= 0:
            await asyncio.sleep(WAIT_S)
        self.script.preempted.set()
        return drafter_pb2.PreemptResponse(stopped_after_s=0.01, was_active=True)

    async def SaveDrafterCheckpoint(self, request: Any, context: Any) -> Any:
        return drafter_pb2.SaveDrafterCheckpointResponse(path="drafter")


@dataclass
class Peers:
    """Three servers that a test can stop and restart on the same ports."""

    script: Script
    ports: dict[str, int]
    security: SecurityConfig = SECURITY
    servers: dict[str, Server] = field(default_factory=dict)
    guards: dict[str, EpochGuard] = field(
        default_factory=lambda: {
            "gateway": EpochGuard(SecurityConfig()),
            "drafter": EpochGuard(SecurityConfig()),
        }
    )
    drafter: Drafter | None = None

    async def start(self, name: str) -> None:
        server = Server(f"127.0.0.1:{self.ports[name]}", self.security)
        if name == "policy_trainer":
            server.add(
                add_PolicyServiceServicer_to_server,
                Policy(self.script),
                "paceline.v1.PolicyService",
            )
        else:
            kind = "gateway" if name == "gateway" else "drafter"
            guard = self.guards[kind]
            weights = Weights(self.script, guard, kind)
            server.add(add_WeightServiceServicer_to_server, weights, "paceline.v1.WeightService")
            if name == "gateway":
                gateway = Gateway(self.script, guard)
                server.add(
                    add_RolloutServiceServicer_to_server, gateway, "paceline.v1.RolloutService"
                )
            else:
                drafter = Drafter(self.script, guard)
                server.add(
                    add_DrafterServiceServicer_to_server, drafter, "paceline.v1.DrafterService"
                )
        await server.start()
        self.servers[name] = server


@asynccontextmanager
async def running_peers(
    script: Script, security: SecurityConfig = SECURITY
) -> AsyncIterator[Peers]:
    """The drafter trains during a push only with `push_drafts`. Other pushes take no time, so that
    training would depend on chance.
    """
    names = ("gateway", "policy_trainer", "drafter_trainer")
    peers = Peers(script, {name: free_port() for name in names}, security)
    for name in peers.ports:
        await peers.start(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "TRAIN_DURING_PUSH", script.push_drafts)
        try:
            yield peers
        finally:
            for server in peers.servers.values():
                await server.stop(0)


def overrides(peers: Peers, redis_url: str, directory: Path, **more: object) -> list[str]:
    """Settings of a three-step run on two slots."""
    tasks = [Task(f"t{i}", f"{i}+1=", str(i + 1)) for i in range(4)]
    write_tasks(directory / "train.jsonl", tasks)
    write_tasks(directory / "heldout.jsonl", tasks[:2])
    values: dict[str, object] = {
        "run.id": f"t-{uuid.uuid4().hex[:12]}",
        "run.dir": directory,
        "redis.durable_url": redis_url,
        **{f"addresses.{name}": f"127.0.0.1:{port}" for name, port in peers.ports.items()},
        "addresses.coordinator": f"127.0.0.1:{free_port()}",
        "addresses.events": f"tcp://127.0.0.1:{free_port()}",
        "steps": 3,
        "tasks_path": directory / "train.jsonl",
        "heldout_path": directory / "heldout.jsonl",
        "prompts_per_step": 2,
        "samples_per_task": 2,
        "training_interval_steps": 1,
        **more,
    }
    return [f"{key}={value}" for key, value in values.items()]


def config_of(words: list[str]) -> CoordinatorConfig:
    return load_config(CoordinatorConfig, "coordinator", [], words)


async def run_to_end(config: CoordinatorConfig) -> None:
    await asyncio.wait_for(serve(config, asyncio.Event()), 2 * WAIT_S)


PROCESS = """
from paceline.local.entry import run_service
from paceline.services.coordinator import config
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.server import serve

config.TRAIN_DURING_PUSH = False
CoordinatorConfig.snapshot_entries = {snapshot_entries}
run_service("coordinator", CoordinatorConfig, serve)
"""


async def process_of(words: list[str], snapshot_entries: int) -> asyncio.subprocess.Process:
    """A coordinator in a separate process."""
    code = PROCESS.format(snapshot_entries=snapshot_entries)
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code, *words)


async def held(script: Script, config: CoordinatorConfig) -> asyncio.Task[None]:
    """A run with rollouts that wait in the step that the script holds."""
    run = asyncio.create_task(run_to_end(config))
    await asyncio.wait_for(script.holding.wait(), WAIT_S)
    return run


async def status_of(config: CoordinatorConfig) -> str:
    """Output of `paceline status`."""
    told = io.StringIO()
    address = config.addresses.coordinator
    await show_status(coordinator_of([], address), Console(file=told, width=200))
    return told.getvalue()


async def journal_of(config: CoordinatorConfig) -> list[dict[str, Any]]:
    client = connect(config.redis.durable_url)
    entries = [unpack_entry(line) async for line in journal_lines(client, config.run.id)]
    await client.aclose()
    return entries


def check_slots(entries: list[dict[str, Any]], slots: int = 2) -> float:
    """Asserts that slots never overlap and the drafter runs only inside rollouts.

    Returns the drafter's slot-seconds.
    """
    intervals, windows = slot_intervals(entries), step_windows(entries)
    assert overlaps(intervals) == []
    policy = [(one.start_s, one.end_s) for one in intervals if one.holder == "policy"]
    for lease in (one for one in intervals if one.holder == "drafter"):
        assert all(end <= lease.start_s or start >= lease.end_s for start, end in policy)
    holders = ("none", "engine", "policy", "drafter")
    held_s = sum(held_seconds(intervals, holder, windows) for holder in holders)
    check_uses(entries, intervals, windows, slots)
    assert held_s == pytest.approx(slots * sum(window.seconds for window in windows))
    return sum(one.seconds for one in intervals if one.holder == "drafter")


def check_uses(
    entries: list[dict[str, Any]],
    intervals: list[SlotInterval],
    windows: list[StepWindow],
    slots: int,
) -> None:
    """Every record accounts for all slots at all times, and agrees with the slots' holders."""
    for record, window in zip(records_of(entries), windows, strict=True):
        used = record["slot_s"]
        assert sum(used.values()) == pytest.approx(slots * (window.end_s - window.start_s))
        assert sum(record.get("idle_s", {}).values()) == pytest.approx(used["idle"])
        held = {
            holder: held_seconds(intervals, holder, [window])
            for holder in ("engine", "policy", "drafter")
        }
        assert used["generating"] == pytest.approx(held["engine"])
        assert used["policy"] <= held["policy"] + 1e-6  # workers free memory first
        assert used["policy"] + used["transferring"] >= held["policy"] - 1e-6
        assert used["drafter"] <= held["drafter"] + 1e-6
        assert used["transferring"] > 0


def records_of(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry["record"] for entry in entries if "record" in entry]
