"""The state that a learner keeps when it leaves its device and when its process ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from unit.drafter_trainer.samples import TARGET, sample, toy_policy

from paceline.errors import DataLoss
from paceline.models.config import ModelConfig
from paceline.services.drafter_trainer.config import DrafterOptimizerConfig
from paceline.services.drafter_trainer.learn.learner import DrafterLearner
from paceline.services.drafter_trainer.learn.membership import on_cpu
from paceline.services.drafter_trainer.rows.sample import pack
from paceline.speculators.eagle import EagleNet, EagleOptions
from paceline.training.checkpoints import CheckpointWriter, read_checkpoint
from paceline.training.offload import Offload
from paceline.training.shards import tensors_of

pytestmark = pytest.mark.usefixtures("one_rank")
ROWS = [pack([sample(12 + i, i)], window=512) for i in range(8)]
HEAD = toy_policy().policy_head()


def learner(
    target: ModelConfig = TARGET, *, micro_batches: int = 2, **settings: Any
) -> DrafterLearner:
    config = DrafterOptimizerConfig(lr=1e-2, warmup_steps=2, **settings)
    return DrafterLearner(EagleNet(target, seed=1), config, micro_batches=micro_batches)


def learn(one: DrafterLearner, first: int, last: int) -> None:
    for row in ROWS[first:last]:
        one.micro_step(row, HEAD)


def weights(one: DrafterLearner) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in one.snapshot().state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def test_a_candidate_drafts_the_tokens_that_were_most_frequent_until_then() -> None:
    net = EagleNet(TARGET, EagleOptions(draft_vocab_size=8), seed=1)
    net.choose_tokens(torch.arange(TARGET.vocab_size))
    one = DrafterLearner(net, DrafterOptimizerConfig(lr=1e-2, warmup_steps=2), micro_batches=2)
    learn(one, 0, 2)
    counts = torch.zeros(TARGET.vocab_size, dtype=torch.int64)
    counts[[3, 5]] = torch.tensor([7, 9])
    first = one.snapshot(counts).token_ids
    assert first is not None
    assert {3, 5} < {*first.tolist()} <= {3, 5, *range(TARGET.vocab_size - 8, TARGET.vocab_size)}
    learn(one, 2, 4)  # over the new tokens
    again = one.snapshot().token_ids
    assert again is not None
    assert torch.equal(again, first)


def test_leaving_the_device_in_the_middle_of_a_step_changes_no_number() -> None:
    whole, broken = learner(), learner()
    learn(whole, 0, 8)
    learn(broken, 0, 3)
    for resumed in range(3, 8):
        broken.offload()
        broken.attach(broken.members)
        learn(broken, resumed, resumed + 1)
    assert broken.total_steps == 4
    assert same(weights(broken), weights(whole))


def test_a_step_whose_gradient_is_nan_is_forgotten_and_the_next_one_is_taken() -> None:
    whole, broken = learner(), learner()
    states = torch.full_like(ROWS[0].states, torch.nan)
    broken.micro_step(replace(ROWS[0], states=states), HEAD)
    result = broken.micro_step(ROWS[1], HEAD)
    assert (result.stepped, result.skipped) == (False, True)
    assert same(weights(broken), weights(whole))
    learn(broken, 2, 6)
    learn(whole, 2, 6)
    assert broken.total_steps == whole.total_steps == 2
    assert same(weights(broken), weights(whole))


def test_memory_is_given_back_and_refilled_under_the_same_tensors() -> None:
    whole, broken = learner(), learner()
    learn(whole, 0, 8)
    learn(broken, 0, 3)
    live = broken.sharded.named() | broken.sharded.gradients()
    assert any(key.startswith("gradient/") for key in live), "the partial gradient is not kept"
    memory = Offload([tensor.detach() for tensor in live.values()])
    memory.leave()
    assert {tensor.untyped_storage().nbytes() for tensor in live.values()} == {0}
    memory.enter()
    learn(broken, 3, 8)
    assert same(weights(broken), weights(whole))


def test_a_change_of_membership_carries_the_partial_gradient_and_the_same_members_keep_their_shards() -> (
    None
):
    whole, moved = learner(), learner()
    learn(whole, 0, 8)
    learn(moved, 0, 3)
    before = moved.sharded
    moved.attach(moved.members)
    assert moved.sharded is before
    moved.attach(on_cpu(1))
    assert moved.sharded is not before
    learn(moved, 3, 8)
    assert (moved.total_steps, moved.total_tokens) == (whole.total_steps, whole.total_tokens)
    assert same(weights(moved), weights(whole))


def test_a_state_that_went_over_the_disk_goes_on_exactly(tmp_path: Path) -> None:
    whole, first, second = learner(), learner(), learner()
    learn(whole, 0, 8)
    learn(first, 0, 4)
    writer = CheckpointWriter(tmp_path, lambda state, directory: None)
    writer.write(first.state(), 1, first.members.writing)
    learn(first, 4, 6)  # training continues during the write
    writer.wait()
    second.load_state(read_checkpoint(tmp_path / "checkpoint-1", second.state()))
    assert second.total_steps == 2
    learn(second, 4, 8)
    assert same(weights(second), weights(whole))
    assert (second.total_steps, second.total_tokens) == (whole.total_steps, whole.total_tokens)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_state_stays_as_it_is_while_the_learner_goes_on(device: str) -> None:
    one = learner()
    learn(one, 0, 2)
    # Where members compute on a GPU, an optimiser without a fused kernel counts on the CPU.
    one.sharded.members = replace(one.sharded.members, devices=(device,))
    state = dict(tensors_of(one.state()))
    before = {name: value.clone() for name, value in state.items()}
    learn(one, 2, 4)
    assert same(state, before)


def test_what_is_judged_and_kept_are_averages_of_the_weights_after_each_step() -> None:
    one, last = learner(average=0.3), learner(average=0)
    expected = weights(last)
    assert same(weights(one), expected)
    for step in range(1, 5):
        learn(one, 2 * step - 2, 2 * step)
        learn(last, 2 * step - 2, 2 * step)
        decay = min(0.3, step / (step + 9))
        live = weights(last)
        assert same(
            live, {name: value.clone() for name, value in one.sharded.net.state_dict().items()}
        )
        for name, value in live.items():
            expected[name] = decay * expected[name].double() + (1 - decay) * value.double()
            assert torch.allclose(weights(one)[name].double(), expected[name], rtol=1e-6, atol=1e-7)


def test_an_export_holds_the_averages_that_are_judged(tmp_path: Path) -> None:
    one = learner(average=0.9)
    learn(one, 0, 8)
    out = tmp_path / "out"
    writer = CheckpointWriter(tmp_path, lambda state, at: one.export(state, at, out))
    writer.write({"learner": one.state()}, 1, one.members.writing)
    writer.wait()
    assert same(load_file(out / "model.safetensors"), weights(one))


def test_a_step_at_half_of_the_rate_moves_weights_half_as_far() -> None:
    whole, half = learner(average=0), learner(average=0)
    start, half.rate = weights(whole), 0.5
    learn(whole, 0, 2)
    learn(half, 0, 2)
    for name, value in weights(half).items():
        moved = weights(whole)[name] - start[name]
        assert torch.allclose(2 * (value - start[name]), moved, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_matrices_between_states_have_one_moment_with_muon_and_two_with_adamw(kind: str) -> None:
    one = learner(kind=kind)
    learn(one, 0, 2)

    def moments(name: str) -> set[str]:
        held = (key.split("/") for key in one.state() if key.endswith(f"/{name}"))
        return {part for part, _ in held} - {"model", "average"}

    adamw = {"step", "exp_avg", "exp_avg_sq"}
    assert moments("fc.weight") == ({"exp_avg"} if kind == "muon" else adamw)
    assert moments("layers.0.post_attention_layernorm.weight") == adamw


def test_the_state_of_one_optimiser_is_data_loss_to_the_other() -> None:
    with pytest.raises(DataLoss, match="another drafter"):
        learner(kind="adamw").load_state(learner(kind="muon").state())


def test_the_state_of_another_drafter_is_data_loss() -> None:
    state = learner().state()
    del state["model/fc.weight"]
    with pytest.raises(DataLoss, match="another drafter"):
        learner().load_state(state)


def test_a_step_takes_as_many_rows_as_it_is_to_take() -> None:
    one = learner(micro_batches=3)
    assert [one.micro_step(row, HEAD).stepped for row in ROWS] == [False, False, True] * 2 + [
        False,
        False,
    ]
    assert one.total_steps == 2
