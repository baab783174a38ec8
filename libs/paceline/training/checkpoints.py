"""Writes and reads numbered checkpoints of sharded training state, without pickle.

`<directory>/<prefix><number>/` holds
    shards/*.safetensors   tensors (shards.py), a file per rank
    state.json             everything else
    manifest.json          the sha256 of each file (whole_files.py)
and the files written by `export`. Tensors that its model.safetensors holds whole are in no shard.
Any number of ranks can load it. A checkpoint is written under another name and renamed once all of
it is on disk.
"""

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
from paceline.training.process import from_all_ranks
from paceline.training.shards import local_of, read_each, read_shards, tensors_of, write_shard
from paceline.whole_files import check_hashes, read_hashes, sync_path, write_hashes

PREFIX = "checkpoint-"
SHARDS, STATE, WHOLE = "shards", "state.json", "model.safetensors"
_PASSING = "whole-"
"""Start of the names of shards that only `export` reads."""
KEPT = 2
"""Number of newest checkpoints kept."""
DAMAGED = ".damaged"
"""Behind the name of a checkpoint that was found damaged, which nothing reads any more."""
REPORT_S = 1.0
"""Seconds between two looks at whether a write gets on."""
_MALFORMED = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError)


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread of each rank, while the ranks continue training.

    `export(state, checkpoint)` runs on rank 0 when the shards are on disk. The newest KEPT
    checkpoints stay.
    """

    def __init__(
        self,
        directory: Path,
        export: Callable[[dict[str, Any], Path], None],
        *,
        prefix: str = PREFIX,
        whole: str = "",
    ) -> None:
        """`whole`: path of the tensors, such as "learner/model", that `export` writes to WHOLE;
        empty: none.
        """
        self._directory, self._export, self._prefix = directory, export, prefix
        self._whole = whole
        self.kept: int | None = None
        """Number of one additional checkpoint that stays."""
        self.written_s = 0.0
        """Seconds that this rank took to write the newest checkpoint."""
        self._thread: threading.Thread | None = None
        self._moved = 0  # parts that this rank has written
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
        """An unused number; rank 0's is used."""
        return max(checkpoint_numbers(self._directory, self._prefix), default=0) + 1

    def path(self, number: int) -> Path:
        """Directory of a checkpoint."""
        return self._directory / f"{self._prefix}{number}"

    def write(self, state: dict[str, Any], number: int, writing: dist.ProcessGroup | None) -> None:
        """Starts writing `state`, with tensors that must not change any more. Collective.

        `writing`: a gloo group of the writing ranks for this purpose alone; None: all ranks.
        Waits for the previous write, and raises Unavailable if that has failed.
        """
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(state, number, writing), name="checkpoint"
        )
        self._thread.start()

    def wait(self, report: Callable[[], None] = lambda: None) -> None:
        """Returns when nothing is being written; calls `report` now and then while the write makes
        progress. Raises Unavailable when it could not be written.
        """
        while self._thread is not None:
            before = self._moved
            self._thread.join(REPORT_S)
            if not self._thread.is_alive():
                self._thread = None
            elif self._moved != before:
                report()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise Unavailable(f"no checkpoint in {self._directory}", seen=failure)

    def _write(self, state: dict[str, Any], number: int, writing: dist.ProcessGroup | None) -> None:
        began, fresh = time.perf_counter(), self._directory / f".{number}.tmp"
        rank = dist.get_rank()
        own, failure = dict[str, str](), ""
        try:
            own = self._write_shards(state, fresh, rank)
        except OSError as error:
            failure = _cause(error)
        try:
            written = from_all_ranks((own, failure), writing)
            self._failure = next((failed for _, failed in written if failed), None)
            if rank == 0 and self._failure is None:
                hashes = {file: found for files, _ in written for file, found in files.items()}
                try:
                    self._complete(state, hashes, fresh, self.path(number))
                except (OSError, SafetensorError, RuntimeError, PacelineError) as error:
                    self._failure = _cause(error)
            # No rank writes there again before rank 0 has finished.
            self._failure = from_all_ranks(self._failure, writing)[0]
        except RuntimeError as error:  # from torch: another rank is lost
            self._failure = _cause(error)
        if rank == 0 and self._failure is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        self.written_s = time.perf_counter() - began

    def _write_shards(self, state: dict[str, Any], fresh: Path, rank: int) -> dict[str, str]:
        """The hashes of this rank's files, by name."""
        (fresh / SHARDS).mkdir(parents=True, exist_ok=True)
        own, tensors = f"rank-{rank}.safetensors", dict(tensors_of(state))
        exported = _below(self._whole, tensors)
        kept = {name: tensor for name, tensor in tensors.items() if name not in exported}
        files = {f"{SHARDS}/{own}": kept}
        if exported and dist.get_world_size() > 1:
            files[f"{SHARDS}/{_PASSING}{own}"] = exported
        return {
            file: write_shard(fresh / file, part, rank=rank, wrote=self._moves)
            for file, part in files.items()
        }

    def _moves(self) -> None:
        self._moved += 1

    def _complete(
        self, state: dict[str, Any], hashes: dict[str, str], fresh: Path, final: Path
    ) -> None:
        described = json.dumps(_without_tensors(state), indent=1) + "\n"
        (fresh / STATE).write_text(described, encoding="utf-8")
        write_hashes(fresh, hashes)  # `export` reads the shards by these hashes
        self._export(state, fresh)
        for passing in (fresh / SHARDS).glob(f"{_PASSING}*"):
            passing.unlink()
            del hashes[f"{SHARDS}/{passing.name}"]
        write_hashes(fresh, hashes)
        for path in [*fresh.rglob("*"), fresh]:
            sync_path(path)
            self._moves()
        if final.exists():
            shutil.rmtree(final)
        fresh.rename(final)
        sync_path(self._directory)
        for old in checkpoint_numbers(self._directory, self._prefix)[:-KEPT]:
            if old != self.kept:
                shutil.rmtree(self.path(old))


