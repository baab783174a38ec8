"""Draws what the policy step measured: how far sampler and trainer are apart, and where its time
went. A step that did not measure a figure leaves a gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.report.charts import Series, empty, line_chart, stacked_columns
from paceline.v1.coordinator_pb2 import StepRecord

NAN = float("nan")
MISMATCH = (
    "behavior_gap",
    "behavior_gap_max",
    "behavior_k3",
    "effective_sample_size",
    "clip_fraction",
    "masked_fraction",
)
"""Figures of a policy step that say how far the sampler was from the trainer."""
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
    split = "mean gap of the tokens of one"
    shares = "effective sample size, clipped and masked tokens, as shares"
    spent = "seconds that the batch was waited for, and of each part of the step"
    return [
        ("Sampler against trainer", gap, _lines(records, MISMATCH[:2], "nats")),
        ("Gap by age", f"{split} lag", _split(records, "lag=")),
        ("Gap by arm", f"{split} arm", _split(records, "arm=")),
        ("Gap by numbers", f"{split} number format of the engine", _split(records, "numbers=")),
        ("Divergence of the sampler", "k3 estimate, nats", _lines(records, MISMATCH[2:3], "nats")),
        ("Weight of the tokens", shares, _lines(records, MISMATCH[3:], "share", y_min=0.0)),
        ("Where the policy step's time went", spent, _parts(records)),
    ]


def _lines(
    records: Sequence[StepRecord], names: Sequence[str], unit: str, y_min: float | None = None
) -> str:
    return policy_chart(records, {name: name.replace("_", " ") for name in names}, unit, y_min)


def policy_chart(
    records: Sequence[StepRecord], labels: Mapping[str, str], unit: str, y_min: float | None = None
) -> str:
    """A line for each figure of the policy step, by its label."""
    series = [
        Series(
            label, [(float(one.step + 1), one.policy.get(name, NAN)) for one in records], f"c{i}"
        )
        for i, (name, label) in enumerate(labels.items())
    ]
    return line_chart(series, y_label=unit, y_min=y_min)


def _split(records: Sequence[StepRecord], kind: str) -> str:
    prefix = f"behavior_gap/{kind}"
    names = {name for one in records for name in one.policy if name.startswith(prefix)}
    shown = sorted(names, key=lambda name: (len(name), name))[:_SPLITS]
    return policy_chart(records, {name: name.removeprefix(prefix) for name in shown}, "nats")


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
