"""Reads a finished run from its journal: records, evaluations, served sets, slot holders.

The journal is first copied from Redis to a file of the run, so a report can be made again without a
server.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from redis.asyncio import Redis

from paceline.errors import DataLoss
from paceline.messages import versions_from_proto
from paceline.report.slots import SlotInterval, StepWindow, slot_intervals, step_windows
from paceline.streams.journal import journal_lines, unpack_entry
from paceline.trajectory import VersionSet
from paceline.v1 import trajectory_pb2 as pb
from paceline.v1.coordinator_pb2 import StepRecord
from paceline.whole_files import write_whole

ACCURACY, PROBE = "accuracy", "accept_length_probe"
PASSED_AT = "pass@"
_DECISIONS = 20
PAUSED = "paused"
"""Phase of a run that an operator has paused."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the drafter's gate."""

    step: int  # of the decision
    decision: str
    drafter_version: int
    figures: Mapping[str, Any]  # fields of GateDecision, as in the journal


@dataclass(slots=True)
class RunHistory:
    """The history of a run."""

    records: Sequence[StepRecord] = ()  # by step
    # by kind, or by the statistic of an evaluation with several samples; values by number of
    # finished steps
    evaluations: dict[str, dict[int, float]] = field(default_factory=dict)
    served: list[VersionSet] = field(default_factory=list)  # in the order of their commits
    intervals: Sequence[SlotInterval] = ()
    windows: Sequence[StepWindow] = ()
    began_s: float = 0.0  # wall clock of the first and the last entry
    ended_s: float = 0.0
    away_s: float = 0.0  # seconds without a coordinator before a resume, or in a pause
    drafter_tokens: int = 0  # tokens that the drafter trained on
    phase: str = ""  # of the last entry
    # seconds from a lease of the drafter to its first micro-batch
    first_steps_s: list[float] = field(default_factory=list)
    # of the drafter's gate, by kind of decision
    decisions: Counter[str] = field(default_factory=Counter)
    gate: deque[Decision] = field(default_factory=lambda: deque(maxlen=_DECISIONS))  # in order
    beyond: dict[str, dict[str, float]] = field(default_factory=dict)
    """Paths named by the audit, in order, and the audit's figures of each; "step" is its time."""

    @property
    def slots(self) -> int:
        """Number of slots."""
        return 1 + max((interval.slot for interval in self.intervals), default=-1)

    def evaluated(self, kind: str) -> list[tuple[int, float]]:
        """(finished steps, value) of one kind, in order; a repeated evaluation counts once."""
        return sorted(self.evaluations.get(kind, {}).items())

    @property
    def widest_pass(self) -> str:
        """The name of the evaluated pass@k with the largest k; empty without any."""
        return widest_pass(self.evaluations)


def widest_pass(names: Iterable[str]) -> str:
    """Among names of evaluations, pass@k with the largest k; empty without any."""
    return max((one for one in names if one.startswith(PASSED_AT)), key=_samples, default="")


def _samples(name: str) -> int:
    return int(name.removeprefix(PASSED_AT))


async def copy_journal(client: Redis, run_id: str, path: Path) -> int:
    """Writes the run's journal to `path`, one entry a line; returns the number of entries.

    Raises Unavailable, and DataLoss if the journal has a gap.
    """
    count = 0
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        async for line in journal_lines(client, run_id):
            file.write(line + b"\n")
            count += 1

    temporary.replace(path)
    return count


def write_steps(path: Path, records: Iterable[StepRecord]) -> None:
    """Writes the records of the finished steps, one JSON object a line, with the field names of
    coordinator.proto.
    """
    lines = (json.dumps(step_object(record)) + "\n" for record in records)
    write_whole(path, "".join(lines))


def step_object(record: StepRecord) -> dict[str, Any]:
    """A record as a JSON object."""
    return MessageToDict(record, preserving_proto_field_name=True)


def read_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Entries of a copied journal. Raises DataLoss for an invalid line."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield unpack_entry(line)
            except (ValueError, RecursionError) as error:
                raise DataLoss(
                    f"{path} line {number} is no journal entry", seen=line[:80]
                ) from error


def read_history(path: Path) -> RunHistory:
    """The run of a copied journal. Raises DataLoss when it has no entry or an undecodable one."""
    reader, entries = _Reader(), list(read_entries(path))
    for entry in entries:
        reader.take(entry)
    run = reader.run
    if not run.began_s:
        raise DataLoss("the journal is empty: the run has not begun", seen=path)
    run.records = [reader.records[step] for step in sorted(reader.records)]
    run.intervals, run.windows = slot_intervals(entries), step_windows(entries)
    return run


class _Reader:
    """Adds the entries of a journal to a history."""

    def __init__(self) -> None:
        self.run = RunHistory()
        self.records: dict[int, StepRecord] = {}  # by step
        self._counted: set[str] = set()  # repeatable items already counted

    def take(self, entry: Mapping[str, Any]) -> None:
        """Processes the next entry."""
        run = self.run
        at_s, event, data = float(entry["at_s"]), entry["event"], entry.get("data", {})
        run.began_s = run.began_s or at_s
        if event == "Resumed" or run.phase == PAUSED:
            run.away_s += at_s - run.ended_s
        run.ended_s, run.phase = at_s, str(entry["phase"])
        if entry.get("record"):
            record = ParseDict(entry["record"], StepRecord(), ignore_unknown_fields=True)
            self.records[record.step] = record
        if event in ("RunStarted", "Committed"):
            versions = versions_from_proto(ParseDict(data["versions"], pb.VersionSet()))
            if run.served[-1:] != [versions]:
                run.served.append(versions)
        elif event == "EvaluationDone" and data.get("value") is not None:
            more = data.get("details", {}).get("figures") or {}
            for kind, value in {str(data["kind"]): data["value"], **more}.items():
                self._evaluated(int(entry["step"]), kind, float(value))
        elif event in ("Detached", "GatePromoted", "GateDecided"):
            self._count(event, data, int(entry["step"]))
        elif event == "PathsBeyondBound":
            for path in data["paths"]:
                figures = data.get("details", {}).get(path) or {}
                run.beyond.setdefault(path, {"step": int(entry["step"]), **figures})

    def _evaluated(self, steps: int, kind: str, value: float) -> None:
        self.run.evaluations.setdefault(kind, {})[steps] = value
        if steps - 1 in self.records:  # the step before the evaluation
            self.records[steps - 1].evaluations[kind] = value

    def _count(self, event: str, data: Mapping[str, Any], step: int) -> None:
        if (text := json.dumps([event, data])) in self._counted:
            return
        self._counted.add(text)
        run = self.run
        if event == "Detached":
            details = data.get("details", {})
            run.drafter_tokens += int(details.get("tokens", 0))
            if seconds := float(details.get("first_step_s", 0.0)):  # 0 without a step
                run.first_steps_s.append(seconds)
        else:
            decision, details = str(data.get("decision", "promoted")), data.get("details", {})
            run.decisions[decision] += 1
            version = int(data.get("drafter_version", 0))
            run.gate.append(Decision(step, decision, version, details))
