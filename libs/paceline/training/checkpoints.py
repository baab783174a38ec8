"""Writes and reads numbered checkpoints of sharded training state, without pickle.

`<directory>/<prefix><number>/` holds
    shards/*.safetensors   tensors (shards.py), a file per rank
    state.json             everything else
    manifest.json          the sha256 of each file (file_hashes.py)
and what `export` puts beside them. Any number of ranks can load it. A checkpoint is written under
another name and renamed when all of it is on disk.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from paceline.errors import DataLoss, PacelineError, Unavailable
from paceline.file_hashes import check_hashes, read_hashes, write_hashes
from paceline.training.process import from_all_ranks
from paceline.training.shards import local_of, read_each, read_shards, tensors_of, write_shard
from paceline.whole_files import sync_path

PREFIX = "checkpoint-"
SHARDS, STATE = "shards", "state.json"
DAMAGED = ".damaged"
"""Behind the name of a checkpoint that was found damaged, which nothing reads any more."""
_MALFORMED = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError)


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread of each rank, while they train on.

    `export(state, checkpoint)` runs on rank 0 when the shards are on disk. The newest `keep`
    checkpoints stay.
    """

    def __init__(
        self,
        directory: Path,
        export: Callable[[dict[str, Any], Path], None],
        *,
        prefix: str = PREFIX,
        keep: int = 2,
    ) -> None:
        self._directory, self._export, self._prefix = directory, export, prefix
        self._keep = keep
        self.kept: int | None = None
        """Number of one more checkpoint that stays."""
        self.written_s = 0.0
        """How long this rank took to write the newest."""
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        if dist.get_rank() == 0:
            for left_behind in directory.glob(".*.tmp"):
                shutil.rmtree(left_behind)

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def next_number(self) -> int:
        """A number no checkpoint has; rank 0's counts."""
        return max(checkpoint_numbers(self._directory, self._prefix), default=0) + 1

    def path(self, number: int) -> Path:
        """Directory of a checkpoint."""
        return self._directory / f"{self._prefix}{number}"

    def write(self, state: dict[str, Any], number: int, writing: dist.ProcessGroup | None) -> None:
        """Starts writing `state`, whose tensors must not change any more; a collective.

        `writing`: a gloo group of the writing ranks that nothing else uses; None writes alone.
        Waits for the write before; raises Unavailable when that one has failed.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(state, number, writing), name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is being written. Raises Unavailable when it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise Unavailable(f"no checkpoint in {self._directory}", seen=failure)

    def _write(self, state: dict[str, Any], number: int, writing: dist.ProcessGroup | None) -> None:
        began, fresh = time.perf_counter(), self._directory / f".{number}.tmp"
        rank = dist.get_rank()
        told = {"file": f"{SHARDS}/rank-{rank}.safetensors", "hash": "", "failure": ""}
        try:
            (fresh / SHARDS).mkdir(parents=True, exist_ok=True)
            told["hash"] = write_shard(fresh / told["file"], dict(tensors_of(state)), rank=rank)
        except OSError as error:
            told["failure"] = _cause(error)
        try:
            written = [told] if writing is None else from_all_ranks(told, writing)
            self._failure = next((one["failure"] for one in written if one["failure"]), None)
            if rank == 0 and self._failure is None:
                hashes = {one["file"]: one["hash"] for one in written}
                self._failure = self._failing(state, hashes, fresh, self.path(number))
            if writing is not None:  # nobody writes there again before rank 0 has left it
                self._failure = from_all_ranks(self._failure, writing)[0]
        except RuntimeError as error:  # torch's: another rank is lost
            self._failure = _cause(error)
        if rank == 0 and self._failure is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        self.written_s = time.perf_counter() - began

    def _failing(
        self, state: dict[str, Any], hashes: dict[str, str], fresh: Path, final: Path
    ) -> str | None:
        """Completes the checkpoint; says why it could not be."""
        try:
            self._complete(state, hashes, fresh, final)
        except (OSError, SafetensorError, RuntimeError, PacelineError) as error:
            return _cause(error)
        return None

    def _complete(
        self, state: dict[str, Any], hashes: dict[str, str], fresh: Path, final: Path
    ) -> None:
        described = json.dumps(_without_tensors(state), indent=1) + "\n"
        (fresh / STATE).write_text(described, encoding="utf-8")
        write_hashes(fresh, hashes)  # by which `export` reads the shards
        self._export(state, fresh)
        write_hashes(fresh, hashes)
        for path in [*fresh.rglob("*"), fresh]:
            sync_path(path)
        if final.exists():
            shutil.rmtree(final)
        fresh.rename(final)
        sync_path(self._directory)
        for old in checkpoint_numbers(self._directory, self._prefix)[: -self._keep]:
            if old != self.kept:
                shutil.rmtree(self.path(old))


@dataclass(frozen=True, slots=True)
class Resumable:
    """What of a directory a trainer can go on from."""

    checkpoint: Path | None
    """The newest whole one; None when there is none."""
    damaged: tuple[str, ...]
    """What was wrong with newer ones, newest first."""
    newest: int
    """Number of the newest, damaged or not; 0 when there is none."""


def find_whole(directory: Path, prefix: str, group: dist.ProcessGroup | None) -> Resumable:
    """Reads the newest checkpoint against its hashes, and those before it while one is damaged; a
    collective of `group`, or of this rank alone. Damaged ones are renamed.
    """
    alone = group is None
    rank, ranks = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
    numbers = checkpoint_numbers(directory, prefix)
    damaged: list[str] = []
    for number in reversed(numbers):
        checkpoint, fault = directory / f"{prefix}{number}", ""
        try:
            check_hashes(checkpoint, rank, ranks)
        except DataLoss as error:
            fault = str(error)
        faults = [fault] if alone else from_all_ranks(fault, group)
        if not any(faults):
            return Resumable(checkpoint, tuple(damaged), numbers[-1])
        damaged.append(next(filter(None, faults)))
        if rank == 0:
            shutil.rmtree(aside := checkpoint.with_name(checkpoint.name + DAMAGED), True)
            checkpoint.rename(aside)
    return Resumable(None, tuple(damaged), max(numbers, default=0))


def newest_checkpoint(directory: Path, prefix: str = PREFIX) -> Path | None:
    """The newest checkpoint, unread; None when there is none."""
    numbers = checkpoint_numbers(directory, prefix)
    return directory / f"{prefix}{numbers[-1]}" if numbers else None


def checkpoint_numbers(directory: Path, prefix: str = PREFIX) -> list[int]:
    """Numbers of the checkpoints there, ascending."""
    names = (path.name.removeprefix(prefix) for path in directory.glob(f"{prefix}*"))
    return sorted(int(name) for name in names if name.isdigit())


def read_checkpoint(checkpoint: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """The state.

    `like` is a state whose tensors, however they are sharded, are overwritten. Tensors that only
    one of both has are left out. Raises DataLoss when shapes, types or bytes do not fit; what
    `find_whole` found needs no other check.
    """
    state = read_state(checkpoint)
    for name, tensor in _load(checkpoint, dict(tensors_of(like))).items():
        *path, last = name.split("/")
        node = state
        for key in path:
            node = node.setdefault(key, {})
        node[last] = tensor
    return state


def read_whole(checkpoint: Path, part: str, like: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors under `part`, "learner/model", unsharded, on this rank alone. Raises DataLoss."""
    return dict(read_each_whole(checkpoint, part, like))


