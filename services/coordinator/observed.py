"""Follows a run's transitions for its metrics, and detects a run without progress."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import DeadlineExceeded, PacelineError
from paceline.local.news import tell_supervisor
from paceline.local.patience import patient
from paceline.local.services import GATEWAY, numbered
from paceline.rpc.progress import AGENTS, ASK_S, Activity, ask_progress, chain_text, wait_chain
from paceline.services.coordinator import metrics
from paceline.services.coordinator.calls.base import Calls
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.losses import CALLED_IN
from paceline.services.coordinator.machine.rollout import draw_of
from paceline.services.coordinator.machine.slots import Holder
from paceline.services.coordinator.machine.state import Phase, Service, State
from paceline.services.coordinator.machine.step import LIVE
from paceline.services.coordinator.metrics import ALARMS, STALLED
from paceline.streams import Ledger
from paceline.telemetry import get_logger
from paceline.v1.progress_pb2 import GetProgressResponse, Part

COUNT_S = 5.0
"""Deadline for counting the ledger, seconds; after it the gauges keep their values."""


class ObservedRun:
    """The metrics of one run, from its first live transition on. Replayed transitions were counted
    by the earlier process.
    """

    def __init__(self, ledger: Ledger | None) -> None:
        """`ledger`: None counts no trajectories."""
        self._ledger = ledger
        self._due = asyncio.Event()
        self._since_s: float | None = None  # time of entry into the phases
        self._held: dict[Holder, int] = {}  # slots by holder, as last recorded
        self._lost: frozenset[Service] | None = None

    def observe(self, before: State, event: Event, after: State) -> None:
        """Processes one transition."""
        if self._since_s is None:
            self._since_s = event.at_s
        if after.doing != before.doing:
            metrics.PHASE_TIME.record(max(event.at_s - self._since_s, 0.0), phase=before.doing)
            self._since_s = event.at_s
        if after.lost != self._lost:
            self._lost = after.lost
            for service in Service:
                metrics.AWAY.record(int(service in after.lost), service=service)
        if after.slots is not before.slots or not self._held:
            self._note_slots(before, after)
        if isinstance(event, events.TasksFinished) and draw_of(before, event.epoch) is not None:
            _note_samples(event.details)

    def _note_slots(self, before: State, after: State) -> None:
        held = {holder: after.slots.counted(holder) for holder in Holder}
        for holder in Holder:
            if held[holder] != self._held.get(holder):
                metrics.SLOTS.record(held[holder], holder=holder)
        if after.lease_epoch > before.lease_epoch:
            metrics.LEASES.record(holder=Holder.DRAFTER)
        if held[Holder.POLICY] and not before.slots.counted(Holder.POLICY):
            metrics.LEASES.record(holder=Holder.POLICY)
        self._held = held

    def step_ended(self) -> None:
        """Requests a new count of the trajectories."""
        self._due.set()

    async def run(self) -> None:
        """Counts trajectories after every step; never returns."""
        while True:
            await self._due.wait()
            self._due.clear()
            await self.count()

    async def count(self) -> None:
        """Records the number of the run's trajectories by fate."""
        if self._ledger is None:
            return
        try:
            async with asyncio.timeout(COUNT_S):
                counted = await self._ledger.count()
        except (PacelineError, TimeoutError) as error:
            get_logger("coordinator").info("trajectories are not counted", error=str(error))
            return
        for fate, count in {
            "published": counted.final,
            "trained": counted.trained,
            "dropped": sum(counted.dropped.values()),
            "open": counted.open,
            "lost": counted.lost,
        }.items():
            metrics.TRAJECTORIES.record(count, fate=fate)


def _note_samples(details: Mapping[str, object]) -> None:
    unscored = details.get(events.UNSCORED)
    others = unscored if isinstance(unscored, Mapping) else {}
    counts = {"scored": details.get("scored"), **others}
    for outcome, count in counts.items():
        if isinstance(count, int) and count:
            metrics.SAMPLES.record(count, outcome=outcome)


NAME = "coordinator"
_WAITS_FOR: dict[Phase, Service] = {
    **{phase: services[0] for phase, services in CALLED_IN.items() if phase is not Phase.PAUSED},
    Phase.POLICY: Service.POLICY_TRAINER,  # the gateway only receives the weights
    Phase.PREEMPT: Service.DRAFTER_TRAINER,
    Phase.DRAFTER: Service.DRAFTER_TRAINER,
}
_NO_PROGRESS = (
    events.ServiceLost,
    events.ServiceBack,
    events.WorkerLost,
    events.SetDamaged,
    events.TrainerFailed,
    events.Deadline,
    events.CallFailed,
)
_LOOK_AGAIN_S = 5.0
"""Seconds between two checks of a stalled run."""


