"""Draws the measurements of the policy step: distance between sampler and trainer, and the parts of
its time. An unmeasured figure leaves a gap.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.charts import empty, stacked_columns
from paceline.report.measures import MISMATCH, lines, split
from paceline.v1.coordinator_pb2 import StepRecord

_SPLITS = 8  # lines of one chart, one colour each
_PARTS = {
    "batch wait": "seconds/batch_wait",
    "proximal log-probs": "seconds/proximal_logprobs",
    "forward, backward": "seconds/forward_backward",
    "optimizer": "seconds/optimizer",
    "publish": "push_s",
}


def mismatch_sections(records: Sequence[StepRecord]) -> list[tuple[str, str, str]]:
    """(title, note, drawing) of the charts of the policy step."""
    gap = "|log-prob of the trainer - log-prob of the sampler|, nats: mean and largest"
    of_one = "mean gap of the tokens of one"
    shares = "effective sample size, clipped and masked tokens, as shares"
    spent = "seconds that the batch was waited for, and of each part of the step"
    mean, largest, k3, *weights = MISMATCH.values()
    return [
        (mean.title, gap, lines(records, [mean, largest])),
        ("Gap by age", f"{of_one} lag", _split(records, "lag=")),
        ("Gap by arm", f"{of_one} arm", _split(records, "arm=")),
        ("Gap by numbers", f"{of_one} number format of the engine", _split(records, "numbers=")),
        (k3.title, k3.note, lines(records, [k3])),
        ("Weight of the tokens", shares, lines(records, weights)),
        ("Where the policy step's time went", spent, _parts(records)),
    ]


def _split(records: Sequence[StepRecord], kind: str) -> str:
    prefix = f"behavior_gap/{kind}"
    names = {name for one in records for name in one.policy if name.startswith(prefix)}
    shown = sorted(names, key=lambda name: (len(name), name))[:_SPLITS]
    return split(records, prefix, [name.removeprefix(prefix) for name in shown])


def _parts(records: Sequence[StepRecord]) -> str:
    known = [one for one in records if any(name in one.policy for name in _PARTS.values())]
    if not known:
        return empty("nothing was measured")
    return stacked_columns(
        list(_PARTS),
        [
            (float(one.step + 1), [one.policy.get(name, 0.0) for name in _PARTS.values()])
            for one in known
        ],
        colors=[f"c{i}" for i in range(len(_PARTS))],
        y_label="seconds",
    )
