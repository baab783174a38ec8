"""Writes and reads numbered checkpoints of sharded training state, without pickle.

`<directory>/<prefix><number>/` holds
    shards/*.safetensors   tensors (torch.distributed.checkpoint), a file per rank
    state.json             everything else, and the size of each file of shards
and what `export` puts beside them. Any number of ranks can load it. A checkpoint is written under
another name and renamed when all of it is on disk.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from paceline.errors import DataLoss, Unavailable

PREFIX = "checkpoint-"
SHARDS, STATE = "shards", "state.json"
_FILES = "files"  # key of state.json: file of shards -> bytes
_MALFORMED = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError)

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a checkpoint of one rank


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread of each rank, while they train on.

    `export(state, checkpoint)` runs on rank 0 when the shards are on disk. The newest `keep`
    checkpoints stay, and those whose number is a multiple of `keep_every`, unless that is 0.
    """

    def __init__(
        self,
        directory: Path,
        export: Callable[[dict[str, Any], Path], None],
        *,
        prefix: str = PREFIX,
        keep: int = 2,
        keep_every: int = 0,
    ) -> None:
        self._directory, self._export, self._prefix = directory, export, prefix
        self._keep, self._keep_every = keep, keep_every
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
        return max(_numbers(self._directory, self._prefix), default=0) + 1

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
        fresh = self._directory / f".{number}.tmp"
        try:
            save(
                dict(_tensors(state)),
                storage_writer=HuggingFaceStorageWriter(str(fresh / SHARDS), save_distributed=True),
                process_group=writing,
                no_dist=writing is None,
            )
            if dist.get_rank() == 0:
                self._complete(state, fresh, self.path(number))
        except (OSError, SafetensorError, CheckpointException) as error:
            self._failure = _cause(error)

    def _complete(self, state: dict[str, Any], fresh: Path, final: Path) -> None:
        files = {file.name: file.stat().st_size for file in sorted((fresh / SHARDS).iterdir())}
        described = {**_without_tensors(state), _FILES: files}
        (fresh / STATE).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        self._export(state, fresh)
        for path in [*fresh.rglob("*"), fresh]:
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        fresh.rename(final)
        _sync(self._directory)
        for old in _numbers(self._directory, self._prefix)[: -self._keep]:
            if not (self._keep_every and old % self._keep_every == 0):
                shutil.rmtree(self.path(old))


def newest_checkpoint(directory: Path, prefix: str = PREFIX) -> Path | None:
    """The newest whole checkpoint; None when there is none."""
    numbers = _numbers(directory, prefix)
    return directory / f"{prefix}{numbers[-1]}" if numbers else None


def read_checkpoint(
    checkpoint: Path, like: Mapping[str, Any], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """The state; a collective of `group`, or of this rank alone.

    `like` is a state whose tensors, however they are sharded, are overwritten. Tensors that only
    one of both has are left out. Raises DataLoss when shapes, types or bytes do not fit.
    """
    state = read_state(checkpoint)
    for name, tensor in _load(checkpoint, dict(_tensors(like)), group).items():
        *path, last = name.split("/")
        node = state
        for key in path:
            node = node.setdefault(key, {})
        node[last] = tensor
    return state


def read_whole(checkpoint: Path, part: str, like: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors under `part`, "learner/model", unsharded, on this rank alone. Raises DataLoss."""
    found = {name: tensor for name, tensor in _tensors(like) if name.startswith(part + "/")}
    whole = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in found.items()}
    return {
        name.removeprefix(part + "/"): tensor
        for name, tensor in _load(checkpoint, whole, None).items()
    }


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What of the state is no tensor. Raises DataLoss, also when a file of shards is not whole."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        for name, size in state.pop(_FILES).items():
            seen = (checkpoint / SHARDS / name).stat().st_size
            if seen != size:
                raise DataLoss(f"{checkpoint} misses a part of {name}", seen=seen, allowed=size)
    except _MALFORMED as error:
        raise DataLoss(f"the checkpoint {checkpoint} does not load", seen=_cause(error)) from error
    return state


def copy_on_cpu(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """A copy that later steps leave alone; of a sharded tensor this rank's shard, over `mesh`."""
    return sharded_like(tensor, local_of(tensor).detach().to("cpu", copy=True), mesh)


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
    local_of(target).copy_(local_of(source))


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, live; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _load(
    checkpoint: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    reader = HuggingFaceStorageReader(str(checkpoint / SHARDS))
    alone = group is None or dist.get_world_size(group) == 1
    try:
        there = reader.read_metadata().state_dict_metadata
        wanted = {name: tensor for name, tensor in tensors.items() if name in there}
        for name, tensor in wanted.items():
            _check(name, tensor, there[name])
        load(wanted, storage_reader=reader, process_group=group, no_dist=alone)
    except (*_MALFORMED, CheckpointException) as error:
        raise DataLoss(f"the checkpoint {checkpoint} does not load", seen=_cause(error)) from error
    return wanted


def _check(name: str, tensor: Tensor, stored: Any) -> None:
    """torch converts a stored type silently, and leaves gaps between pieces as they were."""
    assert isinstance(stored, TensorStorageMetadata)
    seen = (tuple(stored.size), stored.properties.dtype)
    allowed = (tuple(tensor.shape), tensor.dtype)
    if seen != allowed:
        raise DataLoss(f"a checkpoint holds another {name}", seen=seen, allowed=allowed)
    held = sum(chunk.sizes.numel() for chunk in stored.chunks)
    if held != stored.size.numel():
        raise DataLoss(f"a checkpoint misses a part of {name}", seen=held, allowed=tensor.numel())


def _tensors(state: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors by the keys that lead to them, joined by "/"."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield path + key, value
        elif isinstance(value, Mapping):
            yield from _tensors(value, f"{path}{key}/")


def _without_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_tensors(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
        if not isinstance(value, Tensor)
    }


def _numbers(directory: Path, prefix: str) -> list[int]:
    names = (path.name.removeprefix(prefix) for path in directory.glob(f"{prefix}*"))
    return sorted(int(name) for name in names if name.isdigit())


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next((failure[0] for failure in error.failures.values()), error)
    return f"{type(error).__name__}: {error}"[:300]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
