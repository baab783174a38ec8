"""A run of the policy trainer for tests: Redis, weight receivers, and its process."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from redis.asyncio import Redis
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.processes import running
from paceline.config import SecurityConfig
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.rpc import EpochGuard, Server, channel, rpc_errors, wait_healthy
from paceline.rpc.progress import ask_progress
from paceline.streams import Ledger, connect, encode_trajectory
from paceline.training.checkpoints import checkpoint_numbers
from paceline.trajectory import BranchKey, Trajectory, VersionSet, VersionSpan
from paceline.v1 import policy_pb2 as pb
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY, WEIGHT_TARGET_POLICY_HEAD
from paceline.v1.policy_pb2_grpc import PolicyServiceStub
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.weights_pb2_grpc import add_WeightServiceServicer_to_server
from paceline.weights import (
    SERVICE_NAME,
    Spool,
    WeightServicer,
    commit_versions,
)

SECURITY = SecurityConfig()
GROUPS, SIBLINGS, VOCABULARY = 3, 4, 61


class NoHooks:
    """A receiver without workers."""

    async def on_prepared(self, target: int, version: int, path: Path) -> None: ...

    async def on_commit(
        self, versions: VersionSet, mode: int, leased: Collection[int], *, judge: bool | None = None
    ) -> None: ...

    async def on_abort(self, target: int, version: int) -> None: ...


def save_tiny_policy(directory: Path) -> None:
    """A policy of two layers without a tokenizer."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")


def made(run: str, step: int, version: int) -> list[Trajectory]:
    """The trajectories of a step, with random tokens and rewards that differ within every group."""
    draw = np.random.default_rng(step)
    trajectories = []
    for group in range(GROUPS):
        for sample in range(SIBLINGS):
            length = int(draw.integers(6, 24))
            trajectories.append(
                Trajectory(
                    key=BranchKey(run, f"s{step}-{group}-{sample}"),
                    step=step,
                    task_id=f"t{group}",
                    group_id=f"{step}.{group}",
                    group_size=SIBLINGS,
                    task_index=group,
                    sample_index=sample,
                    token_ids=tuple(int(i) for i in draw.integers(0, VOCABULARY, length)),
                    loss_mask=(0,) * 3 + (1,) * (length - 3),
                    behavior_logprobs=(0.0,) * 3 + (-4.0,) * (length - 3),
                    version_spans=(VersionSpan(3, length, version),),
                    reward=float(sample % 2),
                    seed=sample,
                    temperature=1.0,
                )
            )
    return trajectories


