"""Reading the start policy, and the attention that it runs with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from unit.policy_trainer.sharded_step import trajectories

from paceline.errors import ConfigError, DataLoss, InvalidInput, WeightsError
from paceline.services.policy_trainer.batches.batch import make_batch, make_micro_batch
from paceline.services.policy_trainer.learn.model import (
    PolicyModel,
    StartWeights,
    check_attention,
    policy_on_meta,
)
from paceline.training.process import on_device


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def loaded(directory: Path, attention: str = "sdpa") -> PolicyModel:
    policy = policy_on_meta(directory, attention=attention)
    StartWeights(directory).fill(policy, policy.names(), "cpu")
    return policy


def test_a_policy_has_no_memory_before_it_is_filled(model_dir: Path) -> None:
    assert all(one.is_meta for one in policy_on_meta(model_dir).parameters())


def test_a_filled_policy_says_what_transformers_says(model_dir: Path) -> None:
    ids = torch.arange(40)[None]
    theirs = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)(ids).logits
    ours = loaded(model_dir).lm(ids).logits
    assert torch.equal(ours, theirs)


def test_a_policy_in_several_files_is_read_whole(model_dir: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(model_dir)
    (model_dir / "model.safetensors").unlink()
    model.save_pretrained(model_dir, max_shard_size="20KB")
    assert len(list(model_dir.glob("*.safetensors"))) > 1
    for name, weight in loaded(model_dir).lm.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_a_start_policy_that_is_not_what_its_config_says_is_named(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, file)
    with pytest.raises(WeightsError, match=rf"{name} has a wrong shape.*\(23, 64\).*\(24, 64\)"):
        loaded(model_dir)
    save_file({key: one for key, one in tensors.items() if key != name}, file)
    with pytest.raises(WeightsError, match=f"{name} is missing"):
        loaded(model_dir)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataLoss, match=r"model\.safetensors"):
        loaded(model_dir)
    file.unlink()
    with pytest.raises(InvalidInput, match="has no weights"):
        loaded(model_dir)


@pytest.mark.slow
def test_flex_attention_keeps_the_documents_of_a_row_apart(model_dir: Path) -> None:
    """The comparison runs without gradients, which flex supports on CUDA alone."""
    batch = make_batch(trajectories(), 4)
    micro = make_micro_batch(batch, [[0, 1], [2, 3, 4]])
    with torch.no_grad():
        ours, entropy = loaded(model_dir, "flex")(micro)
        theirs, other = loaded(model_dir)(micro)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, other, rtol=1e-4, atol=1e-5)


def test_attention_that_cannot_train_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention=flex.*sdpa"):
        check_attention("flex", "cpu")
    check_attention("sdpa", "cpu")


@pytest.mark.gpu
def test_attention_on_a_gpu_has_the_log_probs_of_sdpa(model_dir: Path) -> None:
    micro = make_micro_batch(make_batch(trajectories(), 4), [[0, 1], [2, 3, 4]])
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = (
            loaded(model_dir, one).cuda()(on_device(micro, "cuda"))[0] for one in ("flex", "sdpa")
        )
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
