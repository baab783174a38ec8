"""Simulates the gateway: rollouts on simulated workers, release and return of memory, and
commits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.simulation.decoding import SimulatedResponse, SimulatedWorker
from benchmarks.simulation.site import Site
from paceline.services.coordinator.journal.groups import FIGURE
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.schedule import bits
from paceline.services.coordinator.machine.settings import CommitMode, RunSettings, Schedule
from paceline.services.coordinator.machine.state import Portion
from paceline.streams.journal import SlotUse
from paceline.trajectory import VersionSet


@dataclass(slots=True)
class SimulatedRollout:
    """The tasks of a step under way."""

    epoch: int
    began_s: float
    left: int  # responses
    owed: Counter[int] = field(default_factory=Counter)  # unfinished responses by worker
    missing: Counter[int] = field(default_factory=Counter)  # unfinished responses by group
    tail_s: float = 0.0  # when a sixteenth of the responses was left


class SimulatedGateway:
    """Workers with a slot each, and the ended responses."""

    def __init__(self, site: Site, settings: RunSettings) -> None:
        self._site, self._settings = site, settings
        self._workers = [SimulatedWorker(site.fleet, index) for index in range(settings.workers)]
        self._lent: set[int] = set()  # workers that have given their memory back
        self._versions = VersionSet()
        self._running: dict[int, SimulatedRollout] = {}  # by step
        self._ended: dict[tuple[int, int], list[SimulatedResponse]] = {}  # by step and group
        self.trained = 0  # responses that a batch has taken
        self.tails: list[float] = []  # last sixteenth's share of each rollout

    def run_tasks(self, command: commands.RunTasks) -> None:
        """Emits GroupClosed if groups are trained one by one, ShareDone for every worker, then
        TasksFinished.
        """
        self._site.time.after(self._take_memory(), lambda: self._begin(command))

    def resume_rollouts(self, command: commands.ResumeWorkers) -> None:
        """Continues held requests."""
        self._take_memory()

    def take(self, portions: Iterable[Portion]) -> Sequence[SimulatedResponse]:
        """Removes and returns the responses of a batch."""
        taken = [
            response
            for portion in portions
            for group in self._groups_of(portion)
            for response in self._ended.pop((portion.step, group))
        ]
        self.trained += len(taken)
        return taken

    @property
    def untrained(self) -> int:
        """Number of responses that no batch has taken."""
        return sum(map(len, self._ended.values()))

    def _groups_of(self, portion: Portion) -> Iterable[int]:
        return range(self._site.fleet.groups) if portion.groups is None else bits(portion.groups)

    def release(self, slots: Collection[int], then: Callable[[], None]) -> None:
        """Makes the workers on these slots hold their requests and give their memory back, unless
        they already have.
        """
        now_s = self._site.time.now_s
        named = {slot for slot in slots if slot < len(self._workers)}
        for index in sorted(named):
            self._workers[index].pause(now_s)
        waits = self._site.fleet.release_s if named - self._lent else 0.0
        self._lent |= named
        self._site.time.after(self._site.fleet.message_s + waits, then)

    def commit(self, command: commands.Commit) -> None:
        """Emits Committed. Workers decode nothing meanwhile; then they continue by the commit
        mode.
        """
        site, now_s = self._site, self._site.time.now_s
        held = [one for one in self._workers if len(one) and not one.paused]
        for worker in held:
            worker.pause(now_s)
        site.slots.set([one.index for one in held], SlotUse.TRANSFERRING, now_s)
        site.slots.push(self._settings.policy_slots, now_s)
        site.time.after(site.fleet.commit_s, lambda: self._committed(command, held))

    def _committed(self, command: commands.Commit, held: Sequence[SimulatedWorker]) -> None:
        site, now_s, mode = self._site, self._site.time.now_s, self._settings.commit_mode
        self._versions = command.versions
        for worker in self._workers:
            worker.swap(now_s, command.versions.policy)
        for worker in held:  # an aborted request continues from its tokens
            self._go_on(worker, recompute=mode is not CommitMode.IN_PLACE)
        site.slots.push((), now_s)
        site.tell(events.Committed(now_s, command.versions))

    def _take_memory(self) -> float:
        """Gives workers their memory again; returns the seconds until all have it."""
        site, wait_s = self._site, self._site.fleet.message_s
        if not self._lent:
            return wait_s
        wait_s += site.fleet.resume_s
        for worker in (self._workers[index] for index in sorted(self._lent)):
            site.slots.set([worker.index], SlotUse.TRANSFERRING, site.time.now_s)
            site.time.after(wait_s, partial(self._go_on, worker, recompute=True))
        self._lent.clear()
        return wait_s

    def _go_on(self, worker: SimulatedWorker, *, recompute: bool) -> None:
        site, now_s = self._site, self._site.time.now_s
        use = SlotUse.GENERATING if len(worker) else SlotUse.IDLE
        site.slots.set([worker.index], use, now_s)
        tokens = worker.held_tokens(now_s) if recompute else 0

        def decode() -> None:
            worker.go_on(site.time.now_s)
            self._await_end(worker)

        site.time.after(tokens / site.fleet.prefill_tokens_s, decode)

    def _begin(self, command: commands.RunTasks) -> None:
        """Starts a rollout: sample j of task i goes to worker (i * samples + j) mod workers."""
        site, fleet, now_s = self._site, self._site.fleet, self._site.time.now_s
        rollout = SimulatedRollout(command.epoch, now_s, fleet.step_samples)
        self._running[command.step] = rollout
        for group in range(fleet.groups):
            self._ended[command.step, group] = []
            lengths = fleet.lengths.of_group(command.step * fleet.groups + group, fleet.samples)
            for sample, tokens in enumerate(lengths):
                worker = self._workers[(group * fleet.samples + sample) % len(self._workers)]
                rollout.owed[worker.index] += 1
                rollout.missing[group] += 1
                response = SimulatedResponse(command.step, group, sample, tokens)
                worker.add(now_s, self._versions.policy, response)
        for worker in self._workers:
            if rollout.owed[worker.index]:
                site.slots.set([worker.index], SlotUse.GENERATING, now_s)
                self._await_end(worker)
            else:
                site.tell(events.ShareDone(now_s, rollout.epoch, worker.index))

    def _await_end(self, worker: SimulatedWorker) -> None:
        end_s, turn = worker.next_end_s(), worker.turn
        if end_s is None:
            return

        def ended() -> None:
            if worker.turn == turn:
                self._ends(worker, worker.end_first(self._site.time.now_s))

        self._site.time.after(end_s - self._site.time.now_s, ended)

    def _ends(self, worker: SimulatedWorker, response: SimulatedResponse) -> None:
        site, now_s = self._site, self._site.time.now_s
        step, group = response.step, response.group
        rollout = self._running[step]
        self._ended[step, group].append(response)
        rollout.owed[worker.index] -= 1
        rollout.missing[group] -= 1
        rollout.left -= 1
        if rollout.left == site.fleet.step_samples // 16:
            rollout.tail_s = now_s
        if not len(worker):
            site.slots.set([worker.index], SlotUse.IDLE, now_s)
        self._await_end(worker)
        by_group = self._settings.schedule is Schedule.FULLY_ASYNC
        if by_group and not rollout.missing[group]:
            closed = len(self._ended[step, group])
            site.tell(events.GroupClosed(now_s, rollout.epoch, group, f"{step}.{group}", closed))
        if not rollout.owed[worker.index]:
            site.tell(events.ShareDone(now_s, rollout.epoch, worker.index))
        if not rollout.left:
            self._finished(step, rollout)

    def _finished(self, step: int, rollout: SimulatedRollout) -> None:
        now_s = self._site.time.now_s
        del self._running[step]
        self.tails.append((now_s - rollout.tail_s) / (now_s - rollout.began_s))
        groups = (f"{step}.{group}" for group in range(self._site.fleet.groups))
        closed = dict.fromkeys(groups, self._site.fleet.samples)
        details: events.Details = {FIGURE: closed, "rollout_s": now_s - rollout.began_s}
        self._site.tell(events.TasksFinished(now_s, rollout.epoch, details))
