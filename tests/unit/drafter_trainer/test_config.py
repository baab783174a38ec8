"""The keys of the drafter trainer's settings are what users write into files: a change shows
here.
"""

from __future__ import annotations

from drafter_trainer.config import DrafterTrainerConfig
from paceline.config import ServiceConfig, known_keys

KEYS = {
    "activation_deadline_s",
    "buffer.byte_budget",
    "buffer.heldout_every",
    "buffer.heldout_samples",
    "buffer.long_share",
    "buffer.recency",
    "buffer.rejected",
    "buffer.samples",
    "buffer.window",
    "checkpoint_interval_s",
    "data_wait_s",
    "device",
    "drafter",
    "gate.bootstrap",
    "gate.draft_cost",
    "gate.draft_steps",
    "gate.freeze_after",
    "gate.freeze_gain",
    "gate.interval_steps",
    "gate.min_positions",
    "gate.other_draft_cost",
    "gate.samples",
    "gate.temperature",
    "gate.verification",
    "gate.verify_cost",
    "max_epochs",
    "max_micro_batch_tokens",
    "micro_batch_ms",
    "micro_batches_per_step",
    "model",
    "niceness",
    "optimizer.betas",
    "optimizer.clip_norm",
    "optimizer.lr",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    "options",
    "preempt_deadline_s",
    "push_deadline_s",
    "push_grace_s",
    "rank_start_deadline_s",
    "ranks",
    "resume",
    "servable",
    "shadow_share",
    "shadows",
    "threads_per_rank",
}


def test_the_set_of_keys_is_pinned() -> None:
    assert set(known_keys(DrafterTrainerConfig)) - set(known_keys(ServiceConfig)) == KEYS
