"""The policy's bench runs with its real processes; its figures are for `paceline bench`, not for a
test.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.policy.run import Case, compared
from benchmarks.policy.work import Work, demo_model


async def test_both_sides_step_on_the_same_batch_and_are_timed_in_pairs(tmp_path: Path) -> None:
    case = Case("tiny", demo_model(), Work(2, 1, 320, longest=4), 2)
    row, ratio = await compared(case, 2, tmp_path)
    assert row["tokens"] == 2 * 8 * (7 + 4)
    assert ratio.pairs == 2
    assert min(float(row[name] or 0) for name in ("tokens/s", "tokens/s plain", "MiB")) > 0
