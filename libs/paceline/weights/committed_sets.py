"""The last committed sets in versions.json, newest last, with the drafter before the newest one's
and a sha256.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.errors import DataLoss
from paceline.tagged_json import from_object, to_object
from paceline.telemetry import get_logger
from paceline.trajectory import VersionSet
from paceline.v1.engine_pb2 import WEIGHT_TARGET_DRAFTER
from paceline.weights.metrics import VERSIONS_DAMAGED
from paceline.whole_files import replace_synced

FILE = "versions.json"

Part = tuple[int, int]
"""(target, version)."""

_log = get_logger(__name__)


class CommittedSets:
    """The last `keep` committed sets of a directory. A kill leaves either the old file or the new
    one.
    """

    def __init__(self, directory: Path, keep: int, start: VersionSet) -> None:
        """`start`: the set that serves before the first commit."""
        self._start = start
        self._file = directory / FILE
        self._keep = keep
        self.unknown = ""
        """The fault of the file; "" once a set was committed since."""
        self._former_drafter: int | None = None
        self._sets = self._read()

    @property
    def serving(self) -> VersionSet | None:
        """The newest set; None before the first commit, and while the file is unreadable."""
        return self._sets[-1] if self._sets else None

    @property
    def previous(self) -> VersionSet | None:
        """The set before the serving one."""
        return self._sets[-2] if len(self._sets) > 1 else None

    @property
    def serves(self) -> VersionSet:
        """The serving set: the start set before the first commit, and while the file is
        unreadable.
        """
        return self.serving or self._start

    @property
    def former(self) -> VersionSet | None:
        """The set that a commit may return to: the set before the serving one, or the start set
        after the first commit; None before it.
        """
        return None if self.serving is None else self.previous or self._start

    def check(self) -> None:
        """Raises DataLoss until the next commit when the file was damaged at the start."""
        if self.unknown:
            raise DataLoss("the serving set is unknown", seen=self.unknown)

    def names(self, part: Part) -> bool:
        """Whether a kept set contains the part, or the part is the drafter before the
        serving one.
        """
        drafter_before = (WEIGHT_TARGET_DRAFTER, self._former_drafter)
        return part == drafter_before or named(part, self._sets)

    def commit(self, versions: VersionSet) -> None:
        """Makes the set the serving one. After this call returns, that also survives a loss of
        power. The caller has checked that its seq grows.
        """
        serving = self.serving
        sets = [*self._sets, versions][-self._keep :]
        changes = serving is not None and serving.drafter != versions.drafter
        former = serving.drafter if serving and changes else self._former_drafter
        self._write(sets, former)
        self.unknown = ""

    def take_back(self) -> None:
        """Drops the serving set; the set before it serves again."""
        self._write(self._sets[:-1], None)

    def _write(self, sets: list[VersionSet], former_drafter: int | None) -> None:
        listed = [*map(to_object, sets)]
        described: dict[str, Any] = {"sets": listed, "sha256": _hash_of(listed, former_drafter)}
        if former_drafter is not None:
            described["former_drafter"] = former_drafter
        replace_synced(self._file, json.dumps(described).encode())
        self._sets, self._former_drafter = sets, former_drafter

    def _read(self) -> list[VersionSet]:
        if not self._file.is_file():
            return []
        try:
            described = json.loads(self._file.read_text())
            sets, former = described["sets"], described.get("former_drafter")
            if described["sha256"] != _hash_of(sets, former):
                raise ValueError("the sets are not those that were written")
            found = [from_object(VersionSet, one) for one in sets][-self._keep :]
            self._former_drafter = former
            return found
        except (ValueError, KeyError, TypeError, RecursionError, DataLoss) as error:
            self.unknown = f"{self._file} is damaged: {str(error)[:120]}"
            VERSIONS_DAMAGED.record(target="sets")
            _log.error("sets_damaged", error=self.unknown)
            return []


def part_version(versions: VersionSet, target: int) -> int:
    """Version of a set's part; the head has the policy's version."""
    return versions.drafter if target == WEIGHT_TARGET_DRAFTER else versions.policy


def named(part: Part, sets: Iterable[VersionSet]) -> bool:
    """Whether one of the sets contains the part."""
    return any(part_version(one, part[0]) == part[1] for one in sets)


def _hash_of(sets: list[Any], former_drafter: int | None) -> str:
    hashed = sets if former_drafter is None else [sets, former_drafter]
    return hashlib.sha256(json.dumps(hashed).encode()).hexdigest()
