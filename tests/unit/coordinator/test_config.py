"""The coordinator's settings."""

from __future__ import annotations

from coordinator.config import CoordinatorConfig
from paceline.config import SHARED_SECTIONS, known_keys

OWN_KEYS = [
    "activation_deadline_s",
    "drafter_enabled",
    "drafter_schedule",
    "environment",
    "evaluation.every",
    "evaluation.forced_arm",
    "evaluation.heldout_prompts",
    "evaluation.probe_arm",
    "evaluation.probe_every",
    "evaluation.probe_prompts",
    "evaluation.seed",
    "finish_grace_s",
    "group_deadline_s",
    "heldout_path",
    "later.from_step",
    "later.heldout_path",
    "later.tasks_path",
    "max_drafter_slots",
    "max_drafter_steps",
    "min_workers_for_training",
    "preempt_deadline_s",
    "prompts_per_step",
    "reward",
    "rollback.drop",
    "rollback.window_steps",
    "samples_per_task",
    "sampling.max_tokens",
    "sampling.temperature",
    "service_recovery_s",
    "slots_per_worker",
    "step_deadline_s",
    "steps",
    "tasks_path",
    "training_interval_steps",
    "workers",
]


def test_the_set_of_keys_is_pinned() -> None:
    own = [key for key in known_keys(CoordinatorConfig) if key.split(".")[0] not in SHARED_SECTIONS]
    assert own == OWN_KEYS


def test_no_evaluation_is_made_without_held_out_tasks() -> None:
    settings = CoordinatorConfig().machine_settings(workers=2)
    assert (settings.accuracy_enabled, settings.probe_enabled, settings.slots) == (False, False, 2)


def test_a_tensor_parallel_worker_holds_several_slots() -> None:
    config = CoordinatorConfig.model_validate({"slots_per_worker": 4, "heldout_path": "h.jsonl"})
    settings = config.machine_settings(workers=2)
    assert (settings.slots, settings.accuracy_enabled, settings.probe_enabled) == (8, True, True)
