"""Builds the record of each step from the run's events alone, so a replay builds the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.json_format import MessageToJson, Parse

from paceline.messages import versions_to_proto
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.drafter import enough_released, most_workers, wanted
from paceline.services.coordinator.machine.events import Details, Event, WorkersReleased
from paceline.services.coordinator.machine.rollout import draw_of
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.slots import DrafterLease, Holder, WorkerState
from paceline.services.coordinator.machine.state import Phase, Service, State
from paceline.streams.journal import IdleCause, SlotUse
from paceline.v1.coordinator_pb2 import StepRecord


@dataclass(frozen=True, slots=True)
class Account:
    """Counts so far."""

    last_s: float = 0.0
    released: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    idle: Mapping[str, float] = field(default_factory=dict)


class SlotAccount:
    """Slot-seconds since the last `open`."""

    def __init__(self, account: Account = Account()) -> None:
        """`account`: from `kept`."""
        self._last_s = account.last_s
        # epoch of the policy's lease with returned worker memory
        self._released = account.released
        self._seconds = {use: account.seconds.get(use, 0.0) for use in SlotUse}
        self._idle = {cause: account.idle.get(cause, 0.0) for cause in IdleCause}

    def kept(self) -> Account:
        """The input of `__init__`."""
        return Account(self._last_s, self._released, self.seconds(), self.idle())

    def open(self) -> None:
        """Starts a step with zero counts."""
        self._seconds = dict.fromkeys(SlotUse, 0.0)
        self._idle = dict.fromkeys(IdleCause, 0.0)

    def observe(self, before: State, event: Event, after: State) -> None:
        """Processes one transition: until now the slots had their earlier use."""
        elapsed_s = event.at_s - self._last_s
        uses = self._uses(before)
        for use, slots in uses.items():
            self._seconds[use] += slots * elapsed_s
        self._idle[_idle_cause(before)] += uses[SlotUse.IDLE] * elapsed_s
        self._last_s = event.at_s
        if isinstance(event, WorkersReleased) and event.holder is Holder.POLICY:
            self._released = max(self._released, event.epoch)

    def seconds(self) -> dict[str, float]:
        """Slot-seconds by use."""
        return {use.value: seconds for use, seconds in self._seconds.items()}

    def idle(self) -> dict[str, float]:
        """Idle slot-seconds by cause, without zeros."""
        return {cause.value: seconds for cause, seconds in self._idle.items() if seconds}

    def _uses(self, state: State) -> dict[SlotUse, int]:
        """Number of slots by use."""
        held = state.slots.counted
        attached = state.lease.attached if state.lease is not None else 0
        pushing, policy = _free_while_pushing(state), held(Holder.POLICY)
        apart = not state.settings.colocated  # then no worker must leave its slots
        trains = policy if apart or state.learner.epoch == self._released else 0
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
    settings, workers = state.settings, state.workers
    if state.committing is not None:
        return IdleCause.COMMIT
    if not wanted(state):
        return IdleCause.UNTRAINED
    if state.drafter_benched or Service.DRAFTER_TRAINER in state.lost:
        return IdleCause.TRAINER_AWAY
    if state.lease is not None:
        return _beside(state, state.lease)
    if settings.serial_drafter:
        return IdleCause.SERIAL
    if workers.counted(WorkerState.COMPLETED):
        return IdleCause.TRAINER_DONE
    if not workers.counted(WorkerState.GENERATING) and settings.colocated:
        return IdleCause.HAND_OVER
    if not enough_released(state):
        return IdleCause.TOO_FEW
    return IdleCause.LEASING


def _beside(state: State, lease: DrafterLease) -> IdleCause:
    """The reason for idle slots beside the drafter's lease."""
    if lease.preempting:
        return IdleCause.GIVING_BACK
    full = len(lease.slots) // state.settings.slots_per_worker >= most_workers(state.settings)
    return IdleCause.ENOUGH if full else IdleCause.LEASING


PAGE = 256
"""Records per answer; one is about a KB."""


@dataclass(frozen=True, slots=True)
class Carried:
    """Values from earlier steps for the records of later steps."""

    detached: int = 0
    drafter_since: float = 0.0
    waits_since: float = 0.0
    taken_s: float = 0.0
    closed_s: float = 0.0
    pulls: dict[str, int] = field(default_factory=dict)
    open: tuple[tuple[float, str], ...] = ()  # start of each open record, and the record as JSON
    account: Account = field(default_factory=Account)


