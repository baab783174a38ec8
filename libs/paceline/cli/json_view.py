"""Shows a run to programs: JSON lines on stdout, each an object with its `kind`."""

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
    """The content of RunView as JSON objects; `at` is wall-clock seconds."""

    def __init__(self, run_id: str, total_steps: int) -> None:
        self.state = RunState(run_id, total_steps, self._record, self._away)

    def begin(self, directory: Path, plan: Sequence[str]) -> None:
        """Prints the run's directory and plan."""
        tell("run", run_id=self.state.run_id, directory=str(directory), plan=list(plan))

    def started(self, config: ServiceConfig) -> None:
        """Prints the addresses once all services are healthy."""
        addresses = config.addresses
        tell("serving", http=addresses.http, coordinator=addresses.coordinator)

    def event(self, event: ChildEvent) -> None:
        """Prints an event of a process."""
        tell("process", name=event.name, event=event.kind, pid=event.pid, detail=event.detail)

    def line(self, text: str) -> None:
        """Prints a line of text."""
        tell("line", text=text)

    def say(self, text: str) -> None:
        """Prints a phase outside of the steps."""
        tell("phase", phase=text)

    def failed(self, message: str) -> None:
        """Prints the reason of a failed run."""
        tell("failed", message=message)

    def again(self, command: str) -> None:
        """Prints the command that continues the run."""
        tell("continue", command=command)

    def results(self, summary: Summary, files: RunFiles) -> None:
        """Prints the summary and the report's path."""
        tell("summary", summary=summary, report=str(files.report))

    def refresh(self) -> None:
        """Does nothing: JSON lines need no refresh."""

    def __enter__(self) -> JsonView:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def _record(self, record: StepRecord) -> None:
        tell("step", **step_object(record))

    def _away(self, services: Sequence[str]) -> None:
        tell("away", services=list(services))
