"""Versions on disk, so that restarted and late readers load them without a trainer. The directory
has a single writer.

Layout: `<dir>/<target>-<version>/{model.safetensors,manifest.json}`, a config.json beside them if
the manifest's metadata has one, and `<dir>/versions.json` (committed_sets.py). Files are checked
against their hashes (manifest.py) before they are loaded. Every write uses a temporary name and is
renamed, so a kill leaves either the old state or the new one. A version is synced before a set with
it is committed. The receiver's epochs.json is beside them (paceline.rpc.epochs).
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path

from google.protobuf import json_format

from paceline.errors import DataLoss, NotFound, ResourceExhausted, WeightsError
from paceline.processor import HUGE_PAGE
from paceline.telemetry import get_logger
from paceline.tensors import DOCUMENTS
from paceline.trajectory import VersionSet
from paceline.v1.weights_pb2 import Manifest
from paceline.weights import chunks
from paceline.weights import manifest as manifests
from paceline.weights.committed_sets import CommittedSets, Part, named, part_version
from paceline.weights.metrics import VERSIONS_DAMAGED
from paceline.whole_files import DISK_FULL, TEMPORARY, is_open, sync_file, sync_path, writing

_log = get_logger(__name__)
_READ_BYTES = 16 << 20
_DIRECTORY = re.compile(r"(policy|drafter|policy_head)-(\d+)")
_TARGETS = {name: target for target, name in manifests.TARGET_NAMES.items()}


class Spool:
    """The last `keep` committed sets, the drafter before the newest set's, and versions prepared
    for the next set.

    `initial` names the directories of versions 0, which are never written here. `profile` is the
    policy's number format until a set names another.
    """

    def __init__(
        self,
        directory: Path,
        keep: int = 2,
        *,
        initial: Mapping[int, Path] | None = None,
        profile: str = "",
    ) -> None:
        self._directory = Path(directory)
        self._initial = dict(initial or {})
        self._directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        self._damaged: set[Part] = set()  # from the last check of each part
        self.sets = CommittedSets(self._directory, keep, VersionSet(profile=profile))
        """The committed sets. While versions.json is damaged, no version is removed."""
        self._prepared = {part for part in self.spooled() if not self._committed(part)}

    @property
    def prepared(self) -> frozenset[Part]:
        """Parts written and not yet committed, including parts found at the start."""
        return frozenset(self._prepared)

    @property
    def damaged(self) -> frozenset[Part]:
        """Parts of the serving set that the last check found damaged or gone."""
        # a copy: checks in other threads change the set
        serving, damaged = self.sets.serving, tuple(self._damaged)
        return frozenset(part for part in damaged if serving and named(part, [serving]))

    def path(self, target: int, version: int) -> Path:
        """Directory of a version; raises NotFound when it is absent."""
        path = self._folder(target, version)
        if path.is_dir():
            return path
        if version == 0 and target in self._initial:
            return self._initial[target]
        here = sorted(part[1] for part in self.spooled() if part[0] == target)
        name = manifests.target_name(target)
        raise NotFound(f"{name} version is not spooled", seen=version, allowed=here)

    def has(self, target: int, version: int) -> bool:
        """Whether `path` finds the version."""
        initial = version == 0 and target in self._initial
        return initial or self._folder(target, version).is_dir()

    def manifest(self, target: int, version: int) -> Manifest | None:
        """Manifest of a spooled version; None when it is absent."""
        path = self._folder(target, version)
        return manifests.read_manifest(path) if path.is_dir() else None

    def check(self, target: int, version: int) -> None:
        """Raises DataLoss when a file of a spooled version has changed, or when a version of a kept
        set is absent. A version 0 may be absent.
        """
        path = self._folder(target, version)
        try:
            if path.is_dir():
                manifests.check_spooled(path)
            elif version and self.sets.names((target, version)):
                raise DataLoss(f"{path} is gone", seen="no directory")
        except DataLoss as error:
            self._damaged.add((target, version))
            VERSIONS_DAMAGED.record(target=manifests.target_name(target))
            _log.error("version_damaged", version=path.name, error=str(error))
            raise
        self._damaged.discard((target, version))

    def check_room(self, nbytes: int) -> None:
        """Raises ResourceExhausted, with the reason of a full disk, when so many more bytes find no
        room.
        """
        if nbytes > shutil.disk_usage(self._directory).free:
            for spare in map(self._spare_file, manifests.TARGET_NAMES):
                spare.unlink(missing_ok=True)
        free = shutil.disk_usage(self._directory).free
        if nbytes > free:
            message = f"no room for a version in {self._directory}"
            reason = DISK_FULL
            allowed = f"{free} bytes are free"
            raise ResourceExhausted(message, reason=reason, seen=f"{nbytes} bytes", allowed=allowed)

    def room_for(self, nbytes: int) -> memoryview:
        """As chunks.room_for, in a file of the spool if memory lacks room."""
        return chunks.room_for(nbytes, self._directory)

    def remove(self, target: int, version: int) -> None:
        """Removes a version, even one of a kept set, so that it can be written again."""
        self._prepared.discard((target, version))
        if (target, version) in self.spooled():
            self._remove((target, version))

    def read_chunk(self, manifest: Manifest, index: int) -> bytes:
        """Bytes of one chunk of a spooled version. Raises DataLoss when the file ends before it."""
        start, end = chunks.chunk_span(manifest, index)
        data = bytearray(end - start)
        path = self.path(manifest.target, manifest.version) / manifests.TENSORS
        with path.open("rb", buffering=0) as file:
            if (read := _read_at(file, start, memoryview(data))) != len(data):
                raise DataLoss(f"{path} ends inside chunk {index}", seen=read, allowed=len(data))
        return bytes(data)

    def read_content(self, target: int, version: int, content: memoryview) -> None:
        """Fills `content`, which has the same length, with a spooled version's content. Raises
        NotFound, and DataLoss when the file ends early.
        """
        path = self.path(target, version) / manifests.TENSORS
        with path.open("rb", buffering=0) as file:
            starts = range(0, len(content), _READ_BYTES)
            pieces = ((start, content[start : start + _READ_BYTES]) for start in starts)
            read = sum(chunks.in_threads(lambda piece: _read_at(file, *piece), pieces))
        if read != len(content):
            raise DataLoss(f"{path} ends before its content", seen=read, allowed=len(content))

    def write(self, manifest: Manifest, buffer: memoryview | bytes | bytearray) -> Path:
        """Writes one version and returns its directory; the same version again replaces nothing. A
        power loss may damage the version until `sync` has returned.

        `buffer` is the whole stream of the manifest, which is checked. Raises WeightsError when a
        different manifest is spooled already, ResourceExhausted when the file cannot be written.
        """
        part = (manifest.target, manifest.version)
        spooled, path = self.manifest(*part), self._folder(*part)
        if spooled is not None and spooled != manifest:
            message = f"{path.name} is spooled with another content"
            raise WeightsError(message, seen=manifest.content_hash)
        if spooled is None:
            try:
                with writing(path):
                    self._write_new(manifest, buffer, path)
            except ResourceExhausted:
                self._remove_leftovers()
                raise
            self._damaged.discard(part)
        if not self._committed(part):
            self._prepared.add(part)
        return path

    def sync(self, target: int, version: int, synced: Callable[[], None] = lambda: None) -> None:
        """Syncs a written version to the disk; calls `synced` after each part. A second call costs
        nothing. Raises ResourceExhausted when the disk does not keep it.
        """
        path = self._folder(target, version)
        with writing(path):
            for file in path.iterdir():
                sync_file(file, synced)
            sync_path(path)
            sync_path(self._directory)

    def commit(self, versions: VersionSet) -> None:
        """Makes the set the serving one, atomically. Removes versions that neither a kept set nor a
        later prepared one needs. After a return to the former set, the parts of the left set count
        as prepared.
        """
        left = self.sets.serving
        if left is not None and versions == self.sets.former:
            self.sets.take_back()
            parts = {(target, part_version(left, target)) for target in manifests.TARGET_NAMES}
            self._prepared |= {one for one in parts & self.spooled() if not self._committed(one)}
        else:
            for target, version in self._prepared:
                if version == part_version(versions, target):
                    self.sync(target, version)  # another process may have written the version
            self.sets.commit(versions)
        self._prepared = {
            part for part in self._prepared if part[1] > part_version(versions, part[0])
        }
        self._prune()

    def discard(self, target: int, version: int) -> None:
        """Drops a prepared version; a version of a kept set stays."""
        if not self._committed((target, version)):
            self._prepared.discard((target, version))
            self._prune()

    def _write_new(
        self,
        manifest: Manifest,
        buffer: memoryview | bytes | bytearray,
        path: Path,
    ) -> None:
        temporary = self._directory / f"{TEMPORARY}{path.name}"
        temporary.mkdir()
        text = json_format.MessageToJson(manifest, indent=None).encode()
        content = manifest.content_hash or manifests.hash_of(manifest, buffer)
        header = manifests.header_of(manifest, text, content)
        tensors, spare = temporary / manifests.TENSORS, self._spare_file(manifest.target)
        if spare.exists():
            spare.rename(tensors)
        tensors.touch()
        with tensors.open("r+b") as file:
            file.writelines((header, buffer))
            file.truncate()
        (temporary / manifests.MANIFEST).write_bytes(text)
        for key, name in DOCUMENTS.items():
            if key in manifest.metadata:
                (temporary / name).write_text(manifest.metadata[key], encoding="utf-8")
        temporary.rename(path)

    def _prune(self) -> None:
        for part in self.spooled():
            if part not in self._prepared and not self._committed(part):
                self._remove(part)

    def _remove(self, part: Part) -> None:
        # The rename makes the removal atomic for readers: a version is whole or absent.
        path = self._folder(*part)
        gone = path.rename(self._directory / f"{TEMPORARY}gone-{path.name}")
        tensors = gone / manifests.TENSORS
        large = tensors.exists() and tensors.stat().st_size >= HUGE_PAGE
        if large and not is_open(tensors):
            # Its pages in memory are cheaper to overwrite than new pages to get.
            tensors.replace(self._spare_file(part[0]))
        shutil.rmtree(gone)

    def _spare_file(self, target: int) -> Path:
        """The file of a removed version, for the target's next version."""
        return self._directory / f"{TEMPORARY}spare-{manifests.target_name(target)}"

    def _committed(self, part: Part) -> bool:
        return bool(self.sets.unknown) or self.sets.names(part)

    def _folder(self, target: int, version: int) -> Path:
        return self._directory / f"{manifests.target_name(target)}-{version}"

    def spooled(self) -> set[Part]:
        """Parts with a directory in the spool."""
        matches = (
            _DIRECTORY.fullmatch(path.name) for path in self._directory.iterdir() if path.is_dir()
        )
        return {(_TARGETS[match[1]], int(match[2])) for match in matches if match}

    def _remove_leftovers(self) -> None:
        for path in self._directory.glob(f"{TEMPORARY}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _read_at(file: FileIO, start: int, into: memoryview) -> int:
    """Reads the tensors' bytes from `start` on, in several threads; returns the number of bytes."""
    offset = 8 + int.from_bytes(os.pread(file.fileno(), 8, 0), "little") + start
    done = 0
    while done < len(into) and (read := os.preadv(file.fileno(), [into[done:]], offset + done)):
        done += read
    return done
