"""Refuses commands of another run, and of leases that a newer one has replaced."""

from __future__ import annotations

import re
from collections import OrderedDict

from paceline.config.shared import RUN_ID
from paceline.errors import InvalidInput, StaleEpoch
from paceline.v1.trajectory_pb2 import CommandContext

_RUNS_KEPT = 64


def check_run(context: CommandContext, run_id: str) -> None:
    """Raises InvalidInput when a command is of another run than this service."""
    if context.run_id != run_id:
        raise InvalidInput("this trainer serves another run", seen=context.run_id, allowed=run_id)


class EpochGuard:
    """Refuses commands of leases that a newer one has replaced. For use on one event loop."""

    def __init__(self) -> None:
        self._highest: OrderedDict[str, int] = OrderedDict()

    def check(self, context: CommandContext) -> None:
        """Remember the command's epoch.

        Raises StaleEpoch when a higher epoch was seen for that run, InvalidInput when the command
        names no run.
        """
        run, epoch = context.run_id, context.epoch
        if not re.fullmatch(RUN_ID, run):
            raise InvalidInput(
                "a command names its run",
                reason="RUN_ID",
                seen=repr(run),
                allowed=RUN_ID,
            )

        highest = self._highest.get(run, 0)
        if epoch < highest:
            raise StaleEpoch(
                f"a newer lease of run {run} is in force", seen=epoch, allowed=f"at least {highest}"
            )

        self._highest[run] = epoch
        self._highest.move_to_end(run)
        if len(self._highest) > _RUNS_KEPT:
            self._highest.popitem(last=False)

    def highest(self, run_id: str) -> int:
        """Highest epoch seen for a run; 0 for a run never seen."""
        return self._highest.get(run_id, 0)
