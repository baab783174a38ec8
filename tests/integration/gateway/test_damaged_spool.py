"""A gateway whose spool is not what was written does not begin to serve it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import DataLoss
from paceline.tensors import from_numpy
from paceline.trajectory import VersionSet
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY
from paceline.weights import Spool, build_manifest


async def test_a_gateway_that_starts_over_a_damaged_policy_ends_with_the_files_name(
    serve_gateway: Callable[..., Any], tmp_path: Path
) -> None:
    numbers = np.arange(8, dtype=np.float32)
    manifest = build_manifest(WEIGHT_TARGET_POLICY, 1, [from_numpy("w", numbers)])
    spool = Spool(tmp_path / "damaged")
    file = spool.write(manifest, numbers.tobytes()) / "model.safetensors"
    spool.commit(VersionSet(1, 1, 0))
    async with serve_gateway(spool_dir=str(tmp_path / "damaged")):
        pass
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DataLoss, match=r"policy-1/model\.safetensors is damaged"):
        async with serve_gateway(spool_dir=str(tmp_path / "damaged")):
            pass
