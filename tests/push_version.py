"""`python push_version.py ADDRESS WORKERS MIB`: pushes a version to a gateway from where this runs,
once so many workers are there, and has it serve.
"""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import numpy as np
from integration.gateway.commands import commit, lease, until_serving

from paceline.config import SecurityConfig
from paceline.local.patience import patient
from paceline.rpc import channel, wait_healthy
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.tensors import from_numpy
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub
from paceline.weights import build_manifest, push_weights


async def main(address: str, workers: int, mebibytes: int) -> None:
    security = SecurityConfig(allow_insecure=True)
    async with channel(address, security) as peer:
        await wait_healthy(address, security, patient(60))
        config, stub = GatewayConfig(security=security), RolloutServiceStub(peer)
        served = SimpleNamespace(config=config, channel=peer, stub=stub)
        await until_serving(served, [(0, 0)] * workers, 60)
        numbers = np.full(mebibytes << 18, 0.5, dtype=np.float32)
        tensors = [from_numpy("model.norm.weight", numbers)]
        manifest = build_manifest(pb.WEIGHT_TARGET_POLICY, 1, tensors, lm_head_hash="0" * 16)
        await push_weights(peer, manifest, tensors, lease(served))
        await commit(served, VersionSet(1, 1, 0))
        await until_serving(served, [(1, 0)] * workers)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
