"""Statistics of samples: the share that solve their tasks, tasks solved by one of several samples,
and truncated samples.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from paceline.v1 import trajectory_pb2 as pb
from paceline.v1.coordinator_pb2 import StepRecord
from paceline.v1.rollout_pb2 import SampleFinished

_UNSCORED = {pb.FINISH_REASON_ERROR: "failed", pb.FINISH_REASON_ABORT: "aborted"}

BY_NONE, BY_SOME, BY_ALL = "by_none", "by_some", "by_all"
"""Keys of StepRecord.groups_solved."""
SPREAD = "accuracy_se"
"""Standard error of the accuracy over tasks."""


def accuracy(samples: Sequence[SampleFinished], above: float) -> float:
    """Share of samples with a reward above the threshold, avg@k for k samples per task. A sample
    without a reward solves nothing. 0 without samples.
    """
    return sum(_solves(one, above) for one in samples) / len(samples) if samples else 0.0


def groups_solved(samples: Iterable[SampleFinished], above: float) -> dict[str, float | int]:
    """Groups by the share of scored samples that solve the task: BY_NONE, BY_SOME, BY_ALL."""
    solved: dict[str, list[bool]] = {}
    for one in samples:
        if one.HasField("reward"):
            solved.setdefault(one.group_id, []).append(_solves(one, above))
    return dict(
        Counter(BY_ALL if all(of) else BY_SOME if any(of) else BY_NONE for of in solved.values())
    )


def samples_unscored(samples: Iterable[SampleFinished]) -> dict[str, float | int]:
    """Samples without a reward, by their end; see StepRecord.samples_unscored."""
    without = (one.finish_reason for one in samples if not one.HasField("reward"))
    return dict(sorted(Counter(_UNSCORED.get(finish, "unscored") for finish in without).items()))


def total_unscored(records: Iterable[StepRecord]) -> dict[str, int]:
    """Sum over several steps."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.samples_unscored)
    return dict(sorted(total.items()))


def truncated_share(samples: Sequence[SampleFinished]) -> float:
    """Share of samples that ended at their token limit; 0 without samples."""
    cut = sum(one.finish_reason == pb.FINISH_REASON_LENGTH for one in samples)
    return cut / max(len(samples), 1)


def pass_figures(
    samples: Sequence[SampleFinished], per_task: int, above: float
) -> dict[str, float | int]:
    """`pass@j` for j = 2, 4, 8, ... and `per_task`: the expected share of tasks that at least one
    of j samples solves; and SPREAD. Empty for one sample per task.
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
    """Unbiased estimate of the probability that at least one of `size` samples solves a task, if
    `solved` of `samples` do: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374,
    equation 1).
    """
    return 1 - math.comb(samples - solved, size) / math.comb(samples, size)


def _solves(sample: SampleFinished, above: float) -> bool:
    return sample.HasField("reward") and sample.reward.value > above
