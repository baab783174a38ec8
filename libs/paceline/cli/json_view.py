"""Shows a run to programs: a JSON object a line on standard output, each with its `kind`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.cli.command import tell
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
        tell("run", run_id=self.state.run_id, directory=str(directory), plan=list(plan))

    def started(self, config: ServiceConfig) -> None:
        """All services are healthy."""
        addresses = config.addresses
        tell("serving", http=addresses.http, coordinator=addresses.coordinator)

    def event(self, event: ChildEvent) -> None:
        """What happened to a process."""
        tell("process", name=event.name, event=event.kind, pid=event.pid, detail=event.detail)

    def line(self, text: str) -> None:
        """Something to be read."""
        tell("line", text=text)

    def say(self, text: str) -> None:
        """A phase outside the steps."""
        tell("phase", phase=text)

    def failed(self, message: str) -> None:
        """What made the run fail."""
        tell("failed", message=message)

    def again(self, command: str) -> None:
        """How to go on."""
        tell("continue", command=command)

    def results(self, summary: Summary, files: RunFiles) -> None:
        """What came out."""
        tell("summary", summary=summary, report=str(files.report))

    def refresh(self) -> None:
        """Nothing moves between lines."""

    def __enter__(self) -> JsonView:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def _record(self, record: StepRecord) -> None:
        tell("step", **step_object(record))

    def _away(self, services: Sequence[str]) -> None:
        tell("away", services=list(services))
