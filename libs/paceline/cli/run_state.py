"""What a terminal knows of a run, from its facts.

Owns the picture, not its drawing; everything in it is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.local.child import ChildEvent
from paceline.v1.coordinator_pb2 import Fact, GetSnapshotResponse, Holder, SlotStatus, StepRecord
from paceline.v1.trajectory_pb2 import VersionSet

STEPS_KEPT = 400
CHANGES_KEPT = 400
NOTES_KEPT = 4
ACCURACY, PROBE = "accuracy", "accept_length_probe"


@dataclass(frozen=True, slots=True)
class SlotChange:
    """A slot got a new holder."""

    at_s: float  # wall clock
    slot: int
    holder: str


@dataclass(slots=True)
class RunState:
    """Newest picture of one run."""

    run_id: str
    total_steps: int
    step: int = 0
    phase: str = "starting"
    versions: VersionSet = field(default_factory=VersionSet)
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    changes: deque[SlotChange] = field(default_factory=lambda: deque(maxlen=CHANGES_KEPT))
    holders: dict[int, str] = field(default_factory=dict)
    acceptance: dict[int, float] = field(
        default_factory=dict
    )  # drafter version -> newest live acceptance length
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=NOTES_KEPT))
    complete: int = 0  # steps known without a gap, from the first on
    services: dict[str, str] = field(default_factory=dict)  # name -> newest kind of event
    failure: str = ""
    finished: bool = False

    def take_fact(self, fact: Fact) -> StepRecord | None:
        """Take a fact in; returns the record when it ended a step that was not known yet."""
        self.step = max(self.step, fact.context.step)
        match fact.WhichOneof("fact"):
            case "step_began":
                self.phase, self.failure, self.finished = "rollout", "", False
            case "slot_changed":
                self._slot(fact.slot_changed.slot, fact.at_s)
            case "version_committed":
                self.versions = fact.version_committed.versions
            case "step_finished":
                return self.take_record(fact.step_finished.record)
            case "run_finished":
                self.finished, self.failure = True, fact.run_finished.failure
                self.phase = "failed" if self.failure else "finished"
        return None

    def take_snapshot(self, snapshot: GetSnapshotResponse, at_s: float) -> StepRecord | None:
        """Take the whole state in, after a gap; returns the last step's record when it was not
        known yet.
        """
        if snapshot.phase == "new":  # its coordinator has not read its settings yet
            return None
        self.step, self.total_steps, self.phase = (
            snapshot.step,
            snapshot.total_steps,
            snapshot.phase,
        )
        self.versions, self.failure = snapshot.versions, snapshot.failure
        for slot in snapshot.slots:
            self._slot(slot, at_s)
        return self.take_record(snapshot.last_step) if snapshot.last_step.step_s else None

    def take_event(self, event: ChildEvent) -> None:
        """Remember what happened to a process, when a reader should know."""
        self.services[event.name] = event.kind
        if event.kind in ("died", "restarted"):
            self.notes.append(
                f"{event.name} {event.kind}{f': {event.detail}' if event.detail else ''} (pid "
                f"{event.pid})"
            )

    def newest(self, evaluation: str) -> float | None:
        """Newest value of an evaluation, if any was made."""
        return next(
            (
                r.evaluations[evaluation]
                for r in reversed(self.records)
                if evaluation in r.evaluations
            ),
            None,
        )

    @property
    def arm_rounds(self) -> Mapping[str, int]:
        """Rounds by arm over the last 10 steps."""
        rounds: dict[str, int] = {}
        for record in list(self.records)[-10:]:
            for arm, count in record.arm_rounds.items():
                rounds[arm] = rounds.get(arm, 0) + count
        return rounds

    def take_record(self, record: StepRecord) -> StepRecord | None:
        """Take a finished step in; returns it when it was not known yet, None when it was only
        amended.
        """
        if record.accept_length:
            self.acceptance.pop(record.versions.drafter, None)
            self.acceptance[record.versions.drafter] = record.accept_length
            while len(self.acceptance) > 6:
                self.acceptance.pop(next(iter(self.acceptance)))
        known = [kept.step for kept in self.records]
        if record.step in known:
            self.records[known.index(record.step)] = record  # an evaluation was added
            return None
        if record.step < self.complete:
            return None
        self.records.append(record)
        if known and known[-1] > record.step:
            self.records = deque(
                sorted(self.records, key=lambda kept: kept.step), maxlen=STEPS_KEPT
            )
        while self.complete in (kept.step for kept in self.records):
            self.complete += 1
        return record

    def _slot(self, slot: SlotStatus, at_s: float) -> None:
        holder = Holder.Name(slot.holder).rsplit("_", 1)[-1].lower()
        if self.holders.get(slot.slot) != holder:
            self.holders[slot.slot] = holder
            self.changes.append(SlotChange(at_s, slot.slot, holder))
        if holder in ("policy", "drafter"):
            self.phase = {"policy": "policy step", "drafter": "rollout, drafter training"}[holder]


def step_line(record: StepRecord, total: int) -> str:
    """One finished step as one line of text."""
    versions = f"p{record.versions.policy}.d{record.versions.drafter}"
    rate = record.response_tokens / record.rollout_s if record.rollout_s else 0.0
    parts = [
        f"step {record.step + 1}/{total}",
        f"reward {record.reward_mean:.3f}",
        f"{rate:,.0f} tokens/s",
        f"acceptance {record.accept_length:.2f}" if record.accept_length else "no drafts",
        f"drafter steps {record.drafter_steps}",
        versions,
        f"{record.step_s:.2f} s",
    ]
    names = {ACCURACY: "held-out accuracy", PROBE: "probe"}
    parts += [
        f"{names.get(name, name)} {value:.3f}" for name, value in sorted(record.evaluations.items())
    ]
    return "  ".join(parts)
