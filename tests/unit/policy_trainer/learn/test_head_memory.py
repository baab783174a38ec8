"""What a step of a model with a large vocabulary holds at most."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM
from unit.policy_trainer.held import Held
from unit.policy_trainer.sharded_step import trajectories

from paceline.local.memory_plan import LOGITS, PolicySizes, policy_plan
from paceline.models.config import read_config
from paceline.services.policy_trainer.batches.batch import make_batch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner

VOCABULARY = 152_064
HEAD_ROWS = 64


def test_a_step_holds_one_chunk_of_logits_and_no_more_than_is_planned(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    learner = build_learner(
        PolicyTrainerConfig(model=str(tmp_path), device="cpu", head_rows=HEAD_ROWS), mesh
    )
    batch = make_batch(trajectories(vocabulary=VOCABULARY), 4)
    tokens = len(batch.owners)
    assert tokens > 6 * HEAD_ROWS, "the logits of all tokens would be six times a chunk's"
    learner.step(batch)  # the second one finds the moments there
    with Held() as held:
        learner.step(batch)
    chunk = 4 * HEAD_ROWS * VOCABULARY
    plan = policy_plan(
        read_config(tmp_path), ranks=1, tokens=tokens, settings=PolicySizes(head_rows=HEAD_ROWS)
    )
    whole = plan.parts["gradients"] + plan.parts["optimizer"]
    assert chunk < held.most <= LOGITS * chunk + whole + plan.parts["activations"]
