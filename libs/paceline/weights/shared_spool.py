"""A spool as another process than its writer sees it: several of one host load from one."""

from __future__ import annotations

from paceline.weights.spool import Spool


class SharedSpool(Spool):
    """Read only. What is committed is asked of the disk each time: the writer goes on beside it."""

    def check(self, target: int, version: int) -> None:
        """See Spool.check."""
        self._look()
        super().check(target, version)

    def check_sets(self) -> None:
        """See Spool.check_sets."""
        self._look()
        super().check_sets()

    def _look(self) -> None:
        self._sets = self._sets.as_they_are_now()

    def _remove_leftovers(self) -> None:
        """They may be what the writer writes now."""