def read_each_whole(
    checkpoint: Path, part: str, like: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """As read_whole, sorted by name, and one at a time, so that no more need be held."""
    found = {name: tensor for name, tensor in tensors_of(like) if name.startswith(part + "/")}
    with _loading(checkpoint):
        for name, tensor in read_each(_shard_files(checkpoint), found):
            yield name.removeprefix(part + "/"), tensor


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What of the state is no tensor. Raises DataLoss, also when it is not what was written."""
    check_hashes(checkpoint, only=STATE)
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except _MALFORMED as error:
        raise DataLoss(f"the checkpoint {checkpoint} does not load", seen=_cause(error)) from error
    return state


def copy_on_cpu(
    tensor: Tensor,
    mesh: DeviceMesh | None,
    into: Tensor | None = None,
    numbers: Callable[[Tensor], Tensor] = local_of,
) -> Tensor:
    """A plain copy that later steps leave alone; of a sharded tensor this rank's shard, over
    `mesh`.

    `into`: an earlier copy that nobody reads any more. To have its memory from the system takes
    longer than to copy. `numbers`: where those of the shard are (Offload.numbers).
    """
    local = numbers(tensor).detach()
    if into is not None:
        local_of(into).copy_(local)
        return into
    return sharded_like(tensor, torch.empty(local.shape, dtype=local.dtype).copy_(local), mesh)


def sharded_like(tensor: Tensor, local: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """This rank's part of a tensor that is sharded over `mesh` as `tensor` is, if that is."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@torch.no_grad()
def copy_local(source: Tensor, target: Tensor) -> None:
    """Writes this rank's shard of `source` over that of `target`, which is sharded alike."""
    target = local_of(target)
    # To the device first: a quantised target computes with what it takes.
    target.copy_(local_of(source).to(target.device))


def _load(checkpoint: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    files = _shard_files(checkpoint)
    with _loading(checkpoint):
        found = read_shards(files, tensors)
    return {name: tensor for name, tensor in tensors.items() if name in found}


def _shard_files(checkpoint: Path) -> list[Path]:
    return [checkpoint / name for name in read_hashes(checkpoint) if Path(name).parts[0] == SHARDS]


@contextmanager
def _loading(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except _MALFORMED as error:
        raise DataLoss(f"the checkpoint {checkpoint} does not load", seen=_cause(error)) from error


def _without_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_tensors(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
        if not isinstance(value, Tensor)
    }


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
