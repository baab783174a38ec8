"""A rank receives the row that rank 0 has packed for it, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import torch
from unit.drafter_trainer.samples import sample, sample_with_rejected

from drafter_trainer.rows.batcher import pack
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.speculators.packed import PackedRow

HERE = Path(__file__).parents[1]


def test_rows_with_rejected_drafts_and_words_arrive_as_they_were_sent(tmp_path: Path) -> None:
    shared = {
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": 1,
    }
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(HERE / "sharing_ranks.py"),
                str(HERE / "samples.py"),
                str(tmp_path / "received"),
            ],
            env={
                **os.environ,
                **{k: str(v) for k, v in shared.items()},
                "RANK": str(r),
                "LOCAL_RANK": str(r),
            },
        )
        for r in range(2)
    ]
    try:
        assert [rank.wait(timeout=patient(60)) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    first, word, second, again = torch.load(tmp_path / "received", weights_only=False)
    assert (word, again) == ("snapshot", "snapshot")
    for got, samples in (
        (first, [sample_with_rejected(12, 1), sample(7, 2)]),
        (second, [sample(5, 3)]),
    ):
        sent = pack(samples, window=512)
        for part in fields(PackedRow):
            one, other = getattr(sent, part.name), getattr(got, part.name)
            if isinstance(one, torch.Tensor):
                assert one.dtype == other.dtype
                assert torch.equal(one, other), part.name
            else:
                assert one == other
