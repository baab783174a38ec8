"""Builds the record of each step from the run's events alone, so a replay builds the same."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.json_format import MessageToJson, Parse

from paceline.messages import versions_to_proto
from paceline.services.coordinator.machine import drafter, events, settings
from paceline.services.coordinator.machine.events import Details, Event
from paceline.services.coordinator.machine.rollout import draw_of
from paceline.services.coordinator.machine.slots import DrafterLease, Holder, WorkerState
from paceline.services.coordinator.machine.state import Phase, Service, State
from paceline.streams.journal import IdleCause, SlotUse
from paceline.v1.coordinator_pb2 import StepRecord


@dataclass(slots=True)
class SlotAccount:
    """Slot-seconds since the last `open`."""

    last_s: float = 0.0
    released: int = 0  # epoch of the policy's lease with returned worker memory
    # By SlotUse.
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SlotUse, 0.0))
    idle: dict[str, float] = field(default_factory=dict)  # by IdleCause

    def open(self) -> None:
        """Starts a step with zero counts."""
        self.seconds, self.idle = dict.fromkeys(SlotUse, 0.0), {}

    def observe(self, before: State, event: Event) -> None:
        """Processes one transition: until now the slots had their earlier use."""
        elapsed_s = event.at_s - self.last_s
        uses = self._uses(before)
        for use, slots in uses.items():
            self.seconds[use] += slots * elapsed_s
        if idle_s := uses[SlotUse.IDLE] * elapsed_s:
            cause = _idle_cause(before)
            self.idle[cause] = self.idle.get(cause, 0.0) + idle_s
        self.last_s = event.at_s
        if isinstance(event, events.WorkersReleased) and event.holder is Holder.POLICY:
            self.released = max(self.released, event.epoch)

    def _uses(self, state: State) -> dict[SlotUse, int]:
        """Number of slots by use."""
        held = state.slots.counted
        attached = state.lease.attached if state.lease is not None else 0
        pushing, policy = _free_while_pushing(state), held(Holder.POLICY)
        apart = not state.settings.colocated  # then no worker must leave its slots
        trains = policy if apart or state.learner.epoch == self.released else 0
        arriving = held(Holder.DRAFTER) - attached + policy - trains
        return {
            SlotUse.GENERATING: held(Holder.ENGINE),
            SlotUse.POLICY: trains,
            SlotUse.DRAFTER: attached,
            SlotUse.TRANSFERRING: arriving + pushing,
            SlotUse.IDLE: held(Holder.NONE) - pushing,
        }


def _free_while_pushing(state: State) -> int:
    """Free slots while weights travel to the gateway."""
    if state.learner.phase is not Phase.POLICY and state.committing is None:
        return 0  # also if a prepared set waits for rollouts to end
    if not state.settings.colocated:
        return state.settings.learner_slots - state.slots.counted(Holder.POLICY)
    return 0 if state.rollouts.phase is Phase.ROLLOUT else state.slots.counted(Holder.NONE)


def _idle_cause(state: State) -> IdleCause:
    """The reason that the drafter is not trained on free slots."""
    workers = state.workers
    if state.committing is not None:
        return IdleCause.COMMIT
    if not drafter.wanted(state):
        return IdleCause.UNTRAINED
    if state.drafter_benched or Service.DRAFTER_TRAINER in state.lost:
        return IdleCause.TRAINER_AWAY
    if state.lease is not None:
        return _beside(state, state.lease)
    if state.settings.serial_drafter:
        return IdleCause.SERIAL
    if workers.counted(WorkerState.COMPLETED):
        return IdleCause.TRAINER_DONE
    if not workers.counted(WorkerState.GENERATING) and state.settings.colocated:
        return IdleCause.HAND_OVER
    return IdleCause.LEASING


def _beside(state: State, lease: DrafterLease) -> IdleCause:
    """The reason for idle slots beside the drafter's lease."""
    if lease.preempting:
        return IdleCause.GIVING_BACK
    full = len(lease.slots) // state.settings.slots_per_worker >= drafter.most_workers(
        state.settings
    )
    return IdleCause.ENOUGH if full else IdleCause.LEASING


PAGE = 256
"""Records per answer; one is about a KB."""
_SUMMED = ("rollout_s", "near_ties", "response_tokens")
_COUNTED = (events.UNSCORED, "arm_drafted_rounds", "arm_round_tokens")
_OF_FIRST_CALL = ("reward_mean", "reward_parts", "truncated_share", "groups_solved", "tokens_hash")
"""Fields of a record with the same names in the details of TasksFinished. A step has several calls
with rounds of dynamic sampling: sums are added, and other fields are from the first call, whose
tasks are unselected.
"""


