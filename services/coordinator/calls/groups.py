"""Keeps the groups that closed with a step's rollouts: what the policy trainer waits for.

Built from the run's events alone, like its records, so that a restarted coordinator asks for the
same groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coordinator.machine import events
from coordinator.machine.events import Event
from coordinator.machine.state import State
from paceline.errors import InternalError
from paceline.v1.rollout_pb2 import ClosedGroup

FIGURE = "closed_groups"
"""Where the details of TasksFinished hold them: group id -> scored sessions."""


def group_figure(closed: Iterable[ClosedGroup]) -> dict[str, float | int]:
    """Groups of a message, in its order."""
    return {group.group_id: group.scored_sessions for group in closed}


class ClosedGroups:
    """Groups of the newest step whose rollouts have ended."""

    def __init__(self) -> None:
        self._step = -1
        self._groups: dict[str, int] = {}

    def observe(self, before: State, event: Event, after: State) -> None:
        """Takes one transition in; late news of rollouts that were begun again changes nothing."""
        if not isinstance(event, events.TasksFinished) or after.phase is before.phase:
            return
        found = event.details.get(FIGURE)
        groups = found if isinstance(found, Mapping) else {}
        self._step, self._groups = before.step, {group: int(size) for group, size in groups.items()}

    def of(self, step: int) -> Mapping[str, int]:
        """Scored sessions by group.

        Raises InternalError for a step whose rollouts are not the newest that ended.
        """
        if step != self._step:
            raise InternalError(
                "the groups of this step are not known", seen=step, allowed=self._step
            )
        return self._groups
