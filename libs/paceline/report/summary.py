"""Computes the figures of a run, summary.json, from journal and ledger."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.report import journal, machine, solved
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
    pids: Mapping[str, int],
    config: Mapping[str, Any],
) -> Summary:
    """All values of summary.json. Unmeasured figures are None."""
    records, tail = history.records, history.records[-20:]
    step_s = sum(record.step_s for record in records)
    drafter_s = sum(one.seconds for one in history.intervals if one.holder == "drafter")
    drafter_steps = sum(record.drafter_steps for record in records)
    first_steps_s = sorted(history.first_steps_s)
    order = [*_SERVICES, *sorted(set(pids) - set(_SERVICES))]
    return {
        "run_id": run_id,
        "phase": history.phase,
        "steps": len(records),
        "wall_s": history.ended_s - history.began_s - history.away_s,
        **_rewards("first", records[:WINDOW]),
        **_rewards("last", records[-WINDOW:]),
        **_ends("accuracy", history.evaluated(journal.ACCURACY)),
        "pass_name": history.widest_pass or None,
        **_ends("pass", history.evaluated(history.widest_pass)),
        "tokens_per_s": _tokens_per_s(records),
        "tokens_per_s_last": _tokens_per_s(tail),
        **_ends("accept_len", history.evaluated(journal.PROBE)),
        "accept_len_live_last": mean([one.accept_length for one in tail if one.accept_length]),
        "policy_versions": len({served.policy for served in history.served}),
        "drafter_versions": len({served.drafter for served in history.served}),
        "gate_decisions": dict(history.decisions),
        "drafter_train_slot_s": drafter_s,
        "slot_wall_s": history.slots * sum(one.seconds for one in history.windows),
        "slot_s": {use.value: sum(one.slot_s[use] for one in records) for use in SlotUse},
        "idle_s": {cause.value: sum(one.idle_s[cause] for one in records) for cause in IdleCause},
        "slots": history.slots,
        "drafter_steps": drafter_steps,
        "drafter_steps_per_rl_step": ratio(drafter_steps, len(records)),
        "drafter_tokens": history.drafter_tokens,
        "drafter_tokens_per_slot_s": ratio(history.drafter_tokens, drafter_s),
        "drafter_first_step_s": first_steps_s[len(first_steps_s) // 2] if first_steps_s else None,
        "preempt_wait_share": ratio(sum(record.preempt_wait_s for record in records), step_s),
        "trajectories_published": ledger.final,
        "trajectories_trained": ledger.trained,
        "trajectories_dropped": dict(ledger.dropped),
        "trajectories_unpublished": dict(ledger.unpublished),
        "trajectories_open": ledger.open,
        "trajectories_lost": ledger.lost,
        "mismatch_last": {name: _mean_of("policy", name, records[-WINDOW:]) for name in _MISMATCH},
        "samples_unscored": solved.total_unscored(records),
        "near_ties": sum(record.near_ties for record in records),
        "steps_with_near_ties": sum(record.near_ties > 0 for record in records),
        "pids": {name: pids[name] for name in order if name in pids},
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


def _mean_of(field: str, key: str, records: Sequence[StepRecord]) -> float | None:
    """Mean of a key in a map of the records over the steps that have it; None without any."""
    return mean([getattr(one, field)[key] for one in records if key in getattr(one, field)])


def _rewards(when: str, records: Sequence[StepRecord]) -> Summary:
    parts = sorted({part for one in records for part in one.reward_parts})
    return {
        f"reward_{when}": mean([record.reward_mean for record in records]),
        f"reward_parts_{when}": {one: _mean_of("reward_parts", one, records) for one in parts},
    }


def _tokens_per_s(records: Sequence[StepRecord]) -> float | None:
    tokens = sum(record.response_tokens for record in records)
    return ratio(tokens, sum(record.rollout_s for record in records))


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
    found = {}
    for name, path in {f"{model.parent.name}/{model.name}": model, heldout.name: heldout}.items():
        if path.is_file():
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
