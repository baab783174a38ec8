"""Reads a finished run from its journal: records, evaluations, served sets, slot holders.

The journal is first copied from Redis to a file of the run, so a report can be made again without a
server. An entry is plain JSON: `at_s` (wall clock, seconds), `event`, `step`, and under `slots` the
slots that the event changed: `[first, count, holder, epoch]`.
"""

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from redis.asyncio import Redis

from paceline.errors import DataLoss
from paceline.messages import versions_from_proto
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


Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SlotInterval:
    """One holder had one slot during [start_s, end_s)."""

    slot: int
    holder: str  # "engine", "policy", "drafter" or "none"
    start_s: float
    end_s: float
    epoch: int
    step: int

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The timed part of one step: from its StepBegan, or from the end of the previous step if that
    is later, to the entry that carries its `record`. Evaluations are outside all windows.
    """

    step: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class DrafterDecision:
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
    # In order.
    gate: deque[DrafterDecision] = field(default_factory=lambda: deque(maxlen=_DECISIONS))
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
    passed = (one for one in names if one.startswith(PASSED_AT))
    return max(passed, key=lambda one: int(one.removeprefix(PASSED_AT)), default="")


async def copy_journal(client: Redis, run_id: str, path: Path) -> int:
    """Writes the run's journal to `path`, one entry a line; returns the number of entries.

    Raises Unavailable, and DataLoss if the journal has a gap.
    """
    count, temporary = 0, path.with_suffix(".tmp")
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
                message = f"{path} line {number} is no journal entry"
                raise DataLoss(message, seen=line[:80]) from error


def read_history(path: Path) -> RunHistory:
    """The run of a copied journal. Raises DataLoss when it has no entry or an undecodable one."""
    entries, run = list(read_entries(path)), RunHistory()
    if not entries:
        raise DataLoss("the journal is empty: the run has not begun", seen=path)
    records: dict[int, StepRecord] = {}
    counted: set[str] = set()  # repeatable items already counted
    run.began_s = float(entries[0]["at_s"])
    for entry in entries:
        at_s, event, data = float(entry["at_s"]), entry["event"], entry.get("data", {})
        step = int(entry["step"])
        if event == "Resumed" or run.phase == PAUSED:
            run.away_s += at_s - run.ended_s
        run.ended_s, run.phase = at_s, str(entry["phase"])
        if entry.get("record"):
            record = ParseDict(entry["record"], StepRecord(), ignore_unknown_fields=True)
            records[record.step] = record
        if event == "EvaluationDone" and data.get("value") is not None:
            before = records.get(step - 1)
            more = data.get("details", {}).get("figures") or {}
            for kind, value in {str(data["kind"]): data["value"], **more}.items():
                run.evaluations.setdefault(kind, {})[step] = float(value)
                if before is not None:
                    before.evaluations[kind] = float(value)
        elif event in ("Detached", "GatePromoted", "GateDecided"):
            if (text := json.dumps([event, data])) not in counted:
                counted.add(text)
                _add_drafter_event(run, event, step, data)
        elif event in ("RunStarted", "Committed"):
            versions = versions_from_proto(ParseDict(data["versions"], pb.VersionSet()))
            if run.served[-1:] != [versions]:
                run.served.append(versions)
        elif event == "PathsBeyondBound":
            for name in data["paths"]:
                figures = data.get("details", {}).get(name) or {}
                run.beyond.setdefault(name, {"step": step, **figures})
    run.records = [records[number] for number in sorted(records)]
    run.intervals, run.windows = slot_intervals(entries), step_windows(entries)
    return run


def _add_drafter_event(run: RunHistory, event: str, step: int, data: Mapping[str, Any]) -> None:
    """Adds the end of a lease of the drafter, or a decision of its gate."""
    details = data.get("details", {})
    if event == "Detached":
        run.drafter_tokens += int(details.get("tokens", 0))
        if seconds := float(details.get("first_step_s", 0.0)):  # 0 without a step
            run.first_steps_s.append(seconds)
        return
    decision = str(data.get("decision", "promoted"))
    run.decisions[decision] += 1
    version = int(data.get("drafter_version", 0))
    run.gate.append(DrafterDecision(step, decision, version, details))


def slot_intervals(entries: Iterable[Entry]) -> list[SlotInterval]:
    """All intervals in the order of their ends; an open interval ends with the last entry."""
    intervals: list[SlotInterval] = []
    held: dict[int, SlotInterval] = {}
    now = 0.0
    for entry in entries:
        now = float(entry["at_s"])
        for first, count, holder, epoch in entry.get("slots", ()):
            for slot in range(first, first + count):
                before = held.get(slot)
                if before is not None:
                    intervals.append(replace(before, end_s=now))
                held[slot] = SlotInterval(slot, holder, now, now, epoch, int(entry["step"]))
    return intervals + [replace(held[slot], end_s=now) for slot in sorted(held)]


def step_windows(entries: Iterable[Entry]) -> list[StepWindow]:
    """Windows of the finished steps, in order."""
    began: dict[int, float] = {}
    windows: list[StepWindow] = []
    for entry in entries:
        if entry["event"] == "StepBegan":
            began.setdefault(int(entry["data"]["step"]), float(entry["at_s"]))
        if entry.get("record"):
            step = int(entry["record"].get("step", 0))
            start_s = max(began[step], windows[-1].end_s if windows else 0.0)
            windows.append(StepWindow(step, start_s, float(entry["at_s"])))
    return windows
