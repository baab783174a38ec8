"""Values that ranks share arrive unchanged, and nothing is unpickled on the way."""

from __future__ import annotations

from pathlib import Path

from rank_processes import run_ranks
from unit.training import ranks_that_tell


def test_two_ranks_share_values_and_tensors_without_pickle(tmp_path: Path) -> None:
    run_ranks(ranks_that_tell.main, 2, tmp_path)
