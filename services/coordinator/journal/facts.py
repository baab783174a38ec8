"""Returns the fact of a transition, which subscribers receive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.messages import versions_to_proto
from paceline.services.coordinator.journal.entry import SlotRange, slot_ranges
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.commands import Command, FinishRun
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.state import Phase, State
from paceline.v1 import coordinator_pb2 as pb


def fact_of(
    run_id: str,
    before: State,
    event: Event,
    after: State,
    issued: Sequence[Command],
    changed: Sequence[SlotRange],
    record: pb.StepRecord | None,
    samples: int,
) -> pb.Fact | None:
    """All changes by a transition, unnumbered; None without any.

    `changed`: the transition's `changed_slots`. `samples`: samples requested by a step, if any.
    """
    fact = pb.Fact(slots=_ranges(after, changed))
    step = before.step
    if isinstance(event, events.StepBegan) and after.rollouts.step > before.rollouts.step:
        step = event.step
        fact.step_began.samples = samples
        fact.step_began.SetInParent()
    if after.versions != before.versions:
        fact.version_committed.versions.CopyFrom(versions_to_proto(after.versions))
    if after.lost != before.lost:
        fact.services_away.services.extend(sorted(after.lost))
        fact.services_away.SetInParent()
    if (after.phase is Phase.PAUSED) != (before.phase is Phase.PAUSED):
        fact.paused = after.phase is Phase.PAUSED
    if record is not None:
        fact.step_finished.record.CopyFrom(record)
    for command in issued:
        if isinstance(command, FinishRun):
            fact.run_finished.failure = command.failure
            fact.run_finished.SetInParent()
    if not fact.ByteSize():
        return None
    context = fact.context
    context.run_id, context.step, context.epoch = run_id, step, after.epoch
    fact.at_s = event.at_s
    return fact


def all_slots(state: State) -> list[pb.SlotRange]:
    """All slots in the wire's form."""
    return _ranges(state, slot_ranges(state, range(len(state.slots))))


def _ranges(state: State, ranges: Iterable[SlotRange]) -> list[pb.SlotRange]:
    return [
        pb.SlotRange(
            first=first,
            count=count,
            holder=f"HOLDER_{holder.upper()}",
            epoch=epoch,
            worker_state=f"WORKER_STATE_{(state.worker_on(first) or 'UNSPECIFIED').upper()}",
        )
        for first, count, holder, epoch in ranges
    ]