class StallWatch:
    """The stall alarm of one run; `run` lasts as long as the run."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._alarm_s = calls.config.stall_alarm_s
        self._activity = Activity(NAME)
        self._rests = False  # paused: no progress is due
        self._alarm = ""  # the alarm's text as reported
        self._culprit = ""  # service at the end of the chain
        self._alarmed_s = 0.0  # time.monotonic() of the report

    def waits_healthy(self, service: Service) -> None:
        """Notes that the run waits for this service to become healthy."""
        self._activity.begins("begins or takes up the run", service)

    def observe(self, event: Event, after: State) -> None:
        """Processes one transition."""
        # Rollouts first: if both tracks are active, the learner waits for the rollouts next.
        waits = (_waits_for(one, after) for one in Phase if one in after.phases)
        self._rests = after.phase is Phase.PAUSED
        self._activity.waits_for = next(filter(None, waits), "")
        doing = f"{after.doing} of step {after.step}" if after.phase in LIVE else ""
        if isinstance(event, _NO_PROGRESS):
            return
        if doing != self._activity.doing:
            self._activity.begins(doing, self._activity.waits_for)
        self._activity.moves()
        self._end_alarm()

    async def progress(self) -> GetProgressResponse:
        """The progress of the coordinator's and all peers' parts, and the alarm."""
        asked = await asyncio.gather(*(self._parts_of(service) for service in Service))
        state = self._calls.state()
        steps = {"step": state.step, "steps": state.settings.total_steps}
        parts = [self._activity.part(steps), *(part for parts in asked for part in parts)]
        return GetProgressResponse(parts=parts, alarm=self._alarm)

    async def run(self) -> None:
        """Checks whenever no event arrived for the alarm's time; never returns."""
        while self._alarm_s:
            still_s, alarm_s = await self._look(), patient(self._alarm_s)
            await asyncio.sleep(max(alarm_s - still_s, min(_LOOK_AGAIN_S, alarm_s)))

    async def _look(self) -> float:
        """Seconds without progress of the whole chain of waits; reports a stall above the alarm's
        time.
        """
        still_s, alarm_s = time.monotonic() - self._activity.moved_s, patient(self._alarm_s)
        due = self._activity.doing and not self._rests
        if not due or still_s < alarm_s:
            return still_s if due else 0.0
        parts = (await self.progress()).parts
        chain = wait_chain(parts, NAME)
        still_s = min(part.still_s for part in chain if part.doing)
        nobody_came = chain[-1].name == AGENTS and self._calls.config.open_traffic
        if still_s < alarm_s or nobody_came:
            self._end_alarm()
            return still_s
        self._raise_alarm(still_s, chain)
        return still_s

    def _raise_alarm(self, still_s: float, chain: list[Part]) -> None:
        text, first = chain_text(chain), not self._alarm
        if self._culprit != chain[-1].name:
            self._clear_alarm()
            first = True
        self._alarm, self._culprit = f"no progress for {still_s:.0f} s: {text}", chain[-1].name
        STALLED.record(still_s, waits_for=self._culprit)
        if first:
            ALARMS.record(waits_for=self._culprit)
            self._alarmed_s = time.monotonic() - still_s
            get_logger(NAME).warning("no progress", still_s=round(still_s, 1), chain=text)
            tell_supervisor("impaired", self._alarm)

    def _end_alarm(self) -> None:
        if self._alarm:
            still_s = time.monotonic() - self._alarmed_s
            self._clear_alarm()
            tell_supervisor("recovered", f"the run goes on after {still_s:.0f} s")

    def _clear_alarm(self) -> None:
        if self._culprit:
            STALLED.record(0, waits_for=self._culprit)
        self._alarm = self._culprit = ""

    async def _parts_of(self, service: Service) -> list[Part]:
        channels = self._calls.peers.channels[service]
        found = await asyncio.gather(*(_parts(service, one) for one in channels))
        parts = found[0] if len(found) == 1 else merge_gateways(found, self._calls.workers_of_each)
        if (absence := self._calls.absent.get(service)) is not None:
            away_s = self._calls.now() - absence.since_s
            parts[0].trouble = ", ".join(
                filter(None, (f"away for {away_s:.0f} s{absence.why}", parts[0].trouble))
            )
        return parts


async def _parts(service: Service, connection: Any) -> list[Part]:
    answer_s = patient(ASK_S)
    try:
        return list((await ask_progress(connection, answer_s)).parts)
    except DeadlineExceeded:
        return [Part(name=service, trouble=f"does not answer within {answer_s:.0f} s")]
    except PacelineError as error:
        return [Part(name=service, trouble=f"does not answer: {error.message}")]


def _waits_for(phase: Phase, state: State) -> str:
    """A required service that is away, else the service that does the phase's work."""
    away = (service for service in CALLED_IN.get(phase, ()) if service in state.lost)
    return next(away, _WAITS_FOR.get(phase, ""))


def merge_gateways(answers: Sequence[Sequence[Part]], of_each: int) -> list[Part]:
    """The parts of all gateways in the form of one gateway's parts: the busy gateway with the
    latest progress, with the counts of all gateways, then all workers.
    """
    fronts, workers = [parts[0] for parts in answers], list[Part]()
    for number, parts in enumerate(answers):
        names = {f"worker {w}": f"worker {number * of_each + w}" for w in range(of_each)}
        for part in parts:
            part.name = names.get(part.name, part.name)
            part.waits_for = names.get(part.waits_for, part.waits_for)
        workers += parts[1:]
    whole, counts = Part(), Counter[str]()
    whole.CopyFrom(min(fronts, key=lambda front: (not front.doing, front.still_s)))
    for front in fronts:
        counts.update(front.counts)
    whole.name = GATEWAY
    whole.counts.update(counts)
    whole.trouble = "; ".join(
        f"{numbered(GATEWAY, number)} {front.trouble}"
        for number, front in enumerate(fronts)
        if front.trouble
    )
    return [whole, *workers]
