"""A spool as another process than its writer sees it: several of one host load from one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.weights.committed_sets import CommittedSets
from paceline.weights.spool import Spool


class SharedSpool(Spool):
    """Read only. What is committed is asked of the disk each time: the writer goes on beside it."""

    def __init__(
        self,
        directory: Path,
        keep: int = 2,
        *,
        initial: Mapping[int, Path] | None = None,
        profile: str = "",
    ) -> None:
        self._kept = keep
        super().__init__(directory, keep, initial=initial, profile=profile)

    def check(self, target: int, version: int) -> None:
        """See Spool.check."""
        self._look()
        super().check(target, version)

    def check_sets(self) -> None:
        """See Spool.check_sets."""
        self._look()
        super().check_sets()

    def _look(self) -> None:
        self._sets = CommittedSets(self._directory, self._kept)

    def _remove_leftovers(self) -> None:
        """They may be what the writer writes now."""