@dataclass(frozen=True, slots=True)
class Resumable:
    """The state from which a trainer can resume in a directory."""

    checkpoint: Path | None
    """The newest whole checkpoint; None without any."""
    damaged: tuple[str, ...]
    """Faults of newer checkpoints, newest first."""
    newest: int
    """Number of the newest checkpoint, damaged or not; 0 without any."""


def find_whole(directory: Path, prefix: str, group: dist.ProcessGroup | None) -> Resumable:
    """Checks the newest checkpoint against its hashes, and earlier ones while it is damaged.
    Collective over `group`; None: all ranks. Damaged checkpoints are renamed.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    numbers = checkpoint_numbers(directory, prefix)
    damaged: list[str] = []
    for number in reversed(numbers):
        checkpoint, fault = directory / f"{prefix}{number}", ""
        try:
            check_hashes(checkpoint, rank, ranks)
        except DataLoss as error:
            fault = str(error)
        faults = from_all_ranks(fault, group)
        if not any(faults):
            return Resumable(checkpoint, tuple(damaged), numbers[-1])
        damaged.append(next(filter(None, faults)))
        if rank == 0:
            shutil.rmtree(aside := checkpoint.with_name(checkpoint.name + DAMAGED), True)
            checkpoint.rename(aside)
    return Resumable(None, tuple(damaged), max(numbers, default=0))


def checkpoint_numbers(directory: Path, prefix: str = PREFIX) -> list[int]:
    """Numbers of the existing checkpoints, ascending."""
    names = (path.name.removeprefix(prefix) for path in directory.glob(f"{prefix}*"))
    return sorted(int(name) for name in names if name.isdigit())


def read_checkpoint(
    checkpoint: Path, like: Mapping[str, Any], *, whole: str = ""
) -> dict[str, Any]:
    """Reads the state.

    `like` is a state with tensors to overwrite, for any sharding. Tensors in only one of both are
    skipped. `whole`: as the writer's; a checkpoint may have these tensors in its shards. Raises
    DataLoss when shapes, types or bytes do not match. A checkpoint from `find_whole` needs no other
    check.
    """
    state, tensors = read_state(checkpoint), dict(tensors_of(like))
    with _loading(checkpoint):
        found = read_shards(_shard_files(checkpoint), tensors)
        exported = _below(whole, {name: tensors[name] for name in tensors.keys() - found})
        if exported:
            named = {name.removeprefix(f"{whole}/"): one for name, one in exported.items()}
            found |= {f"{whole}/{name}" for name in read_shards([checkpoint / WHOLE], named)}
    for name in filter(found.__contains__, tensors):
        *path, last = name.split("/")
        node = state
        for key in path:
            node = node.setdefault(key, {})
        node[last] = tensors[name]
    return state


def read_each_whole(
    checkpoint: Path, part: str, like: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The unsharded tensors under `part`, such as "learner/model", sorted by name, one at a time to
    save memory, on this rank alone: those of the written state `like` with one rank, else of the
    shards. Raises DataLoss.
    """
    found = _below(part, dict(tensors_of(like)))
    with _loading(checkpoint):
        alone = dist.get_world_size() == 1
        whole = sorted(found.items()) if alone else read_each(_shard_files(checkpoint), found)
        for name, tensor in whole:
            yield name.removeprefix(part + "/"), local_of(tensor)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The part of the state that is not tensors. Raises DataLoss if it is damaged."""
    check_hashes(checkpoint, only=STATE)
    with _loading(checkpoint):
        state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state


def copy_on_cpu(
    tensor: Tensor,
    mesh: DeviceMesh | None,
    into: Tensor | None = None,
    numbers: Callable[[Tensor], Tensor] = local_of,
) -> Tensor:
    """A plain copy that later steps do not change: this rank's shard over `mesh` if the tensor is
    sharded.

    `into`: an earlier copy without readers. Reusing its memory is faster, since the system takes
    longer to allocate than to copy. `numbers`: returns the values of the shard (Offload.numbers).
    """
    local = numbers(tensor).detach()
    if into is not None:
        local_of(into).copy_(local)
        return into
    return sharded_like(tensor, torch.empty(local.shape, dtype=local.dtype).copy_(local), mesh)


def sharded_like(tensor: Tensor, local: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """`local` as this rank's part of a tensor sharded over `mesh` like `tensor`; `local` itself if
    `tensor` is not sharded.
    """
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def copy_local(source: Tensor, target: Tensor) -> None:
    """Copies this rank's shard of `source` into `target`, which has the same sharding."""
    target = local_of(target)
    # To the device first: a quantised target computes with its input.
    target.copy_(local_of(source).to(target.device))


def _below(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose path of keys begins with `part`; none for an empty part."""
    return {name: one for name, one in tensors.items() if part and name.startswith(f"{part}/")}


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
