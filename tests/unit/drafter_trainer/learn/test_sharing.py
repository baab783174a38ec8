"""A rank receives the row that rank 0 has packed for it, to the bit."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from unit.drafter_trainer import sharing_ranks, waiting_ranks
from unit.drafter_trainer.samples import sample

from paceline.local.patience import patient
from paceline.services.drafter_trainer.rows.sample import pack
from paceline.speculators.packed import PackedRow


@pytest.mark.slow
def test_rows_and_words_arrive_as_they_were_sent(tmp_path: Path) -> None:
    run_ranks(sharing_ranks.main, 2, tmp_path, tmp_path / "received")
    first, word, second, again = torch.load(tmp_path / "received", weights_only=False)
    assert (word, again) == ("snapshot", "snapshot")
    for got, samples in (
        (first, [sample(12, 1), sample(7, 2)]),
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


@pytest.mark.slow
def test_members_wait_for_rank_zero_for_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    run_ranks(waiting_ranks.main, 2, tmp_path, tmp_path / "candidates", patient(2.0))
