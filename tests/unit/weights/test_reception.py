"""A version is in use only after the disk keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import pytest
from whole_versions import build_manifest

from paceline import whole_files
from paceline.errors import ResourceExhausted
from paceline.tensors import NamedTensor
from paceline.trajectory import VersionSet
from paceline.v1.engine_pb2 import WEIGHT_TARGET_POLICY
from paceline.v1.weights_pb2 import PushRequest
from paceline.weights.chunks import checked_range
from paceline.weights.reception import Reception
from paceline.weights.spool import Spool

PART = (WEIGHT_TARGET_POLICY, 1)
CONTENT = bytes(range(256)) * 20


class Loaded:
    """A receiver that notes versions loaded beside the serving one."""

    def __init__(self) -> None:
        self.versions: set[tuple[int, int]] = set()

    async def on_prepared(self, target: int, version: int, path: Path) -> None:
        self.versions.add((target, version))

    async def on_commit(
        self, versions: VersionSet, mode: int, leased: Collection[int], *, judge: bool | None = None
    ) -> None: ...

    async def on_abort(self, target: int, version: int) -> None:
        self.versions.remove((target, version))


async def receive(one: Reception) -> None:
    manifest = build_manifest(PART[0], PART[1], [NamedTensor("w", "U8", (5120,), CONTENT)])
    await one.prepare(manifest)
    crc = checked_range(0, memoryview(CONTENT)).crc32
    one.receiving(PART).place(
        PushRequest(target=PART[0], version=PART[1], chunk_index=0, crc32=crc, data=CONTENT)  # type: ignore[arg-type]
    )
    await one.finish(PART, len(CONTENT))


def test_a_version_that_the_disk_does_not_keep_is_dropped_and_may_be_pushed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    spool, hooks = Spool(tmp_path), Loaded()
    one = Reception(spool, hooks, (PART[0],))
    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(ResourceExhausted, match="Input/output"):
        asyncio.run(receive(one))
    assert (hooks.versions, spool.spooled()) == (set(), set())
    monkeypatch.undo()
    asyncio.run(receive(one))
    assert hooks.versions == spool.spooled() == {PART}


def test_large_files_are_synced_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_files, "PART_BYTES", 1 << 12)
    file, parts = tmp_path / "file", list[None]()
    file.write_bytes(bytes(10_000))
    whole_files.sync_file(file, lambda: parts.append(None))
    assert len(parts) == 3
