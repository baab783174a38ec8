"""Versions on disk, so that restarted and late readers load them without a trainer. Owns the
directory; single writer.

Layout: `<dir>/<target>-<version>/{model.safetensors,manifest.json}`, a config.json beside them
where the manifest's metadata has one, and `<dir>/versions.json` (the last sets committed, newest
last, the drafter that served before the newest one's, and their sha256). What lies on disk is read
against its hashes (integrity.py) before anybody loads it. Every write goes to a temporary name, is
synced and renamed, so that a kill at any point leaves either the old state or the new one. The
epochs.json beside them is the receiver's (paceline.rpc.epochs).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from paceline.errors import DataLoss, InvalidInput, NotFound, ResourceExhausted, WeightsError
from paceline.tagged_json import from_object, to_object
from paceline.telemetry import get_logger
from paceline.trajectory import VersionSet
from paceline.v1.weights_pb2 import Manifest
from paceline.weights.integrity import (
    CONFIG_FILE,
    MANIFEST,
    TENSORS,
    check_spooled,
    hash_of,
    header_of,
    read_manifest,
)
from paceline.weights.manifest import (
    CONFIG,
    TARGET_NAMES,
    check_manifest,
    chunk_span,
    target_name,
)
from paceline.weights.metrics import VERSIONS_DAMAGED

_log = get_logger(__name__)
_DRAFTER = 2
_DIRECTORY = re.compile(r"(policy|drafter|policy_head)-(\d+)")
_TARGETS = {name: target for target, name in TARGET_NAMES.items()}
_TEMPORARY = ".tmp-"

Part = tuple[int, int]
"""(target, version)."""


class Spool:
    """The last `keep` committed sets, the drafter that served before the newest one's, and what is
    prepared for the next.

    `initial` names the directories of versions 0, which are never written here.
    """

    def __init__(
        self, directory: Path, keep: int = 2, *, initial: Mapping[int, Path] | None = None
    ) -> None:
        if keep < 1:
            raise InvalidInput("a spool keeps at least one set", seen=keep, allowed=">= 1")
        self._directory = Path(directory)
        self._keep = keep
        self._initial = dict(initial or {})
        self._directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        self._damaged: set[Part] = set()  # as the last check of each has it
        self.unknown = ""
        """What is wrong with versions.json; while it is, no version goes."""
        self._former_drafter: int | None = None
        self._sets = self._read_sets()
        self._prepared = {part for part in self.spooled() if not self._committed(part)}

    @property
    def serving(self) -> VersionSet | None:
        """Set committed last; None before the first commit, and while nobody knows it."""
        return self._sets[-1] if self._sets else None

    @property
    def previous(self) -> VersionSet | None:
        """Set committed before the serving one."""
        return self._sets[-2] if len(self._sets) > 1 else None

    @property
    def prepared(self) -> frozenset[Part]:
        """Parts written and not yet committed, also those found at the start."""
        return frozenset(self._prepared)

    @property
    def damaged(self) -> frozenset[Part]:
        """Parts of the serving set that the last check found damaged or gone."""
        return frozenset(part for part in self._damaged if self._named(part, self._sets[-1:]))

    def path(self, target: int, version: int) -> Path:
        """Directory of a version; NotFound when it is not here."""
        path = self._directory / f"{target_name(target)}-{version}"
        if path.is_dir():
            return path
        if version == 0 and target in self._initial:
            return self._initial[target]
        here = sorted(part[1] for part in self.spooled() if part[0] == target)
        raise NotFound(f"{target_name(target)} version is not spooled", seen=version, allowed=here)

    def has(self, target: int, version: int) -> bool:
        """Whether `path` finds the version."""
        return (self._directory / f"{target_name(target)}-{version}").is_dir() or (
            version == 0 and target in self._initial
        )

    def manifest(self, target: int, version: int) -> Manifest | None:
        """Manifest of a spooled version; None when it is not spooled."""
        path = self._directory / f"{target_name(target)}-{version}"
        return read_manifest(path) if path.is_dir() else None

    def check(self, target: int, version: int) -> None:
        """Raises DataLoss when a file of a spooled version is not what was written, or one that a
        kept set names is gone; a version 0 need not be here.
        """
        path = self._directory / f"{target_name(target)}-{version}"
        try:
            if path.is_dir():
                check_spooled(path)
            elif version and self._kept((target, version)):
                raise DataLoss(f"{path} is gone", seen="no directory")
        except DataLoss as error:
            self._damaged.add((target, version))
            VERSIONS_DAMAGED.record(target=target_name(target))
            _log.error("version_damaged", version=path.name, error=str(error))
            raise
        self._damaged.discard((target, version))

    def check_sets(self) -> None:
        """Raises DataLoss until the next commit when versions.json was damaged at the start."""
        if self.unknown:
            raise DataLoss("nobody knows which set serves", seen=self.unknown)

    def remove(self, target: int, version: int) -> None:
        """Removes a version whatever names it, so that it can be written again."""
        self._prepared.discard((target, version))
        if (target, version) in self.spooled():
            self._remove((target, version))

    def read_chunk(self, manifest: Manifest, index: int) -> bytes:
        """Bytes of one chunk of a spooled version. Raises DataLoss when the file ends before it."""
        start, end = chunk_span(manifest, index)
        path = self.path(manifest.target, manifest.version) / "model.safetensors"
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            file.seek(8 + header + start)
            data = file.read(end - start)
        if len(data) != end - start:
            raise DataLoss(f"{path} ends inside chunk {index}", seen=len(data), allowed=end - start)
        return data

    def write(self, manifest: Manifest, buffer: memoryview | bytes | bytearray) -> Path:
        """Writes one version durably and returns its directory; the same version again replaces
        nothing.

        `buffer` is the whole stream of the manifest. Raises WeightsError when a different manifest
        is spooled already, ResourceExhausted when the file cannot be written.
        """
        check_manifest(manifest, max_bytes=len(buffer))
        if len(buffer) != manifest.total_bytes:
            raise InvalidInput(
                "buffer is not the manifest's stream",
                seen=len(buffer),
                allowed=manifest.total_bytes,
            )

        spooled = self.manifest(manifest.target, manifest.version)
        name = f"{target_name(manifest.target)}-{manifest.version}"
        if spooled is not None and spooled != manifest:
            raise WeightsError(
                f"{name} is spooled with another content", seen=manifest.content_hash
            )

        path = self._directory / name
        if spooled is None:
            try:
                self._write_new(manifest, buffer, path)
            except OSError as error:
                self._remove_leftovers()
                raise ResourceExhausted(f"{path} cannot be written", seen=error) from error
            self._damaged.discard((manifest.target, manifest.version))

        if not self._committed((manifest.target, manifest.version)):
            self._prepared.add((manifest.target, manifest.version))
        return path

    def commit(self, versions: VersionSet) -> None:
        """Makes the set the serving one, atomically; removes what neither a kept set nor a later
        prepared one needs.
        """
        serving = self.serving
        if serving is not None and versions.seq <= serving.seq:
            raise WeightsError(
                "seq of a commit must grow", seen=versions.seq, allowed=f"> {serving.seq}"
            )

        sets = [*self._sets, versions][-self._keep :]
        changes = serving is not None and serving.drafter != versions.drafter
        former = serving.drafter if serving and changes else self._former_drafter
        temporary = self._directory / f"{_TEMPORARY}versions.json"
        listed = [*map(to_object, sets)]
        described: dict[str, Any] = {"sets": listed, "sha256": _hash_of_sets(listed, former)}
        if former is not None:
            described["former_drafter"] = former
        _write_synced(temporary, json.dumps(described).encode())
        temporary.rename(self._directory / "versions.json")
        _sync_directory(self._directory)
        self._sets, self._former_drafter, self.unknown = sets, former, ""
        committed = {target: part_version(versions, target) for target in TARGET_NAMES}
        self._prepared = {
            (target, version) for target, version in self._prepared if version > committed[target]
        }
        self._prune()

    def discard(self, target: int, version: int) -> None:
        """Forgets a prepared version; one that a kept set names stays."""
        if not self._committed((target, version)):
            self._prepared.discard((target, version))
            self._prune()

    def _write_new(
        self, manifest: Manifest, buffer: memoryview | bytes | bytearray, path: Path
    ) -> None:
        temporary = self._directory / f"{_TEMPORARY}{path.name}"
        temporary.mkdir()
        text = json_format.MessageToJson(manifest, indent=None).encode()
        content = manifest.content_hash or hash_of(manifest, buffer)
        _write_synced(temporary / TENSORS, header_of(manifest, text, content), buffer)
        _write_synced(temporary / MANIFEST, text)
        if CONFIG in manifest.metadata:
            _write_synced(temporary / CONFIG_FILE, manifest.metadata[CONFIG].encode())
        _sync_directory(temporary)
        temporary.rename(path)
        _sync_directory(self._directory)

    def _prune(self) -> None:
        for part in self.spooled():
            if part not in self._prepared and not self._committed(part):
                self._remove(part)

    def _remove(self, part: Part) -> None:
        # The rename makes the removal atomic for readers: a version is whole or absent.
        name = f"{TARGET_NAMES[part[0]]}-{part[1]}"
        gone = (self._directory / name).rename(self._directory / f"{_TEMPORARY}gone-{name}")
        shutil.rmtree(gone)

    def _committed(self, part: Part) -> bool:
        return bool(self.unknown) or self._kept(part)

    def _kept(self, part: Part) -> bool:
        return part == (_DRAFTER, self._former_drafter) or self._named(part, self._sets)

    @staticmethod
    def _named(part: Part, sets: list[VersionSet]) -> bool:
        return any(part_version(one, part[0]) == part[1] for one in sets)

    def spooled(self) -> set[Part]:
        """Parts whose directory is here."""
        matches = (
            _DIRECTORY.fullmatch(path.name) for path in self._directory.iterdir() if path.is_dir()
        )
        return {(_TARGETS[match[1]], int(match[2])) for match in matches if match}

    def _remove_leftovers(self) -> None:
        for path in self._directory.glob(f"{_TEMPORARY}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _read_sets(self) -> list[VersionSet]:
        path = self._directory / "versions.json"
        if not path.is_file():
            return []
        try:
            described = json.loads(path.read_text())
            sets, former = described["sets"], described.get("former_drafter")
            if described["sha256"] != _hash_of_sets(sets, former):
                raise ValueError("the sets are not those that were written")
            found = [from_object(VersionSet, one) for one in sets][-self._keep :]
            self._former_drafter = former
            return found
        except (ValueError, KeyError, TypeError, RecursionError, DataLoss) as error:
            self.unknown = f"{path} is damaged: {str(error)[:120]}"
            VERSIONS_DAMAGED.record(target="sets")
            _log.error("sets_damaged", error=self.unknown)
            return []


def part_version(versions: VersionSet, target: int) -> int:
    """Version of a set's part; the head is the policy's."""
    return versions.drafter if target == _DRAFTER else versions.policy


def _hash_of_sets(sets: list[Any], former_drafter: int | None) -> str:
    hashed = sets if former_drafter is None else [sets, former_drafter]
    return hashlib.sha256(json.dumps(hashed).encode()).hexdigest()


def _write_synced(path: Path, *parts: memoryview | bytes | bytearray) -> None:
    with path.open("wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
