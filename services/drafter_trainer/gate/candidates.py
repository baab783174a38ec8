"""Keeps promoted drafters on disk, for pushes, comparisons and rollbacks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import DataLoss
from paceline.models.config import ModelConfig
from paceline.speculators.kinds import SpeculatorKind
from paceline.speculators.net import DraftNet, read_drafter
from paceline.telemetry import get_logger
from paceline.whole_files import check_hashes, write_hashes

KEPT = 4
log = get_logger(__name__)


class Candidates:
    """`<directory>/drafter-<version>`: the newest KEPT versions, the serving version and its
    predecessor.
    """

    def __init__(
        self, directory: Path, target: ModelConfig, own: Sequence[SpeculatorKind] = ()
    ) -> None:
        """`own`: a user's kinds outside the table of speculators."""
        self._directory, self._target, self._own = directory, target, tuple(own)
        self._needed: list[int] = []

    def path(self, version: int) -> Path:
        """Directory of a version."""
        return self._directory / f"drafter-{version}"

    @property
    def versions(self) -> list[int]:
        """Versions on disk, oldest first."""
        found = self._directory.glob("drafter-*/model.safetensors")
        return sorted(int(file.parent.name.removeprefix("drafter-")) for file in found)

    def save(self, version: int, net: DraftNet) -> Path:
        """Writes a version, and removes old versions."""
        path = self.path(version)
        net.save(path)
        write_hashes(path)
        for old in self.versions[:-KEPT]:
            if old not in self._needed:
                shutil.rmtree(self.path(old))
        return path

    def load(self, version: int) -> DraftNet | None:
        """The drafter of a version, ready for inference; None if it is absent or damaged."""
        if version not in self.versions:
            return None
        try:
            check_hashes(self.path(version))
        except DataLoss as error:
            log.error("drafter is damaged", drafter_version=version, error=str(error))
            return None
        return read_drafter(self.path(version), self._target, self._own).eval()

    def serves(self, version: int) -> None:
        """Keeps this version and its predecessor in service."""
        if version not in self._needed[-1:]:
            self._needed = [*self._needed[-1:], version]