@dataclass
class World:
    """A run: the trainer and its peers."""

    run: str
    directory: Path
    model: Path
    client: Redis
    url: str
    spools: dict[str, Spool]
    receivers: dict[str, int]
    address: str
    process: asyncio.subprocess.Process | None = None
    news: int = 0  # end of a news pipe that the trainer inherits

    def settings(self, **overrides: object) -> list[str]:
        """Settings as words of the trainer's command line."""
        keys = {
            "run.id": self.run,
            "run.dir": self.directory,
            "redis.durable_url": self.url,
            "addresses.policy_trainer": self.address,
            "addresses.gateway": f"127.0.0.1:{self.receivers['gateway']}",
            "addresses.drafter_trainer": f"127.0.0.1:{self.receivers['drafter']}",
            "security.run_tokens": "false",
            "model": self.model,
            "ranks": 2,
            "optimizer.lr": 1e-3,
            "checkpoint_interval_steps": 2,
            **overrides,
        }
        return [f"{key}={value}" for key, value in keys.items()]

    async def spawn(self, **overrides: object) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "paceline.services.policy_trainer",
            *self.settings(**overrides),
            pass_fds=(self.news,) if self.news else (),
        )

    async def start(self, **overrides: object) -> None:
        self.process = await self.spawn(**overrides)
        await wait_healthy(self.address, SECURITY, patient(60))

    async def append(self, step: int, version: int) -> list[Trajectory]:
        ledger = Ledger(self.client, self.run)
        trajectories = made(self.run, step, version)
        for trajectory in reversed(trajectories):
            await ledger.append_final(trajectory, *encode_trajectory(trajectory))
        return trajectories

    async def step(
        self,
        step: int,
        version: int,
        *,
        epoch: int = 1,
        deadline_s: float = 20,
        sessions: int = SIBLINGS,
        left_out: bool = False,
    ) -> list[Any]:
        request = pb.TrainStepRequest(
            context=CommandContext(run_id=self.run, step=step, epoch=epoch),
            policy_version=version,
            groups=[
                pb.ExpectedGroup(group_id=f"{step}.{g}", size=sessions, left_out=left_out)
                for g in range(GROUPS)
            ],
            group_deadline_s=deadline_s,
        )
        async with channel(self.address, SECURITY) as peer:
            with rpc_errors():
                call = PolicyServiceStub(peer).TrainStep(request, timeout=patient(60))
                return [getattr(news, news.WhichOneof("event")) async for news in call]

    async def commit(self, version: int) -> None:
        """Serves a version at both receivers, as the coordinator does."""
        for port in self.receivers.values():
            async with channel(f"127.0.0.1:{port}", SECURITY) as peer:
                context = CommandContext(run_id=self.run, step=version - 1, epoch=1)
                await commit_versions(peer, context, VersionSet(seq=version, policy=version))

    async def counts(self) -> dict[str, int]:
        """The trainer's progress: its last RL step, and trained trajectories."""
        async with channel(self.address, SECURITY) as peer:
            return dict((await ask_progress(peer, patient(10))).parts[0].counts)

    def rank_pids(self) -> list[int]:
        """Process ids of the ranks, by rank."""
        ranks = running("paceline.services.policy_trainer.rank")
        assert ranks, "no rank runs"
        return [rank.pid for rank in ranks]

    def checkpoints(self) -> list[int]:
        """Versions of the whole checkpoints on disk."""
        return checkpoint_numbers(self.directory / "checkpoints" / "policy", "step-")

    async def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.returncode is None:
            children = running("paceline.services.policy_trainer.rank")
            self.process.send_signal(number)
            await asyncio.wait_for(self.process.wait(), patient(30))
            _, alive = psutil.wait_procs(children, timeout=patient(10))
            assert not alive, "ranks are left behind"

    def weights(self, version: int) -> dict[str, Any]:
        return load_file(self.spools["gateway"].path(1, version) / "model.safetensors")


async def receiver(spool: Spool, target: int, port: int = 0) -> tuple[Server, int]:
    """A real WeightService over a spool."""
    server = Server(f"127.0.0.1:{port}", SECURITY)
    servicer = WeightServicer(spool, EpochGuard(SecurityConfig()), NoHooks(), targets=(target,))
    server.add(add_WeightServiceServicer_to_server, servicer, SERVICE_NAME)
    return server, await server.start()


@asynccontextmanager
async def policy_world(directory: Path, model: Path, url: str, run_id: str) -> AsyncIterator[World]:
    """A run in this directory; its trainer is not started yet."""
    spools = {name: Spool(directory / name, keep=8) for name in ("gateway", "drafter")}
    targets = {"gateway": WEIGHT_TARGET_POLICY, "drafter": WEIGHT_TARGET_POLICY_HEAD}
    started = {name: await receiver(spool, targets[name]) for name, spool in spools.items()}
    client = connect(url)
    ports = {name: port for name, (_, port) in started.items()}
    made_world = World(
        run_id,
        directory / "run",
        model,
        client,
        url,
        spools,
        ports,
        f"127.0.0.1:{free_port()}",
    )
    try:
        yield made_world
    finally:
        await made_world.stop(signal.SIGKILL)
        for server, _ in started.values():
            await server.stop(0)
        await client.aclose()
