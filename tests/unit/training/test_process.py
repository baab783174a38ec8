"""What ranks share crosses as it was, and nothing is unpickled on its way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from paceline.local.patience import patient

RANK_FILE = Path(__file__).with_name("ranks_that_tell.py")


def test_two_ranks_share_values_and_tensors_without_pickle(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK_FILE), str(tmp_path / "store")],
            env={**os.environ, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=patient(60))[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
