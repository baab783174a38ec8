"""The figures of summary.json equal the figures of the made-up run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from paceline.report.journal import RunHistory
from paceline.report.summary import summarize
from paceline.streams import LedgerCount

PIDS = {"redis": 1, "coordinator": 5, "gateway": 2, "policy_trainer": 3, "drafter_trainer": 4}
REQUIRED = [
    "steps",
    "wall_s",
    "reward_first",
    "reward_last",
    "accuracy_first",
    "accuracy_last",
    "pass_name",
    "pass_first",
    "pass_last",
    "tokens_per_s",
    "accept_len_first",
    "accept_len_last",
    "policy_versions",
    "drafter_versions",
    "drafter_train_slot_s",
    "slot_wall_s",
    "trajectories_published",
    "trajectories_trained",
    "trajectories_lost",
    "pids",
]


def test_figures_equal_those_the_run_was_made_with(history: RunHistory) -> None:
    ledger = LedgerCount(final=10, trained=7, dropped={"stale": 1}, open=1, lost=1)
    summary = summarize("demo-0-1", history, ledger, PIDS, {})
    assert set(REQUIRED) <= set(summary)
    assert summary["steps"] == 30
    assert summary["wall_s"] == pytest.approx(30 * 4.0 + 4 * 1.0 + 1.0)
    rewards = [0.5 + 0.4 * step / 29 for step in range(30)]
    assert summary["reward_first"] == pytest.approx(sum(rewards[:10]) / 10)
    assert summary["reward_last"] == pytest.approx(sum(rewards[-10:]) / 10)
    assert summary["reward_parts_last"] == {
        "format": 1.0,
        "math_answer": pytest.approx(sum(rewards[-10:]) / 10 - 0.1),
    }
    assert (summary["accuracy_first"], summary["accuracy_last"]) == (
        pytest.approx(0.5),
        pytest.approx(0.9),
    )
    assert (summary["accept_len_first"], summary["accept_len_last"]) == (
        pytest.approx(1.1),
        pytest.approx(4.0),
    )
    assert summary["tokens_per_s"] == pytest.approx(
        sum(4000 + 10 * step for step in range(30)) / 60.0
    )
    assert (summary["policy_versions"], summary["drafter_versions"]) == (31, 4)
    assert (summary["gate_decisions"]["frozen"], summary["gate_decisions"]["kept"]) == (10, 20)
    assert summary["slot_wall_s"] == pytest.approx(2 * 30 * 4.0)
    assert summary["slot_s"]["idle"] == pytest.approx(30 * 0.05)
    assert sum(summary["slot_s"].values()) == pytest.approx(summary["slot_wall_s"])
    assert summary["drafter_first_step_s"] == 0.002
    assert summary["drafter_tokens_per_slot_s"] == pytest.approx(
        summary["drafter_tokens"] / summary["drafter_train_slot_s"]
    )
    assert sum(summary["idle_s"].values()) == pytest.approx(summary["slot_s"]["idle"])
    assert summary["slot_s"]["generating"] == pytest.approx(30 * (1.2 + 1.9))
    assert summary["preempt_wait_share"] == pytest.approx(0.05 / 4.0)
    assert summary["drafter_steps_per_rl_step"] == pytest.approx(2.0)
    assert summary["drafter_tokens"] == 30 * 2000
    assert summary["near_ties"] == 15
    assert (summary["trajectories_published"], summary["trajectories_lost"]) == (10, 1)
    assert list(summary["pids"]) == [
        "coordinator",
        "gateway",
        "policy_trainer",
        "drafter_trainer",
        "redis",
    ]


def test_what_was_not_measured_is_null(history: RunHistory) -> None:
    bare = RunHistory((), {}, history.served[:1], (), (), 5.0, 6.0, 0.0, 0, "evaluate")
    summary = summarize("demo-0-1", bare, LedgerCount(0, 0, {}, 0, 0), {}, {})
    read = json.loads(json.dumps(summary))
    assert (read["steps"], read["reward_first"], read["tokens_per_s"], read["accuracy_last"]) == (
        0,
        None,
        None,
        None,
    )


def test_start_policy_and_heldout_set_are_named_by_their_hash(
    tmp_path: Path, history: RunHistory
) -> None:
    model = tmp_path / "policy_start"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "tasks_heldout.jsonl").write_bytes(b"tasks")
    config = {
        "gateway": {"model": str(model)},
        "coordinator": {"heldout_path": str(tmp_path / "tasks_heldout.jsonl")},
    }
    summary = summarize("demo-0-1", history, LedgerCount(0, 0, {}, 0, 0), {}, config)
    assert summary["sha256"] == {
        "policy_start/model.safetensors": hashlib.sha256(b"weights").hexdigest(),
        "tasks_heldout.jsonl": hashlib.sha256(b"tasks").hexdigest(),
    }
