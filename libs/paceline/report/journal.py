"""Reads a finished run from its journal: records, evaluations, served sets, slot holders.

The journal is first copied from Redis to a file of the run, so a report can be made again without a
server.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from redis.asyncio import Redis

from paceline.errors import DataLoss
from paceline.messages import versions_from_proto
from paceline.report.slots import SlotInterval, StepWindow, slot_intervals, step_windows
from paceline.streams.journal_line import unpack_entry
from paceline.streams.journal_pages import journal_lines
from paceline.trajectory import VersionSet
from paceline.v1 import trajectory_pb2 as pb
from paceline.v1.coordinator_pb2 import StepRecord
from paceline.whole_files import write_whole

ACCURACY, PROBE = "accuracy", "accept_length_probe"
PASSED_AT = "pass@"
_RULINGS = 40
PAUSED = "paused"
"""Phase of a run that an operator has paused."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """A decision of the drafter's gate."""

    step: int  # of the decision
    decision: str
    drafter_version: int
    figures: Mapping[str, Any]  # fields of GateDecision, as in the journal


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The history of a run."""

    records: tuple[StepRecord, ...]  # by step
    # by kind, or by the statistic of an evaluation with several samples; values by number of
    # finished steps
    evaluations: Mapping[str, Mapping[int, float]]
    served: tuple[VersionSet, ...]  # in the order of their commits
    intervals: tuple[SlotInterval, ...]
    windows: tuple[StepWindow, ...]
    began_s: float  # wall clock of the first and the last entry
    ended_s: float
    away_s: float  # seconds without a coordinator before a resume, or in a pause
    drafter_tokens: int  # tokens that the drafter trained on
    phase: str  # of the last entry
    # seconds from a lease of the drafter to its first micro-batch
    first_steps_s: tuple[float, ...] = ()
    # of the drafter's gate, by kind of decision
    decisions: Mapping[str, int] = field(default_factory=dict)
    gate: tuple[Ruling, ...] = ()  # the newest decisions, in order
    beyond: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Paths named by the audit, in order, and the audit's figures of each; "step" is its time."""
    promoted: Mapping[int, Ruling] = field(default_factory=dict)
    """By drafter version, the decision that promoted it."""

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
    told, entries = _Told(), list(read_entries(path))
    for entry in entries:
        told.take(entry)
    if not told.began_s:
        raise DataLoss("the journal is empty: the run has not begun", seen=path)
    return RunHistory(
        tuple(told.records[step] for step in sorted(told.records)),
        told.evaluations,
        tuple(told.served),
        tuple(slot_intervals(entries)),
        tuple(step_windows(entries)),
        told.began_s,
        told.ended_s,
        told.away_s,
        told.drafter_tokens,
        told.phase,
        tuple(told.first_steps_s),
        dict(told.decisions),
        tuple(told.gate),
        told.beyond,
        told.promoted,
    )


@dataclass(slots=True)
class _Told:
    """State after the entries read so far; the fields are those of RunHistory."""

    records: dict[int, StepRecord] = field(default_factory=dict)  # by step
    evaluations: dict[str, dict[int, float]] = field(default_factory=dict)
    served: list[VersionSet] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    away_s: float = 0.0
    drafter_tokens: int = 0
    phase: str = ""
    first_steps_s: list[float] = field(default_factory=list)
    decisions: Counter[str] = field(default_factory=Counter)
    gate: deque[Ruling] = field(default_factory=lambda: deque(maxlen=_RULINGS))
    beyond: dict[str, dict[str, float]] = field(default_factory=dict)
    promoted: dict[int, Ruling] = field(default_factory=dict)
    _counted: set[str] = field(default_factory=set)  # repeatable items already counted

    def take(self, entry: Mapping[str, Any]) -> None:
        """Processes the next entry."""
        at_s, event, data = float(entry["at_s"]), entry["event"], entry.get("data", {})
        self.began_s = self.began_s or at_s
        if event == "Resumed" or self.phase == PAUSED:
            self.away_s += at_s - self.ended_s
        self.ended_s, self.phase = at_s, str(entry["phase"])
        if entry.get("record"):
            record = ParseDict(entry["record"], StepRecord(), ignore_unknown_fields=True)
            self.records[record.step] = record
        if event in ("RunStarted", "Committed"):
            versions = versions_from_proto(ParseDict(data["versions"], pb.VersionSet()))
            if self.served[-1:] != [versions]:
                self.served.append(versions)
        elif event == "EvaluationDone" and data.get("value") is not None:
            more = data.get("details", {}).get("figures") or {}
            for kind, value in {str(data["kind"]): data["value"], **more}.items():
                self._evaluated(int(entry["step"]), kind, float(value))
        elif event in ("Detached", "GatePromoted", "GateDecided"):
            self._count(event, data, int(entry["step"]))
        elif event == "PathsBeyondBound":
            for path in data["paths"]:
                figures = data.get("details", {}).get(path) or {}
                self.beyond.setdefault(path, {"step": int(entry["step"]), **figures})

    def _evaluated(self, steps: int, kind: str, value: float) -> None:
        self.evaluations.setdefault(kind, {})[steps] = value
        if steps - 1 in self.records:  # the step before the evaluation
            self.records[steps - 1].evaluations[kind] = value

    def _count(self, event: str, data: Mapping[str, Any], step: int) -> None:
        if (told := json.dumps([event, data])) in self._counted:
            return
        self._counted.add(told)
        if event == "Detached":
            details = data.get("details", {})
            self.drafter_tokens += int(details.get("tokens", 0))
            if seconds := float(details.get("first_step_s", 0.0)):  # 0 without a step
                self.first_steps_s.append(seconds)
        else:
            decision, details = str(data.get("decision", "promoted")), data.get("details", {})
            self.decisions[decision] += 1
            ruling = Ruling(step, decision, int(data.get("drafter_version", 0)), details)
            self.gate.append(ruling)
            if event == "GatePromoted":
                self.promoted[ruling.drafter_version] = ruling
