"""Low-rank adapters are trained alone; published weights include them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from random_models import save_random
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from transformers import LlamaForCausalLM
from unit.policy_trainer.sharded_step import trajectories, whole

from paceline.errors import ConfigError, DataLoss
from paceline.local.memory_plan import adapter_parameters
from paceline.models.config import read_config
from paceline.ranks.messages import Save
from paceline.services.policy_trainer.batches.batch import TrainBatch, make_batch
from paceline.services.policy_trainer.batches.packing import mini_batches
from paceline.services.policy_trainer.config import AdaptersConfig, PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner
from paceline.services.policy_trainer.learn.learner import Learner
from paceline.services.policy_trainer.learn.objective import Figures
from paceline.services.policy_trainer.messages import Progress
from paceline.services.policy_trainer.trainer import PolicyTrainer
from paceline.training.shards import local_of

RANK, ALPHA = 2, 6.0
REFERENCE = {"name": "grpo", "kl": {"coefficient": 0.1}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    shape = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
    save_random(directory, "llama", **shape, **heads)
    return directory


def config_of(model: Path, out: Path, **adapters: object) -> PolicyTrainerConfig:
    given = {"rank": RANK, "alpha": ALPHA, **adapters}
    return PolicyTrainerConfig.model_validate(
        {
            "model": str(model),
            "device": "cpu",
            "run": {"dir": str(out)},
            "algorithm": REFERENCE,
            "adapters": given,
            "optimizer": {"lr": 1e-2},
        }
    )


def built(model: Path, out: Path, mesh: DeviceMesh, **adapters: object) -> Learner:
    return build_learner(config_of(model, out, **adapters), mesh)


def batch(step: int = 0) -> TrainBatch:
    made = make_batch(trajectories(), 4)
    made.rewards.copy_(torch.randn(24, generator=torch.Generator().manual_seed(step)))
    return made


def by_hand(model: Path, learner: Learner) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """The model in float64, and its weights W + alpha / rank * B A as functions of A and B."""
    lm = LlamaForCausalLM.from_pretrained(model, dtype=torch.float64)
    trained = {
        name: local_of(one).detach().double().requires_grad_()
        for name, one in learner.optimizer.parameters.items()
    }
    weights = {name: one.detach() for name, one in lm.named_parameters()}
    for name in trained:
        if ".lora_A." in name:
            up = trained[name.replace(".lora_A.", ".lora_B.")]
            at = name.replace(".lora_A.default.", ".")
            weights[at] = weights[at] + ALPHA / RANK * up @ trained[name]
    return lm, {**weights, **{f"trained.{name}": one for name, one in trained.items()}}


def test_log_probs_and_gradients_are_those_of_weights_with_the_product_added(
    model_dir: Path, tmp_path: Path, mesh: DeviceMesh
) -> None:
    learner = built(model_dir, tmp_path, mesh)
    learner.step(batch())  # B is not zero any more
    lm, given = by_hand(model_dir, learner)
    weights = {k: v for k, v in given.items() if not k.startswith("trained.")}
    own, figures = batch(1), Figures()
    known, _ = learner._know(own, figures)
    (part,) = mini_batches(own, learner.config)

    at, total = 0, torch.zeros((), dtype=torch.float64)
    for trajectory in trajectories():
        ids = torch.tensor([trajectory.token_ids])
        logits = functional_call(lm, weights, (ids,)).logits[0]
        logprobs = (logits / trajectory.temperature).log_softmax(-1)
        for t in range(1, ids.shape[1]):
            if trajectory.loss_mask[t]:
                policy = logprobs[t - 1, ids[0, t]]
                gap = known.reference_logprobs[at].double() - policy
                divergence = gap.exp() - gap - 1
                surrogate = (policy - policy.detach()).exp() * known.advantages[at].double()
                total = total + 0.1 * divergence - surrogate
                at += 1
    loss = total / at
    loss.backward()

    assert learner._accumulate(own, part, known, figures) == pytest.approx(loss.item(), rel=1e-5)
    assert len(learner.optimizer.parameters) == 2 * 7 * 2  # A and B, seven layers, two times
    for name, parameter in learner.optimizer.parameters.items():
        found, wanted = local_of(parameter.grad), given[f"trained.{name}"].grad
        assert (found.double() - wanted).norm() < 1e-4 * wanted.norm(), name
    for name, weight in learner.weights.published():
        assert torch.allclose(local_of(weight).double(), weights[name], atol=1e-6), name


def test_adapters_begin_as_nothing_and_leave_every_other_weight(
    model_dir: Path, tmp_path: Path, mesh: DeviceMesh
) -> None:
    learner = built(model_dir, tmp_path, mesh, targets=["q_proj", "down_proj"])
    start = LlamaForCausalLM.from_pretrained(model_dir).state_dict()
    for name, weight in whole(learner.weights.published()).items():
        assert torch.equal(weight, start[name]), name
    learner.step(batch())
    for name, weight in whole(learner.weights.published()).items():
        change = weight - start[name]
        if "q_proj" in name or "down_proj" in name:
            assert torch.linalg.matrix_rank(change.double(), rtol=1e-4) == RANK, name
        else:
            assert not change.any(), name


def test_the_reference_is_the_start_policy_without_memory_of_its_own(
    model_dir: Path, tmp_path: Path, mesh: DeviceMesh
) -> None:
    learner, apart = (built(model_dir, tmp_path, mesh, rank=rank) for rank in (RANK, 0))
    assert not list(learner.reference.parameters())
    assert list(apart.reference.parameters())
    learner.step(batch())
    said = learner._look(batch(), learner.reference)
    assert torch.allclose(said, apart._look(batch(), apart.reference), atol=1e-5)
    assert not torch.allclose(said, learner._look(batch(), learner.model), atol=1e-2)


def saved(learner: Learner, out: Path, version: int = 1) -> Path:
    trainer = PolicyTrainer(learner.config, learner, None)
    trainer.progress = Progress(policy_version=version)
    trainer.handle(Save(1))
    return out / "checkpoints" / "policy" / f"step-{version}"


def test_a_run_goes_on_from_a_checkpoint_of_adapters_alone_bit_for_bit(
    model_dir: Path, tmp_path: Path, mesh: DeviceMesh
) -> None:
    learner = built(model_dir, tmp_path, mesh)
    learner.step(batch(0))
    directory = saved(learner, tmp_path)
    numbers = adapter_parameters(read_config(model_dir), RANK, AdaptersConfig().targets)
    assert numbers == sum(one.numel() for one in learner.optimizer.parameters.values())
    (shard,) = (directory / "shards").iterdir()
    assert 3 * 4 * numbers < shard.stat().st_size < 3 * 4 * numbers + 40_000

    resumed = built(model_dir, tmp_path, mesh)
    PolicyTrainer(resumed.config, resumed, None).resume()
    figures = [one.step(batch(1)).figures["loss"] for one in (learner, resumed)]
    assert figures[0] == figures[1]
    expected = whole(learner.weights.published())
    for name, weight in whole(resumed.weights.published()).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.few(1)
@pytest.mark.parametrize("other", [{"rank": 0}, {"rank": 3}, {"alpha": 5.0}])
def test_a_checkpoint_of_other_adapters_is_data_loss(
    model_dir: Path, tmp_path: Path, mesh: DeviceMesh, other: dict[str, float]
) -> None:
    saved(built(model_dir, tmp_path, mesh), tmp_path)
    resumed = built(model_dir, tmp_path, mesh, **other)
    with pytest.raises(DataLoss, match="another model or trainer"):
        PolicyTrainer(resumed.config, resumed, None).resume()


def test_the_export_is_served_as_a_model_and_the_adapter_by_peft(
    model_dir: Path, tmp_path: Path, mesh: DeviceMesh
) -> None:
    learner = built(model_dir, tmp_path, mesh)
    learner.step(batch())
    directory = saved(learner, tmp_path)
    exported = LlamaForCausalLM.from_pretrained(directory)
    for name, weight in whole(learner.weights.published()).items():
        assert torch.allclose(exported.state_dict()[name], weight, atol=1e-6), name
    start = LlamaForCausalLM.from_pretrained(model_dir)
    adapted = PeftModel.from_pretrained(start, directory / "adapter").eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.allclose(adapted(ids).logits, exported(ids).logits, atol=1e-4)


def test_adapters_without_peft_are_refused_by_name(
    model_dir: Path, tmp_path: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "paceline.services.policy_trainer.learn.weights.find_spec", lambda name: None
    )
    with pytest.raises(ConfigError, match=r"adapters.rank needs peft.*paceline\[lora\].*seen: 2"):
        built(model_dir, tmp_path, mesh)


@pytest.mark.parametrize("bad", [{"targets": []}, {"targets": ["lm_head"]}, {"rank": -1}])
def test_settings_of_no_adapters_are_refused(tmp_path: Path, bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="adapters"):
        config_of(tmp_path, tmp_path, **bad)
