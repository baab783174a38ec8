"""Keeps the groups closed by the steps' rollouts, for the policy trainer to wait for.

They are built from the run's events alone, as the records are. A restarted coordinator therefore
requests the same groups.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import InternalError
from paceline.services.coordinator.machine import events, rollout, schedule
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.state import DrawnStep, Portion, State
from paceline.v1.rollout_pb2 import ClosedGroup

FIGURE = "closed_groups"
"""Key in the details of TasksFinished: group id -> scored sessions."""


@dataclass(frozen=True, slots=True)
class KnownGroup:
    """A closed group."""

    place: int  # the group's place in the step
    group_id: str
    sessions: int  # scored sessions
    left_out: bool = False  # equal rewards, replaced by dynamic sampling


def group_figure(closed: Iterable[ClosedGroup]) -> dict[str, float | int]:
    """Groups of a message, in its order."""
    return {group.group_id: group.scored_sessions for group in closed}


class ClosedGroups:
    """Groups of the steps that are not fully trained."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, KnownGroup]] = {}  # by step and group id

    def take_up(self, kept: Mapping[str, Sequence[KnownGroup]]) -> None:
        """Restores the groups from `kept`."""
        self._steps = {
            int(step): {group.group_id: group for group in groups} for step, groups in kept.items()
        }

    def kept(self) -> dict[str, tuple[KnownGroup, ...]]:
        """All groups, for a snapshot."""
        return {str(step): tuple(groups.values()) for step, groups in self._steps.items()}

    def observe(self, before: State, event: Event, after: State) -> None:
        """Processes one transition; late events of restarted rollouts change nothing."""
        if isinstance(event, events.GroupClosed | events.TasksFinished):
            draw = rollout.draw_of(before, event.epoch)
            leaves_out = before.settings.dynamic_sampling_rounds > 0
            if draw is not None and isinstance(event, events.TasksFinished):
                self._finished(draw, event, leaves_out)
            elif isinstance(event, events.GroupClosed) and draw and after is not before:
                left_out = event.equal_rewards and leaves_out
                group = KnownGroup(event.index, event.group_id, event.sessions, left_out)
                self._steps.setdefault(draw.step, {})[group.group_id] = group
        elif after.step > before.step:
            left = {draw.step for draw in after.rollouts.draws}
            self._steps = {step: one for step, one in self._steps.items() if step in left}

    def of(self, batch: Iterable[Portion]) -> list[KnownGroup]:
        """The groups of a batch, including groups left out in their places.

        Raises InternalError for a group that has not closed.
        """
        chosen: list[KnownGroup] = []
        for portion in batch:
            known = self._steps.get(portion.step)
            every, wanted = portion.groups is None, set(schedule.bits(portion.groups or 0))
            found = [one for one in (known or {}).values() if every or one.place in wanted]
            if known is None or not {group.place for group in found} >= wanted:
                message = "the groups of this step are not known"
                raise InternalError(message, seen=portion.step, allowed=sorted(self._steps))
            chosen += found
        return chosen

    def _finished(self, draw: DrawnStep, event: events.TasksFinished, leaves_out: bool) -> None:
        """Records a call's groups in the order of their places."""
        found = event.details.get(FIGURE)
        scored = found if isinstance(found, Mapping) else {}
        places = schedule.bits(draw.places) if draw.round else range(len(scored))
        known = self._steps.setdefault(draw.step, {})
        if not draw.round:
            known.clear()  # agents may have brought other groups to an earlier call
        for place, (group_id, sessions) in zip(places, scored.items(), strict=False):
            left_out = leaves_out and bool(event.equal_rewards >> place & 1)
            known[group_id] = KnownGroup(place, group_id, int(sessions), left_out)
