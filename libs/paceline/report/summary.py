"""Computes the figures of a run, summary.json, from journal, ledger and spans."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.report import journal, machine, slots, solved
from paceline.report.spans import SpanReport
from paceline.streams import LedgerCount
from paceline.streams.journal import IdleCause, SlotUse
from paceline.v1.coordinator_pb2 import StepRecord

Summary = dict[str, Any]
WINDOW = 10
"""Number of steps that count as first and as last."""

_MISMATCH = (
    *("behavior_gap", "behavior_gap_max", "behavior_k3"),
    *("effective_sample_size", "clip_fraction", "masked_fraction"),
)
"""Figures of the distance between sampler and trainer, and of its effect on token weights."""
_SERVICES = ("coordinator", "gateway", "policy_trainer", "drafter_trainer")


def summarize(
    run_id: str,
    history: journal.RunHistory,
    ledger: LedgerCount,
    spans: SpanReport,
    pids: Mapping[str, int],
    config: Mapping[str, Any],
) -> Summary:
    """All values of summary.json. Unmeasured figures are None."""
    records = history.records
    rollout_s = sum(record.rollout_s for record in records)
    step_s = sum(record.step_s for record in records)
    held = slots.slot_seconds(history.intervals, history.windows, history.slots)
    tail = records[-20:]
    trace_id = spans.trace[0].trace_id if spans.trace else (records[-1].trace_id if records else "")
    return {
        "run_id": run_id,
        "phase": history.phase,
        "steps": len(records),
        "wall_s": history.ended_s - history.began_s - history.away_s,
        **_rewards("first", records[:WINDOW]),
        **_rewards("last", records[-WINDOW:]),
        **_heldout(history),
        "tokens_per_s": ratio(sum(record.response_tokens for record in records), rollout_s),
        "tokens_per_s_last": ratio(
            sum(r.response_tokens for r in tail), sum(r.rollout_s for r in tail)
        ),
        **_ends("accept_len", history.evaluated(journal.PROBE)),
        "accept_len_live_last": mean(
            [record.accept_length for record in tail if record.accept_length]
        ),
        "policy_versions": len({served.policy for served in history.served}),
        "drafter_versions": len({served.drafter for served in history.served}),
        "gate_decisions": dict(history.decisions),
        **held,
        **_uses_of_slots(records),
        "slots": history.slots,
        **_drafter(history, held["drafter_train_slot_s"]),
        "preempt_wait_share": ratio(sum(record.preempt_wait_s for record in records), step_s),
        "trajectories_published": ledger.final,
        "trajectories_trained": ledger.trained,
        "trajectories_dropped": dict(ledger.dropped),
        "trajectories_unpublished": dict(ledger.unpublished),
        "trajectories_open": ledger.open,
        "trajectories_lost": ledger.lost,
        "mismatch_last": _mismatch(records[-WINDOW:]),
        "samples_unscored": solved.total_unscored(records),
        "near_ties": sum(record.near_ties for record in records),
        "steps_with_near_ties": sum(record.near_ties > 0 for record in records),
        "pids": {
            name: pids[name]
            for name in (*_SERVICES, *sorted(set(pids) - set(_SERVICES)))
            if name in pids
        },
        "trace_id": trace_id,
        "sha256": _hashes(config),
        "machine": machine.machine_in_words(),
        "versions": machine.versions(),
    }


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None for an empty sequence."""
    return sum(values) / len(values) if values else None


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None when whole is 0."""
    return part / whole if whole else None


def _mismatch(records: Sequence[StepRecord]) -> dict[str, float | None]:
    """Means over the steps that measured a figure; None if no step did."""
    return {
        name: mean([one.policy[name] for one in records if name in one.policy])
        for name in _MISMATCH
    }


def _heldout(history: journal.RunHistory) -> Summary:
    return {
        **_ends("accuracy", history.evaluated(journal.ACCURACY)),
        "pass_name": history.widest_pass or None,
        **_ends("pass", history.evaluated(history.widest_pass)),
    }


def _rewards(when: str, records: Sequence[StepRecord]) -> Summary:
    return {
        f"reward_{when}": mean([record.reward_mean for record in records]),
        f"reward_parts_{when}": _parts(records),
    }


def _parts(records: Sequence[StepRecord]) -> dict[str, float | None]:
    """Mean of each part of a mixture over the steps with that part; empty without a mixture."""
    names = sorted({part for one in records for part in one.reward_parts})
    return {
        part: mean([one.reward_parts[part] for one in records if part in one.reward_parts])
        for part in names
    }


def _ends(name: str, values: Sequence[tuple[int, float]]) -> Summary:
    return {
        f"{name}_first": values[0][1] if values else None,
        f"{name}_last": values[-1][1] if values else None,
    }


def _hashes(config: Mapping[str, Any]) -> dict[str, str]:
    """sha256 of the start policy's weights and of the held-out tasks, by their names in the
    examples.
    """
    model = Path(config.get("gateway", {}).get("model", "")) / "model.safetensors"
    heldout = Path(config.get("coordinator", {}).get("heldout_path", ""))
    named = {f"{model.parent.name}/{model.name}": model, heldout.name: heldout}
    return {name: _sha256(path) for name, path in named.items() if path.is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _drafter(history: journal.RunHistory, held_s: float) -> Summary:
    """Results of the drafter's training in its slots."""
    steps = sum(record.drafter_steps for record in history.records)
    first = sorted(history.first_steps_s)
    return {
        "drafter_steps": steps,
        "drafter_steps_per_rl_step": ratio(steps, len(history.records)),
        "drafter_tokens": history.drafter_tokens,
        "drafter_tokens_per_slot_s": ratio(history.drafter_tokens, held_s),
        "drafter_first_step_s": first[len(first) // 2] if first else None,
    }


def _uses_of_slots(records: Sequence[StepRecord]) -> dict[str, dict[str, float]]:
    """Slot-seconds by use, and idle slot-seconds by reason."""
    return {
        "slot_s": {use.value: sum(one.slot_s[use] for one in records) for use in SlotUse},
        "idle_s": {cause.value: sum(one.idle_s[cause] for one in records) for cause in IdleCause},
    }
