"""A read-only spool in another process than its writer, for several readers on one host."""

from __future__ import annotations

from paceline.weights.spool import Spool


class SharedSpool(Spool):
    """A read-only spool. It reads the committed sets from the disk each time, since the writer
    continues beside it.
    """

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
        """Leaves temporary files alone, since the writer may be writing them."""
