"""Reads a finished run from its journal: records, evaluations, sets served, slots held.

The journal is copied from Redis to a file of the run first, so that a report can be made again
without any server.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from redis.asyncio import Redis

from paceline.errors import DataLoss
from paceline.report.slots import SlotInterval, StepWindow, slot_intervals, step_windows
from paceline.streams.journal_line import unpack_entry
from paceline.streams.journal_pages import journal_lines
from paceline.trajectory import VersionSet
from paceline.v1.coordinator_pb2 import StepRecord
from paceline.whole_files import write_whole

ACCURACY, PROBE = "accuracy", "accept_length_probe"


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What happened in a run."""

    records: tuple[StepRecord, ...]  # by step
    evaluations: Mapping[str, Mapping[int, float]]  # by kind; values by number of finished steps
    served: tuple[VersionSet, ...]  # in the order in which they began to serve
    intervals: tuple[SlotInterval, ...]
    windows: tuple[StepWindow, ...]
    began_s: float  # wall clock of the first and the last entry
    ended_s: float
    away_s: float  # seconds in which no coordinator ran, before a resume
    drafter_tokens: int  # tokens the drafter trained on
    phase: str  # of the last entry
    # of the drafter's gate, by kind of decision
    decisions: Mapping[str, int] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return 1 + max((interval.slot for interval in self.intervals), default=-1)

    def evaluated(self, kind: str) -> list[tuple[int, float]]:
        """(finished steps, value) of one kind, in order; a repeated one counts once."""
        return sorted(self.evaluations.get(kind, {}).items())


async def copy_journal(client: Redis, run_id: str, path: Path) -> int:
    """Write the run's journal to `path`, an entry a line; returns the number of entries.

    Raises Unavailable, and DataLoss where the journal has a gap.
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
    """Write the records of the finished steps, one JSON object a line, fields named as in
    coordinator.proto.
    """
    plain = (MessageToDict(record, preserving_proto_field_name=True) for record in records)
    write_whole(path, "".join(json.dumps(record) + "\n" for record in plain))


def read_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Entries of a copied journal. Raises DataLoss for a line that is none."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield unpack_entry(line)
            except (ValueError, RecursionError) as error:
                raise DataLoss(
                    f"{path} line {number} is no journal entry", seen=line[:80]
                ) from error


def read_history(path: Path) -> RunHistory:
    """The run of a copied journal. Raises DataLoss when it has no entry or one does not decode."""
    records: dict[int, StepRecord] = {}
    evaluations: dict[str, dict[int, float]] = {}
    served: list[VersionSet] = []
    began_s = ended_s = away_s = 0.0
    tokens, phase = 0, ""
    decisions: Counter[str] = Counter()
    counted: set[str] = set()
    entries = list(read_entries(path))
    for entry in entries:
        at_s, event, data = float(entry["at_s"]), entry["event"], entry.get("data", {})
        began_s = began_s or at_s
        if event == "Resumed":
            away_s += at_s - ended_s
        ended_s, phase = at_s, str(entry["phase"])
        if entry.get("record"):
            record = ParseDict(entry["record"], StepRecord(), ignore_unknown_fields=True)
            records[record.step] = record
        if event in ("RunStarted", "Committed"):
            versions = VersionSet(**{name: int(n) for name, n in data["versions"].items()})
            if served[-1:] != [versions]:
                served.append(versions)
        elif event == "EvaluationDone" and data.get("value") is not None:
            steps, kind, value = int(entry["step"]), str(data["kind"]), float(data["value"])
            evaluations.setdefault(kind, {})[steps] = value
            if steps - 1 in records:  # the step it was made after
                records[steps - 1].evaluations[kind] = value
        elif event in ("Detached", "GatePromoted", "GateDecided"):
            if (told := json.dumps([event, data])) in counted:
                continue  # it came twice
            counted.add(told)
            if event == "Detached":
                tokens += int(data.get("details", {}).get("tokens", 0))
            else:
                decisions[str(data.get("decision", "promoted"))] += 1

    if not began_s:
        raise DataLoss("the journal is empty: the run has not begun", seen=path)
    return RunHistory(
        tuple(records[step] for step in sorted(records)),
        evaluations,
        tuple(served),
        tuple(slot_intervals(entries)),
        tuple(step_windows(entries)),
        began_s,
        ended_s,
        away_s,
        tokens,
        phase,
        dict(decisions),
    )
