"""Checkpoints of the drafter trainer: trainables, optimiser, counters. Owns the files, not when
they are written.

`<directory>/checkpoint-<number>/`: the tensors as a distributed checkpoint
(torch.distributed.checkpoint), each rank's shards in a file of its own, which any number of ranks
can load; all else in state.json; and what `export` puts beside it. A checkpoint is written under
another name and renamed when all of it is on disk; the newest two are kept.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from drafter_trainer.learn.membership import Members
from paceline.errors import DataLoss, Unavailable

KEPT = 2
_PREFIX = "checkpoint-"
STATE = "state.json"


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread of each member, while they train on.

    `export(state, directory)` runs on rank 0 when the shards are on disk.
    """

    def __init__(self, directory: Path, export: Callable[[dict[str, Any], Path], None]) -> None:
        self._directory, self._export = directory, export
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
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
        return max(_numbers(self._directory), default=0) + 1

    def path(self, number: int) -> Path:
        """Directory of a checkpoint."""
        return self._directory / f"{_PREFIX}{number}"

    def write(self, state: dict[str, Any], number: int, members: Members) -> None:
        """Starts writing `state`, whose tensors must not change any more. Every member calls it.

        Waits for the write before; raises Unavailable when that one has failed.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(state, number, members), name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is being written. Raises Unavailable when it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise Unavailable(
                f"no checkpoint in {self._directory}", seen=_cause(failure)
            ) from failure

    def _write(self, state: dict[str, Any], number: int, members: Members) -> None:
        temporary = self._directory / f".{number}.tmp"
        try:
            tensors = dict(_tensors(state))
            save(
                tensors,
                checkpoint_id=temporary,
                process_group=members.writing,
                no_dist=members.size == 1,
            )
            if dist.get_rank() == 0:
                (temporary / STATE).write_text(json.dumps(_without_tensors(state), indent=1) + "\n")
                self._export(state, temporary)
                _sync(temporary / STATE)
                _sync(temporary)
                temporary.rename(self.path(number))
                _sync(self._directory)
                for old in sorted(_numbers(self._directory))[:-KEPT]:
                    shutil.rmtree(self.path(old))
        except (OSError, CheckpointException) as error:
            self._failure = error if isinstance(error, OSError) else RuntimeError(_cause(error))


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint; None when there is none."""
    number = max(_numbers(directory), default=None)
    return None if number is None else directory / f"{_PREFIX}{number}"


def read_checkpoint(checkpoint: Path, like: Mapping[str, Any], members: Members) -> dict[str, Any]:
    """The state; every member calls it. `like` is a state whose tensors, however they are sharded,
    are overwritten.

    Tensors that only one of both has are left out. Raises DataLoss when shapes or bytes do not fit.
    """
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE).read_text())
    except (OSError, ValueError) as error:
        raise DataLoss(f"the checkpoint {checkpoint} does not load", seen=repr(error)) from error
    for name, tensor in _load(checkpoint, dict(_tensors(like)), members).items():
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


def _load(
    checkpoint: Path, tensors: dict[str, Tensor], members: Members | None
) -> dict[str, Tensor]:
    alone = members is None or members.size == 1
    try:
        there = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        wanted = {name: tensor for name, tensor in tensors.items() if name in there}
        load(
            wanted,
            checkpoint_id=checkpoint,
            process_group=members.group if members else None,
            no_dist=alone,
        )
    except (CheckpointException, OSError, EOFError, pickle.UnpicklingError) as error:
        raise DataLoss(f"the checkpoint {checkpoint} does not load", seen=_cause(error)) from error
    return wanted


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


def _numbers(directory: Path) -> list[int]:
    names = (path.name.removeprefix(_PREFIX) for path in directory.glob(f"{_PREFIX}*"))
    return [int(name) for name in names if name.isdigit()]


def _cause(error: BaseException) -> str:
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((repr(failure[0]) for failure in failures.values()), repr(error))[:300]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
