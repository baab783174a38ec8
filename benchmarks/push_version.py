"""`python -m benchmarks.push_version ADDRESS WORKERS BYTES`: pushes a version to a gateway from the
host where this runs, once so many workers are there. Prints what the push took as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from typing import Any

import numpy as np

from paceline.config import SecurityConfig
from paceline.errors import Unavailable
from paceline.local.patience import patient
from paceline.rpc import channel, leased, wait_healthy
from paceline.tensors import from_numpy
from paceline.v1 import engine_pb2, rollout_pb2
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub
from paceline.weights import build_manifest, push_weights

READY_S = 60.0
RUN_ID = "local"
"""Of a gateway that is started by itself."""


async def push(address: str, workers: int, size: int) -> dict[str, Any]:
    """The push's report. Raises Unavailable where the gateway serves without as many workers."""
    security = SecurityConfig(allow_insecure=True)
    await wait_healthy(address, security, patient(READY_S))
    async with channel(address, security) as peer:
        stub: Any = RolloutServiceStub(peer)
        status = await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=patient(5))
        if (there := sum(one.ready for one in status.workers)) != workers:
            raise Unavailable("engine workers are not there", seen=there, allowed=workers)
        tensors = [from_numpy("model.norm.weight", np.full(size // 4, 0.5, dtype=np.float32))]
        policy = engine_pb2.WEIGHT_TARGET_POLICY
        manifest = build_manifest(policy, 1, tensors, lm_head_hash="0" * 16)
        report = await push_weights(peer, manifest, tensors, leased(security, RUN_ID, 1, 1))
    return asdict(report)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(push(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
