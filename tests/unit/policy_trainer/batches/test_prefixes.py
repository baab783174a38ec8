"""Trajectories that begin alike lie in a row as a tree, and are computed as if each were alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from drawn_cases import case_count
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from unit.policy_trainer.batches.test_packing import SIZES, trajectory

from paceline.services.policy_trainer.batches.batch import (
    TrainBatch,
    TreeRow,
    make_batch,
    make_micro_batch,
)
from paceline.services.policy_trainer.batches.packing import neighbours, prefix_units
from paceline.services.policy_trainer.learn.model import PolicyModel, ValueModel, tree_mask

FEW = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)


def arrays(sequences: list[list[int]]) -> list[np.ndarray]:
    return [np.array(one, np.int64) for one in sequences]


def nodes(sequences: list[list[int]]) -> int:
    """Count the nodes of the sequences' prefix tree: their different beginnings."""
    return len({tuple(one[:end]) for one in sequences for end in range(1, len(one) + 1)})


@given(FEW, st.integers(1, 30), st.integers(1, 3))
@settings(max_examples=case_count(300), deadline=None)
def test_a_unit_has_the_size_of_its_tree_and_room_in_a_row(
    sequences: list[list[int]], row_tokens: int, groups: int
) -> None:
    of = [i % groups for i in range(len(sequences))]
    units = prefix_units(neighbours(arrays(sequences), of), row_tokens)
    assert sorted(i for unit in units for i in unit.members) == list(range(len(sequences)))
    for unit in units:
        assert len({of[i] for i in unit.members}) == 1
        assert unit.tokens == nodes([sequences[i] for i in unit.members])
        longest = max(len(sequences[i]) for i in unit.members)
        assert unit.tokens <= max(row_tokens, longest)


@given(FEW, st.integers(0, 4))
@settings(max_examples=case_count(300), deadline=None)
def test_a_token_attends_to_its_own_trajectory_up_to_itself_and_to_nothing_else(
    sequences: list[list[int]], padding: int
) -> None:
    row, groups = TreeRow(), [len(one) % 2 for one in sequences]
    paths = [row.add(one, group) for one, group in zip(arrays(sequences), groups, strict=True)]
    width = row.width + padding
    ids, positions, ends = row.padded(width)
    wanted = np.eye(width, dtype=bool)  # padding attends to itself
    for tokens, path in zip(sequences, paths, strict=True):
        assert ids[path].tolist() == tokens
        assert positions[path].tolist() == list(range(len(tokens)))
        for place, column in enumerate(path):
            wanted[column, path[: place + 1]] = True
    mask = tree_mask(torch.from_numpy(ends)[None], blocks=False)
    assert mask.shape == (1, 1, width, width)
    assert np.array_equal(mask[0, 0].numpy(), wanted)


def alike() -> TrainBatch:
    """Two groups with a shared prompt each; one pair shares more, and one sample occurs twice."""
    draw = torch.Generator().manual_seed(3)
    made = [trajectory(i, n, draw) for i, n in enumerate([9, 12, 9, 7, 11, 11])]
    prompt, other = made[0].token_ids[:4], made[3].token_ids[:3]
    made[1] = replace(made[1], token_ids=made[0].token_ids[:6] + made[1].token_ids[6:])
    made[2] = replace(made[2], token_ids=made[0].token_ids, temperature=made[0].temperature)
    made[4] = replace(made[4], token_ids=other + made[4].token_ids[3:], group_id="h")
    made[5] = replace(made[5], token_ids=prompt + made[5].token_ids[4:], group_id="h")
    made[3] = replace(made[3], group_id="h")
    return make_batch(made, 0)


ROWS = [[0, 2, 1], [3, 4, 5]]


@pytest.mark.parametrize(
    "lm",
    [
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    ],
    ids=["llama", "qwen2", "qwen3"],
)
def test_a_tree_has_the_log_probs_and_the_gradients_of_its_trajectories_alone(lm: object) -> None:
    torch.manual_seed(2)
    model, batch = PolicyModel(lm()).double(), alike()  # type: ignore[operator]
    weights = torch.randn(len(batch.owners), dtype=torch.float64)
    tree = make_micro_batch(batch, ROWS)
    alone = [make_micro_batch(batch, [[i]]) for row in ROWS for i in row]
    assert tree.input_ids.numel() < sum(one.input_ids.numel() for one in alone)

    packed, entropy = model(tree, entropy_gradient=True)
    ((packed + entropy) * weights[tree.tokens]).sum().backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    apart = [model(one, entropy_gradient=True) for one in alone]
    for (logprobs, entropies), one in zip(apart, alone, strict=True):
        ((logprobs + entropies) * weights[one.tokens]).sum().backward()

    assert torch.equal(tree.tokens, torch.cat([one.tokens for one in alone]))
    assert torch.allclose(packed, torch.cat([logprobs for logprobs, _ in apart]), atol=1e-10)
    assert torch.allclose(entropy, torch.cat([one for _, one in apart]), atol=1e-10)
    for name, one in model.named_parameters():
        assert one.grad is not None
        assert torch.allclose(found[name], one.grad, rtol=1e-5, atol=1e-5), name  # logits: fp32


def test_a_critic_values_the_tokens_of_a_tree_as_those_of_its_trajectories() -> None:
    torch.manual_seed(2)
    model, batch = ValueModel(LlamaForCausalLM(LlamaConfig(**SIZES)).model).double(), alike()
    torch.nn.init.normal_(model.head.weight)
    tree = model(make_micro_batch(batch, ROWS))
    alone = [model(make_micro_batch(batch, [[i]])) for row in ROWS for i in row]
    assert torch.allclose(tree, torch.cat(alone), atol=1e-6)


def test_tokens_that_follow_the_same_ones_are_predicted_once() -> None:
    batch = alike()
    micro = make_micro_batch(batch, [[0, 2]])  # one sample twice
    assert micro.input_ids.shape == (1, 8)
    assert len(micro.predictions) == 2 * len(micro.predict_at)
    hotter = replace(batch, temperatures=torch.arange(6) + 0.5)
    assert len(make_micro_batch(hotter, [[0, 2]]).predict_at) == len(micro.predictions)


def test_rows_of_one_trajectory_each_need_no_mask() -> None:
    batch = alike()
    assert make_micro_batch(batch, [[0], [2]]).subtree_ends is None
    assert make_micro_batch(batch, [[0], [1]]).subtree_ends is not None, "one of them is padded"
