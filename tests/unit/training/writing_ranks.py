"""One rank of the test of a checkpoint that rank 0 is still reading."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.local.patience import patient
from paceline.training.checkpoints import CheckpointWriter
from paceline.training.process import join_ranks


def main(out: Path) -> None:
    """While rank 0 exports from all shards, every rank is writing."""
    join_ranks("cpu", patient(60.0), threads=1, seed=0)
    began, may_end = threading.Event(), threading.Event()

    def export(state: dict[str, object], checkpoint: Path) -> None:
        began.set()
        assert may_end.wait(patient(60.0))

    writer = CheckpointWriter(out, export)
    writer.write({"model": {"w": torch.ones(4)}}, 1, dist.new_group())
    if dist.get_rank() == 0:
        assert began.wait(patient(60.0))
    dist.barrier()
    assert writer.busy, "this rank would begin the next checkpoint in the same place"
    dist.barrier()
    may_end.set()
    writer.wait()
    assert writer.path(1).is_dir()
    dist.barrier()
    dist.destroy_process_group()
