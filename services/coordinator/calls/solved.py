"""Says what the samples of an evaluation are worth: how many solve their tasks, and how many tasks
some of several samples solve.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from paceline.v1.rollout_pb2 import SampleFinished

SPREAD = "accuracy_se"
"""Standard error of the accuracy over tasks."""


def accuracy(samples: Sequence[SampleFinished], above: float) -> float:
    """Share of samples with a reward above the threshold, avg@k of k samples a task; a sample
    without a reward solves nothing. 0 without samples.
    """
    return sum(_solves(one, above) for one in samples) / len(samples) if samples else 0.0


def pass_figures(
    samples: Sequence[SampleFinished], per_task: int, above: float
) -> dict[str, float | int]:
    """`pass@j` for j = 2, 4, 8, ... and `per_task`: the expected share of tasks that one of j
    samples solves; and SPREAD. Empty for one sample a task.
    """
    if per_task < 2:
        return {}
    solved: dict[str, int] = {}
    for one in samples:
        solved[one.group_id] = solved.get(one.group_id, 0) + _solves(one, above)
    counts = list(solved.values())
    sizes = [1 << power for power in range(1, per_task.bit_length()) if 1 << power < per_task]
    figures: dict[str, float | int] = {
        f"pass@{size}": statistics.fmean(pass_at(size, per_task, count) for count in counts)
        for size in (*sizes, per_task)
        if counts
    }
    if len(counts) > 1:
        shares = [count / per_task for count in counts]
        figures[SPREAD] = statistics.stdev(shares) / math.sqrt(len(shares))
    return figures


def pass_at(size: int, samples: int, solved: int) -> float:
    """Unbiased estimate that one of `size` samples solves a task of which `solved` of `samples` do:
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    return 1 - math.comb(samples - solved, size) / math.comb(samples, size)


def _solves(sample: SampleFinished, above: float) -> bool:
    return sample.HasField("reward") and sample.reward.value > above
