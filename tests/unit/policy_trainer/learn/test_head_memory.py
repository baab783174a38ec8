"""Peak memory of a step of a model with a large vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_models import save_random
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM
from unit.policy_trainer.held import Held
from unit.policy_trainer.sharded_step import trajectories

from paceline.local.memory_plan import LOGITS, policy_plan
from paceline.models.config import read_config
from paceline.services.policy_trainer.batches.batch import make_batch
from paceline.services.policy_trainer.config import PolicyTrainerConfig, rows_of_head
from paceline.services.policy_trainer.learn.build import build_learner
from paceline.services.policy_trainer.learn.model import policy_on_meta

VOCABULARY = 152_064
HEAD_ROWS = 64


@pytest.mark.slow
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
    settings = PolicyTrainerConfig(head_rows=HEAD_ROWS)
    plan = policy_plan(read_config(tmp_path), settings, ranks=1, tokens=tokens)
    whole = plan.parts["gradients"] + plan.parts["optimizer"]
    assert chunk < held.most <= LOGITS * chunk + whole + plan.parts["activations"]


@pytest.mark.parametrize("vocabulary", [320, 32_000, 152_064])
def test_without_a_setting_the_logits_at_once_fill_256_mib_and_the_plan_says_so(
    vocabulary: int,
) -> None:
    rows, row = PolicyTrainerConfig().rows_of_logits(vocabulary), 4 * vocabulary
    assert rows * row <= 256 << 20 < (rows + 1) * row
    assert PolicyTrainerConfig(head_rows=7).rows_of_logits(vocabulary) == 7


def test_a_policy_takes_as_many_rows_as_its_settings_say(tmp_path: Path) -> None:
    save_random(tmp_path, "llama", vocab_size=VOCABULARY)
    for given, rows in ((0, rows_of_head(VOCABULARY)), (7, 7)):
        assert policy_on_meta(tmp_path, chunk_rows=given)._chunk_rows == rows
