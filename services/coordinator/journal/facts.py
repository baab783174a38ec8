"""Returns the facts of a transition, which subscribers receive."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.journal.entry import SlotView, changed_slots, slot_views
from coordinator.machine import events
from coordinator.machine.commands import Command, FinishRun
from coordinator.machine.events import Event
from coordinator.machine.state import Phase, State
from paceline.messages import versions_to_proto
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1.trajectory_pb2 import CommandContext


def facts_of(
    run_id: str,
    before: State,
    event: Event,
    after: State,
    issued: Sequence[Command],
    *,
    record: pb.StepRecord | None,
    samples: int,
) -> list[pb.Fact]:
    """Facts in the order in which they became so; unnumbered.

    `samples`: samples that a step asks for, if it does.
    """
    facts = [
        pb.Fact(slot_changed=pb.SlotChanged(slot=slot_status(view)))
        for view in changed_slots(before, after)
    ]
    if isinstance(event, events.StepBegan) and before.phase is Phase.READY:
        facts.insert(0, pb.Fact(step_began=pb.StepBegan(samples=samples)))
    if after.versions != before.versions:
        facts.append(
            pb.Fact(
                version_committed=pb.VersionCommitted(versions=versions_to_proto(after.versions))
            )
        )

    if after.lost != before.lost:
        facts.append(pb.Fact(services_away=pb.ServicesAway(services=sorted(after.lost))))
    if record is not None:
        facts.append(pb.Fact(step_finished=pb.StepFinished(record=record)))
    facts += [
        pb.Fact(run_finished=pb.RunFinished(failure=command.failure))
        for command in issued
        if isinstance(command, FinishRun)
    ]
    for fact in facts:
        fact.context.CopyFrom(CommandContext(run_id=run_id, step=before.step, epoch=after.epoch))
        fact.at_s = event.at_s
    return facts


def slot_statuses(state: State) -> list[pb.SlotStatus]:
    """All slots on the wire."""
    return [slot_status(view) for view in slot_views(state)]


def slot_status(view: SlotView) -> pb.SlotStatus:
    """One slot on the wire."""
    return pb.SlotStatus(
        slot=view.slot,
        holder=f"HOLDER_{view.holder.upper()}",
        epoch=view.epoch,
        worker_state=f"WORKER_STATE_{view.worker_state.upper()}",
    )