class StepRecords:
    """Records of finished and of open steps; asynchronous schedules have several open steps."""

    def __init__(self, finished: Iterable[StepRecord] = (), carried: Carried = Carried()) -> None:
        """`carried`: from the object that had finished these steps."""
        self.finished = list(finished)
        self._began: dict[int, float] = {}  # open steps and their starts
        self._open: dict[int, StepRecord] = {}
        for began_s, record in carried.open:
            opened = Parse(record, StepRecord())
            self._began[opened.step], self._open[opened.step] = began_s, opened
        self._taken_s = carried.taken_s  # time at which the learner took its batch
        self._closed_s = carried.closed_s  # end of the newest finished step
        self._waits_since = carried.waits_since
        # epoch of the newest counted lease
        self._detached = carried.detached
        self._drafter_since = carried.drafter_since
        self._pulls: Counter[str] = Counter(carried.pulls)
        self._account = SlotAccount(carried.account)  # since the newest step ended or began

    def carried(self) -> Carried:
        """The input of `__init__`; call it when an event has closed a step."""
        return Carried(
            self._detached,
            self._drafter_since,
            self._waits_since,
            self._taken_s,
            self._closed_s,
            dict(self._pulls),
            tuple((at_s, MessageToJson(self._open[step])) for step, at_s in self._began.items()),
            self._account.kept(),
        )

    def page(self, first: int) -> list[StepRecord]:
        """Records of finished steps from step `first` on, at most PAGE."""
        return self.finished[first : first + PAGE]

    def observe(self, before: State, event: Event, after: State) -> StepRecord | None:
        """Processes one transition; returns a closed or amended record."""
        self._account.observe(before, event, after)
        self._count_drafter_slots(before, event, after)
        self._note_waits(before, event, after)
        told = self._take(before, event, after)
        takes = {Phase.PREEMPT, Phase.POLICY}
        if after.learner.phase in takes and before.learner.phase not in takes:
            self._taken_s = event.at_s  # also at a commit, if the next batch is ready
        return told

    def _take(self, before: State, event: Event, after: State) -> StepRecord | None:
        match event:
            case events.StepBegan() if after.rollouts.step > before.rollouts.step:
                self._begin(event, before)
            case events.TasksFinished() if (draw := draw_of(before, event.epoch)) is not None:
                return self._rolled_out(draw.step, event, before.settings)
            case events.Detached() if event.epoch > self._detached:
                # Late if Preempted arrived first; counted once nevertheless.
                self._detached = event.epoch
                self._of(before).drafter_steps += int(_number(event.details, "steps"))
            case events.PolicyStepped() | events.PolicyPrepared() if (
                event.epoch == before.learner.epoch
            ):
                chosen = before.settings.dynamic_sampling_rounds > 0
                self._take_policy(event, self._of(before), chosen)
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
            self._account.open()
        self._open[event.step] = StepRecord(step=event.step, versions=versions, trace_id=trace_id)
        self._began[event.step] = event.at_s

    def _rolled_out(
        self, step: int, event: events.TasksFinished, settings: RunSettings
    ) -> StepRecord | None:
        """Fills the record; returns it if the step had finished before its last group."""
        late = next((one for one in reversed(self.finished) if one.step == step), None)
        record = self._open.get(step, late)
        if record is not None:
            self._take_rollout(record, event.details)
            if settings.dynamic_sampling_rounds:
                record.groups_left_out += event.equal_rewards.bit_count()
        return None if step in self._open else late

    def _take_rollout(self, record: StepRecord, details: Details) -> None:
        """Adds a call's results to earlier calls of the step (rounds of dynamic sampling). Reward
        and lengths are from the first call, whose tasks are unselected.
        """
        drafted, tokens = _number(details, "drafted_rounds"), record.accept_length
        tokens = tokens * record.drafted_rounds + _number(details, "accept_length") * drafted
        record.drafted_rounds += int(drafted)
        record.accept_length = tokens / record.drafted_rounds if record.drafted_rounds else 0.0
        record.rollout_s += _number(details, "rollout_s")
        record.near_ties += int(_number(details, "near_ties"))
        for way, count in _counts(details, events.UNSCORED).items():
            record.samples_unscored[way] += count
        for arm, rounds in self._new_pulls(details).items():
            record.arm_rounds[arm] += rounds
        for counts, name in (
            (record.arm_drafted_rounds, "arm_drafted_rounds"),
            (record.arm_round_tokens, "arm_round_tokens"),
        ):
            for arm, count in sorted(_counts(details, name).items()):
                counts[arm] += count
        if not record.response_length_quantiles:
            record.reward_mean = _number(details, "reward_mean")
            parts = details.get("reward_parts")
            record.reward_parts.update(parts if isinstance(parts, Mapping) else {})
            record.truncated_share = _number(details, "truncated_share")
            solved = details.get("groups_solved")
            if isinstance(solved, Mapping):
                record.groups_solved.update({who: int(count) for who, count in solved.items()})
            record.tokens_hash = str(details.get("tokens_hash", ""))
            lengths = details.get("length_quantiles")
            record.response_length_quantiles.extend(
                map(int, lengths) if isinstance(lengths, tuple) else ()
            )
        record.response_tokens += int(_number(details, "response_tokens"))

    def _new_pulls(self, details: Details) -> dict[str, int]:
        """Pulls since the last report; restarted workers count from 0 again."""
        now = _counts(details, "pulls")
        new = {
            arm: count - self._pulls[arm] if count >= self._pulls[arm] else count
            for arm, count in now.items()
        }
        self._pulls = now
        return {arm: count for arm, count in sorted(new.items()) if count}

    def _take_policy(
        self, event: events.PolicyStepped | events.PolicyPrepared, record: StepRecord, chosen: bool
    ) -> None:
        """`chosen`: dynamic sampling selected the batch, so its mean reward is not
        representative.
        """
        for name, value in event.details.items():
            if isinstance(value, int | float):
                record.policy[name] = value
        figures = event.details.get("figures")
        if isinstance(figures, Mapping):
            record.policy.update({str(name): float(value) for name, value in figures.items()})
        staleness = event.details.get("staleness")
        if isinstance(staleness, Mapping):
            record.staleness.update({lag: int(count) for lag, count in staleness.items()})
        if "reward_mean" in event.details and not chosen:
            record.reward_mean = _number(event.details, "reward_mean")

    def _evaluated(self, event: events.EvaluationDone, after: State) -> StepRecord | None:
        pulls = _counts(event.details, "pulls")
        self._pulls = pulls or self._pulls
        if event.value is None or not self.finished or after.step == 0:
            return None
        self.finished[-1].evaluations.update(values_of(event))
        return self.finished[-1]

    def _close(self, event: events.Committed, before: State) -> StepRecord:
        record, began_s = self._open.pop(before.step), self._began.pop(before.step)
        if before.pin is not None and before.pin.lasting:
            record.pinned_drafter = before.pin.version
        record.quarantined.extend(before.quarantined)
        record.policy_s = event.at_s - self._taken_s - record.preempt_wait_s
        record.step_s = event.at_s - max(began_s, self._closed_s)
        record.finished_at_s = self._closed_s = event.at_s
        for use, seconds in self._account.seconds().items():
            record.slot_s[use] = seconds
        record.idle_s.update(self._account.idle())
        self._account.open()
        self.finished.append(record)
        return record

    def _count_drafter_slots(self, before: State, event: Event, after: State) -> None:
        was, now = before.lease, after.lease
        if was is not None and (now is None or now.epoch != was.epoch):
            self._of(before).drafter_slot_s += len(was.slots) * (event.at_s - self._drafter_since)
        if now is not None and (was is None or now.epoch != was.epoch):
            self._drafter_since = event.at_s

    def _note_waits(self, before: State, event: Event, after: State) -> None:
        was, now = before.learner.phase, after.learner.phase
        if was is Phase.PREEMPT and now is Phase.POLICY:
            self._of(before).preempt_wait_s += event.at_s - self._taken_s
        if now is Phase.DRAFTER and was is not Phase.DRAFTER:
            self._waits_since = event.at_s
        if was is Phase.DRAFTER and now is Phase.COMMIT:
            self._of(before).preempt_wait_s += event.at_s - self._waits_since


def values_of(event: events.EvaluationDone) -> dict[str, float]:
    """Values of an evaluation, by kind and by its further figures."""
    passed = event.details.get(events.PASSED)
    more = passed if isinstance(passed, Mapping) else {}
    own = {} if event.value is None else {event.kind.value: event.value}
    return {**own, **{name: float(value) for name, value in more.items()}}


def _number(details: Mapping[str, Any], name: str) -> float:
    value = details.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _counts(details: Details, name: str) -> Counter[str]:
    counts = details.get(name)
    return (
        Counter({arm: int(n) for arm, n in counts.items()})
        if isinstance(counts, Mapping)
        else Counter()
    )
