"""Shows a run to programs: a JSON object a line on standard output, each with its `kind`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cli.run_files import RunFiles
from paceline.cli.watch import RunState
from paceline.config import ServiceConfig
from paceline.local.launch import ChildEvent
from paceline.report.journal import step_object
from paceline.report.summary import Summary
from paceline.v1.coordinator_pb2 import StepRecord


class JsonView:
    """What RunView shows, as objects; `at` is wall-clock seconds."""

    def __init__(self, run_id: str, total_steps: int) -> None:
        self.state = RunState(run_id, total_steps, self._record, self._away)

    def begin(self, directory: Path, plan: Sequence[str]) -> None:
        """Where the run lives, and what it gets."""
        _write("run", run_id=self.state.run_id, directory=str(directory), plan=list(plan))

    def started(self, config: ServiceConfig) -> None:
        """All services are healthy."""
        addresses = config.addresses
        _write("serving", http=addresses.http, coordinator=addresses.coordinator)

    def event(self, event: ChildEvent) -> None:
        """What happened to a process."""
        _write("process", name=event.name, event=event.kind, pid=event.pid, detail=event.detail)

    def line(self, text: str) -> None:
        """Something to be read."""
        _write("line", text=text)

    def say(self, text: str) -> None:
        """A phase outside the steps."""
        _write("phase", phase=text)

    def failed(self, message: str) -> None:
        """What made the run fail."""
        _write("failed", message=message)

    def again(self, command: str) -> None:
        """How to go on."""
        _write("continue", command=command)

    def results(self, summary: Summary, files: RunFiles) -> None:
        """What came out."""
        _write("summary", summary=summary, report=str(files.report))

    def refresh(self) -> None:
        """Nothing moves between lines."""

    def __enter__(self) -> JsonView:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def _record(self, record: StepRecord) -> None:
        _write("step", **step_object(record))

    def _away(self, services: Sequence[str]) -> None:
        _write("away", services=list(services))


def _write(kind: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"kind": kind, "at": time.time(), **facts}) + "\n")
    sys.stdout.flush()
