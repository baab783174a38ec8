"""Keeps the groups that closed with the steps' rollouts: what the policy trainer waits for.

Built from the run's events alone, like its records, so that a restarted coordinator asks for the
same groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from coordinator.machine import events
from coordinator.machine.events import Event
from coordinator.machine.rollout import draw_of
from coordinator.machine.state import Portion, State
from paceline.errors import InternalError
from paceline.v1.rollout_pb2 import ClosedGroup

FIGURE = "closed_groups"
"""Where the details of TasksFinished hold them: group id -> scored sessions."""

GroupSize = tuple[int, str, int]
"""Place of a group in its step, its id, its scored sessions."""


def group_figure(closed: Iterable[ClosedGroup]) -> dict[str, float | int]:
    """Groups of a message, in its order."""
    return {group.group_id: group.scored_sessions for group in closed}


class ClosedGroups:
    """Groups of the steps of which some are not trained yet."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, tuple[str, int]]] = {}

    def take_up(self, kept: Mapping[str, Sequence[GroupSize]]) -> None:
        """Goes on from what `kept` had."""
        self._steps = {
            int(step): {place: (group, size) for place, group, size in groups}
            for step, groups in kept.items()
        }

    def kept(self) -> dict[str, tuple[GroupSize, ...]]:
        """Everything, for a snapshot."""
        return {
            str(step): tuple((place, *group) for place, group in groups.items())
            for step, groups in self._steps.items()
        }

    def observe(self, before: State, event: Event, after: State) -> None:
        """Takes one transition in; late news of rollouts that were begun again changes nothing."""
        if isinstance(event, events.GroupClosed) and after is not before:
            if (draw := draw_of(before, event.epoch)) is not None:
                self._of(draw.step)[event.index] = (event.group_id, event.sessions)
        elif isinstance(event, events.TasksFinished):
            if (draw := draw_of(before, event.epoch)) is not None:
                found = event.details.get(FIGURE)
                groups = found if isinstance(found, Mapping) else {}
                closed = {i: (one, int(n)) for i, (one, n) in enumerate(groups.items())}
                self._steps[draw.step] = closed
        elif after.step > before.step:
            left = {draw.step for draw in after.rollouts.draws}
            self._steps = {step: one for step, one in self._steps.items() if step in left}

    def of(self, batch: Iterable[Portion]) -> dict[str, int]:
        """Scored sessions by group, of a batch.

        Raises InternalError for a group that is not known to have closed.
        """
        chosen: dict[str, int] = {}
        for portion in batch:
            known = self._steps.get(portion.step)
            wanted = known if portion.groups is None else _places(portion.groups)
            if known is None or wanted is None or not known.keys() >= set(wanted):
                raise InternalError(
                    "the groups of this step are not known",
                    seen=portion.step,
                    allowed=sorted(self._steps),
                )
            chosen.update(known[place] for place in wanted)
        return chosen

    def _of(self, step: int) -> dict[int, tuple[str, int]]:
        return self._steps.setdefault(step, {})


def _places(bits: int) -> list[int]:
    return [place for place in range(bits.bit_length()) if bits >> place & 1]
