"""The worker process: its loop, its socket, its ring of hidden rows, and the file that configures
it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

SPEC_VARIABLE = "PACELINE_WORKER_SPEC"
"""Environment variable: path of the WorkerSpec file."""
SOCKET_VARIABLE = "PACELINE_WORKER_SOCKET"
"""Environment variable: ipc address for the worker's DEALER socket."""


class WorkerSpec(BaseModel):
    """Settings of one worker: engine, threads, cores and ring."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker_index: int  # in its gateway; determines cores and GPU
    kind: str  # see paceline.services.rollout_gateway.engines.find_engine
    threads: int = 1  # 0: as many as `cores`
    cores: tuple[int, ...] = ()  # empty: not pinned
    ring_path: str = ""  # empty: no capture
    engine: dict[str, Any] = Field(default_factory=dict)  # values of the engine's settings class

    def write(self, path: Path) -> None:
        """Store as JSON."""
        path.write_text(self.model_dump_json(), encoding="utf-8")

    @classmethod
    def read(cls) -> WorkerSpec:
        """Load what `write` stored, from the path in SPEC_VARIABLE."""
        return cls.model_validate_json(Path(os.environ[SPEC_VARIABLE]).read_text(encoding="utf-8"))
