"""The spool: whole or absent after any interruption."""

from __future__ import annotations

import mmap
import resource
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from whole_versions import build_manifest

from paceline.errors import DataLoss, NotFound, ResourceExhausted, WeightsError
from paceline.tensors import from_numpy
from paceline.trajectory import VersionSet
from paceline.v1.engine_pb2 import WEIGHT_TARGET_DRAFTER, WEIGHT_TARGET_POLICY
from paceline.v1.weights_pb2 import Manifest
from paceline.weights import Spool
from paceline.whole_files import is_open

P, D = WEIGHT_TARGET_POLICY, WEIGHT_TARGET_DRAFTER


def version(target: int, number: int, size: int = 3000) -> tuple[Manifest, bytes]:
    array = np.full(size, number, dtype=np.float32)
    return build_manifest(target, number, [from_numpy("w", array)]), array.tobytes()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_committed_sets_survive_a_restart_and_older_ones_go(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in (1, 2, 3):
        spool.write(*version(P, number))
        spool.commit(VersionSet(number, number, 0))
    again = Spool(tmp_path)
    assert (again.sets.serving, again.sets.previous) == (VersionSet(3, 3, 0), VersionSet(2, 2, 0))
    assert names(tmp_path) == {"policy-2", "policy-3", "versions.json"}
    assert load_file(again.path(P, 3) / "model.safetensors")["w"][0] == 3


LARGE = 1 << 20


def serve(spool: Spool, *numbers: int, size: int = LARGE) -> None:
    for number in numbers:
        spool.write(*version(P, number, size))
        spool.commit(VersionSet(number, number, 0))


def tensors_of(spool: Spool, number: int) -> Path:
    return spool.path(P, number) / "model.safetensors"


def leases(directory: Path) -> bool:
    (directory / "probe").write_bytes(b"1")
    return not is_open(directory / "probe")


@pytest.mark.parametrize("size", [LARGE, LARGE - 1, LARGE + 1])
def test_the_file_of_a_removed_version_is_written_over_by_the_next_one(
    size: int, tmp_path: Path
) -> None:
    if not leases(tmp_path):
        pytest.skip("this file system grants no leases")
    spool = Spool(tmp_path / "spool")
    serve(spool, 1)
    first = tensors_of(spool, 1).stat().st_ino
    serve(spool, 2, 3)
    serve(spool, 4, size=size)
    assert tensors_of(spool, 4).stat().st_ino == first
    spool.check(P, 4)
    assert np.array_equal(load_file(tensors_of(spool, 4))["w"], np.full(size, 4.0))


def test_a_removed_version_that_a_reader_has_mapped_keeps_its_numbers(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    serve(spool, 1)
    with tensors_of(spool, 1).open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    serve(spool, 2, 3, 4)
    assert np.array_equal(np.frombuffer(held[-4 * LARGE :], "<f4"), np.full(LARGE, 1.0))
    spool.check(P, 4)


def test_a_kept_file_gives_way_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)
    serve(spool, 1, 2, 3)

    def usage(directory: Path) -> SimpleNamespace:
        kept = [*Path(directory).glob(".tmp-*")]
        return SimpleNamespace(free=0 if kept else 9 * LARGE)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    spool.check_room(4 * LARGE)
    assert names(tmp_path) == {"policy-2", "policy-3", "versions.json"}


def test_the_former_set_serves_again_and_the_left_version_may_be_committed_later(
    tmp_path: Path,
) -> None:
    spool = Spool(tmp_path)
    first, second = VersionSet(1, 1, 0), VersionSet(2, 2, 0)
    for number, versions in ((1, first), (2, second)):
        spool.write(*version(P, number))
        spool.commit(versions)
    spool.commit(first)
    assert (Spool(tmp_path).sets.serving, spool.prepared) == (first, {(P, 2)})
    spool.commit(VersionSet(3, 2, 0))
    assert names(tmp_path) == {"policy-1", "policy-2", "versions.json"}
    alone = Spool(tmp_path / "alone")
    alone.write(*version(P, 1))
    alone.commit(first)
    alone.commit(VersionSet())
    assert (alone.sets.serving, alone.prepared) == (None, {(P, 1)})


def test_four_sets_are_kept_on_request(tmp_path: Path) -> None:
    spool = Spool(tmp_path, keep=4)
    for number in range(1, 7):
        spool.write(*version(P, number))
        spool.commit(VersionSet(number, number, 0))
    assert names(tmp_path) == {"policy-3", "policy-4", "policy-5", "policy-6", "versions.json"}


def test_prepared_version_survives_commits_of_others_until_it_is_discarded(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.write(*version(D, 5))
    spool.write(*version(P, 1))
    spool.commit(VersionSet(1, 1, 0))
    assert Spool(tmp_path).prepared == {(D, 5)}
    spool.discard(D, 5)
    assert names(tmp_path) == {"policy-1", "versions.json"}
    spool.discard(P, 1)
    assert spool.has(P, 1), "what serves is never discarded"


def test_the_drafter_before_the_serving_one_stays_however_many_sets_follow(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in (1, 2):
        spool.write(*version(D, number))
        spool.commit(VersionSet(number, 0, number))
    for number in (3, 4, 5):
        spool.commit(VersionSet(number, 0, 2))
    spool = Spool(tmp_path)
    spool.commit(VersionSet(6, 0, 2))
    assert names(tmp_path) == {"drafter-1", "drafter-2", "versions.json"}
    spool.write(*version(D, 3))
    spool.commit(VersionSet(7, 0, 3))
    spool.commit(VersionSet(8, 0, 3))
    assert names(tmp_path) == {"drafter-2", "drafter-3", "versions.json"}


def test_a_former_drafter_that_was_changed_on_disk_is_found(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.commit(VersionSet(1, 0, 4))
    spool.commit(VersionSet(2, 0, 5))
    path = tmp_path / "versions.json"
    path.write_text(path.read_text().replace('"former_drafter": 4', '"former_drafter": 3'))
    assert "not those that were written" in Spool(tmp_path).sets.unknown


def test_leftovers_of_a_kill_are_ignored_and_removed(tmp_path: Path) -> None:
    Spool(tmp_path).write(*version(P, 1))
    (tmp_path / ".tmp-policy-2").mkdir()
    (tmp_path / ".tmp-policy-2" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-versions.json").write_text('{"sets"')
    spool = Spool(tmp_path)
    assert (spool.sets.serving, spool.prepared) == (None, {(P, 1)})
    assert names(tmp_path) == {"policy-1"}


TESTS = Path(__file__).parents[2]
KILLED = """
import sys
from pathlib import Path
import numpy as np
from paceline.tensors import from_numpy
from paceline.trajectory import VersionSet
from paceline.weights import Spool
sys.path.append(sys.argv[2])
from whole_versions import build_manifest
spool = Spool(Path(sys.argv[1]))
for number in range(1, 10_000):
    array = np.full(200_000, number, dtype=np.float32)
    spool.write(build_manifest(1, number, [from_numpy("w", array)]), array.tobytes())
    print("written", flush=True)
    spool.commit(VersionSet(number, number, 0))
    print("committed", number, flush=True)
"""


@pytest.mark.parametrize("lines", [1, 2, 5, 8])
def test_kill_at_any_point_leaves_a_whole_serving_set(tmp_path: Path, lines: int) -> None:
    """The child is killed during the step that follows its n-th line."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), str(TESTS)],
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        told = [child.stdout.readline().split() for _ in range(lines)]
        child.send_signal(signal.SIGKILL)
    committed = [int(words[1]) for words in told if words[0] == "committed"]
    spool = Spool(tmp_path)
    assert (spool.sets.serving or VersionSet()).policy >= max(committed, default=0)
    for one in filter(None, (spool.sets.serving, spool.sets.previous)):
        weights = load_file(spool.path(P, one.policy) / "model.safetensors")["w"]
        assert weights.shape == (200_000,)
        assert (weights == one.policy).all()
    assert not [name for name in names(tmp_path) if name.startswith(".tmp")]


def test_same_version_with_other_content_is_refused(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.write(*version(P, 1))
    spool.write(*version(P, 1))
    with pytest.raises(WeightsError, match="another content"):
        spool.write(*version(P, 1, size=2000))


def test_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    spool, limit = Spool(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(ResourceExhausted, match="File too large"):
            spool.write(*version(P, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert names(tmp_path) == set()
    spool.write(*version(P, 1))
    assert spool.prepared == {(P, 1)}


def test_no_set_is_committed_before_the_disk_keeps_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    Spool(tmp_path).write(*version(P, 1))
    again = Spool(tmp_path)  # after a kill between write and sync
    monkeypatch.setattr("paceline.weights.spool.sync_file", lambda *_: broken(0))
    with pytest.raises(ResourceExhausted, match="Input/output"):
        again.commit(VersionSet(1, 1, 0))
    assert again.sets.serving is None
    monkeypatch.undo()
    again.commit(VersionSet(1, 1, 0))
    assert Spool(tmp_path).sets.serving == VersionSet(1, 1, 0)


def test_start_version_is_found_in_its_own_directory(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", initial={P: tmp_path / "start"})
    assert spool.path(P, 0) == tmp_path / "start"
    with pytest.raises(NotFound):
        spool.path(D, 0)
    spool.write(*version(P, 3))
    spool.write(*version(D, 4))
    with pytest.raises(NotFound, match=r"seen: 7; allowed: (\[3\]|3)"):
        spool.path(P, 7)


def test_a_spoiled_manifest_is_data_loss(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    directory = spool.write(*version(P, 1))
    (directory / "manifest.json").write_text('{"version": "one"}')
    with pytest.raises(DataLoss, match="is not a manifest"):
        spool.manifest(P, 1)


def test_no_flipped_byte_of_the_spool_goes_unseen(tmp_path: Path) -> None:
    array = np.arange(3000, dtype=np.float32)
    config = '{"architectures": ["MLPSpeculator"]}'
    manifest = build_manifest(
        D, 1, [from_numpy("w", array)], metadata={"config": config, "source": "test"}
    )
    spool = Spool(tmp_path)
    spool.write(manifest, array.tobytes())
    spool.commit(VersionSet(1, 0, 1))
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert {path.name for path in files} == {
        "config.json",
        "manifest.json",
        "model.safetensors",
        "versions.json",
    }
    spool.check(D, 1)
    for file in files:
        data = file.read_bytes()
        for at in {*range(min(len(data), 600)), len(data) // 2, len(data) - 1}:
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            again = Spool(tmp_path)
            with pytest.raises(DataLoss, match=file.name):
                again.sets.check() if file.name == "versions.json" else again.check(D, 1)
        file.write_bytes(data)


def test_over_a_damaged_list_of_sets_nothing_serves_or_goes_until_one_is_committed(
    tmp_path: Path,
) -> None:
    spool = Spool(tmp_path)
    for number in (1, 2, 3):
        spool.write(*version(P, number))
        spool.commit(VersionSet(number, number, 0))
    (tmp_path / "versions.json").write_text('{"sets": [{"seq": 1, "colour": 2}]}')
    again = Spool(tmp_path)
    assert (again.sets.serving, again.prepared) == (None, frozenset())
    with pytest.raises(DataLoss, match=r"versions\.json is damaged"):
        again.sets.check()
    again.discard(P, 3)
    assert names(tmp_path) == {"policy-2", "policy-3", "versions.json"}
    again.commit(VersionSet(3, 3, 0))
    again.sets.check()
    assert names(tmp_path) == {"policy-3", "versions.json"}
    assert Spool(tmp_path).sets.serving == VersionSet(3, 3, 0)


def test_damaged_parts_are_listed_while_another_thread_checks_parts(tmp_path: Path) -> None:
    spool, over = Spool(tmp_path), threading.Event()
    for number in (1, 2):
        spool.write(*version(P, number))
        spool.commit(VersionSet(number, number, 0))
    for number in (1, 2):
        shutil.rmtree(tmp_path / f"policy-{number}")

    def check_parts() -> None:
        while not over.is_set():
            for number in range(1, 20):  # no set names version 3 or later
                with suppress(DataLoss):
                    spool.check(P, number)
            spool._damaged.clear()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    checks = threading.Thread(target=check_parts)
    checks.start()
    try:
        for _ in range(20_000):
            assert spool.damaged <= {(P, 2)}
    finally:
        over.set()
        checks.join()
        sys.setswitchinterval(interval)


def test_a_part_of_the_serving_set_is_damaged_until_it_is_written_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in (1, 2):
        spool.write(*version(P, number))
        spool.commit(VersionSet(number, number, 0))
    for number in (1, 2):
        (spool.path(P, number) / "model.safetensors").write_bytes(b"")
        with pytest.raises(DataLoss, match=r"model\.safetensors is damaged"):
            spool.check(P, number)
    assert spool.damaged == {(P, 2)}
    spool.remove(P, 2)
    again = Spool(tmp_path)
    with pytest.raises(DataLoss, match="policy-2 is gone"):
        again.check(P, 2)
    assert again.damaged == {(P, 2)}
    again.write(*version(P, 2))
    again.check(P, 2)
    assert again.damaged == frozenset()


@pytest.mark.parametrize("document", ["config", "acceptance"])
def test_a_document_lies_beside_the_tensors_and_nowhere_else(tmp_path: Path, document: str) -> None:
    array = np.ones(4, dtype=np.float32)
    text = '{"architectures": ["MLPSpeculator"], "name": "é"}'
    metadata = {document: text, "source": "test"}
    manifest = build_manifest(D, 1, [from_numpy("w", array)], metadata=metadata)
    path = Spool(tmp_path).write(manifest, array.tobytes())
    assert (path / f"{document}.json").read_text(encoding="utf-8") == text
    with safe_open(path / "model.safetensors", "np") as file:
        assert file.metadata().items() >= {"format": "pt", "source": "test"}.items()
        assert document not in file.metadata()
    assert Spool(tmp_path).manifest(D, 1) == manifest
    assert names(Spool(tmp_path / "other").write(*version(D, 2))) == {
        "model.safetensors",
        "manifest.json",
    }