@dataclass(slots=True)
class Carried:
    """Values from earlier steps for the records of later steps."""

    detached: int = 0  # epoch of the newest counted lease
    drafter_since: float = 0.0
    waits_since: float = 0.0
    taken_s: float = 0.0  # time at which the learner took its batch
    closed_s: float = 0.0  # end of the newest finished step
    pulls: dict[str, int] = field(default_factory=dict)  # as last reported
    open: tuple[tuple[float, str], ...] = ()  # start of each open record, and the record as JSON
    account: SlotAccount = field(default_factory=SlotAccount)


class StepRecords:
    """Records of finished and of open steps; asynchronous schedules have several open steps."""

    def __init__(self, finished: Iterable[StepRecord] = (), carried: Carried | None = None) -> None:
        """`carried`: from the object that had finished these steps."""
        self.finished = list(finished)
        self._now = carried or Carried()
        self._began: dict[int, float] = {}  # open steps and their starts
        self._open: dict[int, StepRecord] = {}
        for began_s, record in self._now.open:
            opened = Parse(record, StepRecord())
            self._began[opened.step], self._open[opened.step] = began_s, opened

    def carried(self) -> Carried:
        """The input of `__init__`; call it when an event has closed a step."""
        begun = self._began.items()
        opened = tuple((at_s, MessageToJson(self._open[step])) for step, at_s in begun)
        return replace(deepcopy(self._now), open=opened)

    def page(self, first: int) -> list[StepRecord]:
        """Records of finished steps from step `first` on, at most PAGE."""
        return self.finished[first : first + PAGE]

    def observe(self, before: State, event: Event, after: State) -> StepRecord | None:
        """Processes one transition; returns a closed or amended record."""
        self._now.account.observe(before, event)
        self._count_drafter_slots(before, event, after)
        self._note_waits(before, event, after)
        changed = self._record(before, event, after)
        takes = {Phase.PREEMPT, Phase.POLICY}
        if after.learner.phase in takes and before.learner.phase not in takes:
            self._now.taken_s = event.at_s  # also at a commit, if the next batch is ready
        return changed

    def _record(self, before: State, event: Event, after: State) -> StepRecord | None:
        match event:
            case events.StepBegan() if after.rollouts.step > before.rollouts.step:
                self._begin(event, before)
            case events.TasksFinished() if (draw := draw_of(before, event.epoch)) is not None:
                return self._rolled_out(draw.step, event, before.settings)
            case events.Detached() if event.epoch > self._now.detached:
                # Late if Preempted arrived first; counted once nevertheless.
                self._now.detached = event.epoch
                self._of(before).drafter_steps += _figures(event.details).get("steps", 0)
            case events.PolicyStepped() | events.PolicyPrepared() if (
                event.epoch == before.learner.epoch
            ):
                chosen = before.settings.dynamic_sampling_rounds > 0
                _add_policy(self._of(before), _figures(event.details), chosen=chosen)
            case events.EvaluationDone() if (
                before.phase is Phase.EVALUATE and event.epoch == before.phase_epoch
            ):
                return self._evaluated(event, after)
            case events.Committed() if after.step > before.step:
                return self._close(event, before)
            case _:
                pass
        return None

    def _of(self, state: State) -> StepRecord:
        """The record of the step being trained, or of the next one."""
        return self._open.setdefault(state.step, StepRecord(step=state.step))

    def _begin(self, event: events.StepBegan, before: State) -> None:
        versions = versions_to_proto(before.versions)
        trace_id = event.traceparent.split("-")[1] if event.traceparent.count("-") == 3 else ""
        if not self._began:
            self._now.account.open()
        self._open[event.step] = StepRecord(step=event.step, versions=versions, trace_id=trace_id)
        self._began[event.step] = event.at_s

    def _rolled_out(
        self, step: int, event: events.TasksFinished, rules: settings.RunSettings
    ) -> StepRecord | None:
        """Fills the record; returns it if the step had finished before its last group."""
        late = next((one for one in reversed(self.finished) if one.step == step), None)
        record = self._open.get(step, late)
        if record is not None:
            self._add_rollout(record, _figures(event.details))
            if rules.dynamic_sampling_rounds:
                record.groups_left_out += event.equal_rewards.bit_count()
        return None if step in self._open else late

    def _add_rollout(self, record: StepRecord, figures: Mapping[str, Any]) -> None:
        """Adds a call's results to earlier calls of the step."""
        drafted, tokens = figures.get("drafted_rounds", 0), record.accept_length
        tokens = tokens * record.drafted_rounds + figures.get("accept_length", 0.0) * drafted
        record.drafted_rounds += drafted
        record.accept_length = tokens / record.drafted_rounds if record.drafted_rounds else 0.0
        for name in _SUMMED:
            setattr(record, name, getattr(record, name) + figures.get(name, 0))
        for name in _COUNTED:
            _add_counts(getattr(record, name), figures.get(name, {}))
        _add_counts(record.arm_rounds, self._new_pulls(figures.get("pulls", {})))
        if record.response_length_quantiles:
            return
        for name in _OF_FIRST_CALL:
            value = figures.get(name)
            if isinstance(value, Mapping):
                getattr(record, name).update(value)
            elif value is not None:
                setattr(record, name, value)
        record.response_length_quantiles.extend(figures.get("length_quantiles", ()))

    def _new_pulls(self, now: Mapping[str, int]) -> dict[str, int]:
        """Pulls since the last report; restarted workers count from 0 again."""
        before, self._now.pulls = self._now.pulls, dict(now)
        new = {arm: count - before.get(arm, 0) for arm, count in now.items()}
        return {arm: now[arm] if count < 0 else count for arm, count in new.items() if count}

    def _evaluated(self, event: events.EvaluationDone, after: State) -> StepRecord | None:
        self._now.pulls = _figures(event.details).get("pulls") or self._now.pulls
        if event.value is None or not self.finished or after.step == 0:
            return None
        self.finished[-1].evaluations.update(values_of(event))
        return self.finished[-1]

    def _close(self, event: events.Committed, before: State) -> StepRecord:
        now = self._now
        record, began_s = self._open.pop(before.step), self._began.pop(before.step)
        record.quarantined.extend(before.quarantined)
        record.policy_s = event.at_s - now.taken_s - record.preempt_wait_s
        record.step_s = event.at_s - max(began_s, now.closed_s)
        record.finished_at_s = now.closed_s = event.at_s
        record.slot_s.update(now.account.seconds)
        record.idle_s.update(now.account.idle)
        now.account.open()
        self.finished.append(record)
        return record

    def _count_drafter_slots(self, before: State, event: Event, after: State) -> None:
        was, now = before.lease, after.lease
        if was is not None and (now is None or now.epoch != was.epoch):
            seconds = event.at_s - self._now.drafter_since
            self._of(before).drafter_slot_s += len(was.slots) * seconds
        if now is not None and (was is None or now.epoch != was.epoch):
            self._now.drafter_since = event.at_s

    def _note_waits(self, before: State, event: Event, after: State) -> None:
        was, now = before.learner.phase, after.learner.phase
        if was is Phase.PREEMPT and now is Phase.POLICY:
            self._of(before).preempt_wait_s += event.at_s - self._now.taken_s
        if now is Phase.DRAFTER and was is not Phase.DRAFTER:
            self._now.waits_since = event.at_s
        if was is Phase.DRAFTER and now is Phase.COMMIT:
            self._of(before).preempt_wait_s += event.at_s - self._now.waits_since


def values_of(event: events.EvaluationDone) -> dict[str, float]:
    """Values of an evaluation, by kind and by its further figures."""
    own = {} if event.value is None else {event.kind.value: event.value}
    return {**own, **_figures(event.details).get(events.PASSED, {})}


def _add_policy(record: StepRecord, figures: Mapping[str, Any], *, chosen: bool) -> None:
    """`chosen`: dynamic sampling selected the batch, so its mean reward is not representative."""
    numbers = {name: one for name, one in figures.items() if isinstance(one, int | float)}
    record.policy.update(numbers | figures.get("figures", {}))
    record.staleness.update(figures.get("staleness", {}))
    if "reward_mean" in figures and not chosen:
        record.reward_mean = figures["reward_mean"]


def _add_counts(counts: Any, more: Mapping[str, int]) -> None:
    for name, count in sorted(more.items()):
        counts[name] += count


def _figures(details: Details) -> Mapping[str, Any]:
    """Details of an event with values of the types that their names have."""
    return details
