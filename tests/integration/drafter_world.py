"""A running drafter trainer with its peers: Redis, a gateway-side weight receiver, rows of a real
policy.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from redis.asyncio import Redis
from safetensors.torch import load_file
from watched_stream import WatchedStream

from benchmarks.processes import running
from paceline.config import SecurityConfig
from paceline.local.patience import patient
from paceline.rpc import EpochGuard, Server, channel, rpc_errors, wait_healthy
from paceline.rpc.progress import ask_progress
from paceline.streams import FeatureBatch, encode_features, run_key
from paceline.tensors import from_numpy, head_hash
from paceline.trajectory import VersionSet
from paceline.v1 import drafter_pb2 as pb
from paceline.v1.drafter_pb2_grpc import DrafterServiceStub
from paceline.v1.engine_pb2 import WEIGHT_TARGET_DRAFTER
from paceline.v1.progress_pb2 import Part
from paceline.v1.trajectory_pb2 import CommandContext
from paceline.v1.trajectory_pb2 import VersionSet as VersionSetMessage
from paceline.v1.weights_pb2_grpc import add_WeightServiceServicer_to_server
from paceline.weights import SERVICE_NAME, Spool, WeightServicer

SECURITY = SecurityConfig()
POLICY = Path(__file__).parents[2] / "examples" / "demo" / "policy_start"


class Receiver:
    """The gateway's side of a push, which a test may delay."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.entered = asyncio.Event()

    async def on_prepared(self, target: int, version: int, path: Path) -> None:
        self.entered.set()
        await self.open.wait()

    async def on_commit(
        self, versions: VersionSet, mode: int, leased: Collection[int], *, judge: bool | None = None
    ) -> None: ...

    async def on_abort(self, target: int, version: int) -> None: ...


@dataclass
class World:
    """One run of the drafter trainer."""

    run: str
    directory: Path
    url: str
    client: Redis
    address: str
    spool: Spool
    receiver: Receiver
    gateway: str
    process: asyncio.subprocess.Process | None = None
    overrides: dict[str, object] = field(default_factory=dict)

    async def start(self, **overrides: object) -> None:
        keys = {
            "run.id": self.run,
            "run.dir": self.directory,
            "redis.durable_url": self.url,
            "addresses.drafter_trainer": self.address,
            "addresses.gateway": self.gateway,
            "security.run_tokens": "false",
            "model": POLICY,
            "optimizer.lr": 1e-2,
            "niceness": 0,  # other work runs beside the tests and has priority
            "buffer.judged_every": 4,
            **self.overrides,
            **overrides,
        }
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "paceline.services.drafter_trainer",
            *(f"{key}={value}" for key, value in keys.items()),
        )
        await wait_healthy(self.address, SECURITY, patient(60))

    async def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.returncode is None:
            children = running("paceline.services.drafter_trainer.rank")
            self.process.send_signal(number)
            await asyncio.wait_for(self.process.wait(), patient(30))
            _, alive = psutil.wait_procs(children, timeout=patient(10))
            assert not alive, "ranks are left behind"

    @property
    def stream(self) -> WatchedStream:
        return WatchedStream(self.client, run_key(self.run, "features"))

    async def append(self, batches: list[FeatureBatch]) -> None:
        for batch in batches:
            await self.stream.append(*encode_features(batch))

    def context(self, epoch: int, step: int = 0) -> CommandContext:
        return CommandContext(run_id=self.run, step=step, epoch=epoch)

    def activate(
        self,
        epoch: int,
        *,
        max_steps: int = 0,
        drafter: int = 0,
        policy: int = 0,
        slots: Sequence[int] = (0,),
        deadline_s: float = 30,
    ) -> AsyncIterator[pb.ActivateResponse]:
        """Yields news of an activation; the channel closes with the iterator."""
        request = pb.ActivateRequest(
            context=self.context(epoch),
            slots=slots,
            deadline_s=deadline_s,
            versions=VersionSetMessage(seq=drafter, policy=policy, drafter=drafter),
            max_steps=max_steps,
        )
        return self._activate(request)

    async def _activate(self, request: pb.ActivateRequest) -> AsyncIterator[pb.ActivateResponse]:
        async with channel(self.address, SECURITY) as peer:
            with rpc_errors():
                async for response in DrafterServiceStub(peer).Activate(
                    request, timeout=patient(120)
                ):
                    yield response

    async def call(self, name: str, request: Any) -> Any:
        async with channel(self.address, SECURITY) as peer:
            with rpc_errors():
                return await getattr(DrafterServiceStub(peer), name)(request, timeout=patient(30))

    async def preempt(self, epoch: int) -> pb.PreemptResponse:
        response: pb.PreemptResponse = await self.call(
            "Preempt", pb.PreemptRequest(context=self.context(epoch))
        )
        return response

    async def join(self, epoch: int, *slots: int) -> pb.JoinResponse:
        response: pb.JoinResponse = await self.call(
            "Join", pb.JoinRequest(context=self.context(epoch), slots=slots)
        )
        return response

    async def progress(self) -> Part:
        """The trainer's own part of its progress."""
        async with channel(self.address, SECURITY) as peer:
            return (await ask_progress(peer, patient(10))).parts[0]

    def rank_pids(self) -> list[int]:
        """Process ids of the ranks, by rank."""
        ranks = running("paceline.services.drafter_trainer.rank")
        assert ranks, "no rank runs"
        return [rank.pid for rank in ranks]

    def pushed(self, version: int) -> Path:
        """Spool directory of a drafter at the gateway."""
        return self.spool.path(WEIGHT_TARGET_DRAFTER, version)


async def serve_receiver(spool: Spool, receiver: Receiver) -> tuple[Server, int]:
    """A real WeightService as the gateway runs one."""
    server = Server("127.0.0.1:0", SECURITY)
    server.add(
        add_WeightServiceServicer_to_server,
        WeightServicer(spool, EpochGuard(SecurityConfig()), receiver),
        SERVICE_NAME,
    )
    return server, await server.start()


@torch.inference_mode()
def rows_of_policy(
    run: str, count: int, *, length: int = 48, seed: int = 0, prefix: str = "s"
) -> list[FeatureBatch]:
    """Rows as the engine captures them for `count` sampled sequences of the demo's start policy
    (computed with transformers).
    """
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    prompts = torch.randint(0, 40, (count, 6))
    tokens = model.generate(
        prompts,
        do_sample=True,
        max_new_tokens=length - 6,
        min_new_tokens=length - 6,
        pad_token_id=0,
    )
    hidden = model.model(tokens).last_hidden_state
    head = policy_head_hash()
    rows = length - 1
    return [
        FeatureBatch(
            run_id=run,
            step=0,
            session_id=f"{prefix}{i}",
            policy_version=0,
            lm_head_hash=head,
            hidden=from_numpy("hidden", hidden[i, :rows].numpy().copy()),
            token_ids=tokens[i].numpy().astype(np.int32),
            positions=np.arange(rows, dtype=np.int32),
            mask=(np.arange(rows) >= 6).astype(np.uint8),
            versions=np.zeros(rows, dtype=np.int64),
        )
        for i in range(count)
    ]


def policy_head_hash() -> str:
    """Hash of the start policy's head, as stored in the file."""
    tensors = load_file(POLICY / "model.safetensors")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).contiguous()
    return head_hash(head.view(torch.uint8).numpy().tobytes())
