"""Applies events: the machine decides, the journal stores the entries, and subscribers receive
facts.
"""

from collections.abc import Awaitable, Callable, Sequence

from paceline.errors import DataLoss, InternalError
from paceline.services.coordinator.journal.entry import JournalEntry, Transition, changed_slots
from paceline.services.coordinator.journal.groups import ClosedGroups
from paceline.services.coordinator.journal.journal import Journal, Snapshot
from paceline.services.coordinator.journal.records import StepRecords
from paceline.services.coordinator.machine.events import Event, StepBegan, TasksFinished
from paceline.services.coordinator.machine.rollout import draw_of
from paceline.services.coordinator.machine.state import MachineError, State
from paceline.services.coordinator.machine.step import step
from paceline.telemetry import get_logger
from paceline.v1.coordinator_pb2 import StepRecord


class AcceptanceWatch:
    """Compares the first step of a new drafter with the last step of its predecessor.

    A longer window would be too late: receivers keep only the serving and the previous set, so the
    next commit is the last that can restore the predecessor. The gate has already compared the
    candidate on held-out rows; this check detects a bad swap only.
    """

    def __init__(self, drop: float) -> None:
        """`drop`: permitted loss of acceptance length, tokens; 0 disables the watch."""
        self._drop = drop
        self.last: tuple[int, float] | None = None  # drafter version, its newest length

    def observe(self, before: State, event: Event) -> dict[str, float] | None:
        """Processes one transition. Returns a fall's figures once per change of
        drafter, else None.
        """
        if not isinstance(event, TasksFinished) or draw_of(before, event.epoch) is None:
            return None
        tokens = event.details.get("trained_round_tokens")
        rounds = event.details.get("trained_rounds")
        if not isinstance(tokens, int) or not isinstance(rounds, int) or not rounds:
            return None
        now, last, drafter = tokens / rounds, self.last, before.versions.drafter
        self.last = drafter, now
        if last is None or last[0] == drafter:
            return None
        fell = self._drop > 0 and last[1] - now > self._drop
        return {"before": last[1], "now": now, "drop": self._drop} if fell else None


Publish = Callable[..., Awaitable[object]]
"""Sends the given facts as one message."""


class Transitions:
    """The state of one run with its records, groups and traces; live runs and replays build the
    same.
    """

    def __init__(
        self,
        run_id: str,
        samples: int,
        rollback_drop: float,
        snapshot_entries: int,
        journal: Journal,
        publish: Publish,
    ) -> None:
        """`samples`: requested samples per step; `rollback_drop` and `snapshot_entries`: as in the
        configuration.
        """
        self.state = State()
        self.records = StepRecords()
        self.groups = ClosedGroups()
        self.at_s = 0.0  # of the newest event
        self.traceparents: dict[int, str] = {}  # of the begun steps and the last step
        self._run_id = run_id
        self._samples = samples
        self._snapshot_entries = snapshot_entries
        self._journal = journal
        self._publish = publish
        self._watch = AcceptanceWatch(rollback_drop)
        self._due: Snapshot | None = None
        self._log = get_logger("coordinator")

    async def replay(self) -> None:
        """Applies the journal's events once, starting after its newest snapshot if there is one.
        Raises errors of reading, and DataLoss for an entry that contradicts the entries before it.
        """
        try:
            newest = await self._journal.newest()
        except DataLoss as error:
            self._log.error("the whole journal is replayed", fault=str(error))
            newest = None
        if newest is not None:
            snapshot, finished = newest
            self.state, self.records = snapshot.state, StepRecords(finished, snapshot.records)
            self.at_s = snapshot.at_s
            self.groups.take_up(snapshot.groups)
            self.traceparents = {int(step): one for step, one in snapshot.traceparents.items()}
            self._watch.last = snapshot.watched
        async for entry in self._journal.entries():
            after = self._follows(entry)
            self._observe(self.state, entry.event, after)
            self.state = after

    def _follows(self, entry: JournalEntry) -> State:
        """The state after an entry of the journal. Raises DataLoss when the entry
        contradicts it.
        """
        what = f"journal entry {self._journal.count} of run {self._run_id}"
        if entry.step != self.state.step:
            message = f"{what} does not follow from those before it, as if of another run"
            raise DataLoss(message, seen=f"step {entry.step}", allowed=self.state.step)
        try:
            return step(self.state, entry.event)[0]
        except MachineError as error:
            raise DataLoss(f"{what} does not follow from those before it: {error}") from error

    async def apply(self, *happened: Event) -> list[Transition]:
        """Makes one transition per event, in order; one write makes all durable, then one message
        publishes the facts.

        Raises InternalError for an illegal event, after the events before it are durable and
        published. Raises errors of the journal.
        """
        applied, defect = self._decide(happened)
        if applied:
            await self._journal.append(*(one.entry for one in applied))
            self.state = applied[-1].after
        facts = [one.fact(self._run_id, self._samples) for one in applied]
        if published := [one for one in facts if one is not None]:
            await self._publish(*published)
        if self._due is not None:
            await self._journal.save(self._due, self.records.finished)
            self._due = None
        log = self._log.bind()  # otherwise each line binds anew, which costs more than a debug line
        for before, event, after, *_ in applied:
            write = log.debug if after.doing == before.doing else log.info
            write(type(event).__name__, step=before.step, phase=after.doing, epoch=after.epoch)
        if defect is not None:
            raise InternalError(str(defect), reason="ILLEGAL_EVENT") from defect
        return applied

    def _decide(self, happened: Sequence[Event]) -> tuple[list[Transition], MachineError | None]:
        """The effects of the events, up to an illegal event."""
        applied: list[Transition] = []
        before = self.state
        for event in happened:
            try:
                after, issued = step(before, event)
            except MachineError as error:
                return applied, error
            changed = changed_slots(before, after)
            observed = self._observe(before, event, after)
            applied.append(Transition(before, event, after, issued, changed, *observed))
            if after.step > before.step:
                self._step_ends(after, len(applied))
            before = after
        return applied, None

    def _step_ends(self, after: State, pending: int) -> None:
        """Prepares a snapshot if one is due; `pending`: entries so far that are not written yet."""
        if self._journal.since_snapshot + pending >= self._snapshot_entries:
            traces = {str(one): trace for one, trace in self.traceparents.items()}
            self._due = Snapshot(
                *(self._journal.count + pending, self.at_s, traces, after),
                *(self.records.carried(), self.groups.kept(), self._watch.last),
            )

    def _observe(
        self, before: State, event: Event, after: State
    ) -> tuple[StepRecord | None, dict[str, float] | None]:
        """The closed or amended record, and the figures of a fall in acceptance."""
        self.at_s = max(self.at_s, event.at_s)
        if isinstance(event, StepBegan) and after.rollouts.step > before.rollouts.step:
            self.traceparents[event.step] = event.traceparent
        if after.step > before.step:
            self.traceparents.pop(before.step - 1, None)
        self.groups.observe(before, event, after)
        return self.records.observe(before, event, after), self._watch.observe(before, event)
