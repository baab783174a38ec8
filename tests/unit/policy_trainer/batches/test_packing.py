"""The packing plan, and packed rows against rows of one trajectory each."""

from __future__ import annotations

import dataclasses

import pytest
import torch
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

from paceline.services.policy_trainer.batches.batch import TrainBatch, make_batch, make_micro_batch
from paceline.services.policy_trainer.batches.packing import assign_ranks, plan_micro_batches
from paceline.services.policy_trainer.learn.model import PolicyModel
from paceline.trajectory import BranchKey, DrawSpan, Trajectory, VersionSpan

LENGTHS = st.lists(st.integers(1, 70), max_size=60)
SIZES = {
    "vocab_size": 47,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


@given(LENGTHS, st.integers(1, 5), st.integers(1, 64), st.integers(1, 300))
@settings(max_examples=200, deadline=None)
def test_every_sequence_lies_in_exactly_one_row_and_ranks_have_equally_many_rounds(
    lengths: list[int], world_size: int, row_tokens: int, budget: int
) -> None:
    plan = plan_micro_batches(
        lengths, world_size=world_size, row_tokens=row_tokens, tokens_per_micro_batch=budget
    )
    assert len(plan) == world_size
    assert len({len(rounds) for rounds in plan}) == 1
    placed = [i for rounds in plan for rows in rounds for row in rows for i in row]
    assert sorted(placed) == list(range(len(lengths)))
    for rows in (rows for rounds in plan for rows in rounds if rows):
        widths = [sum(lengths[i] for i in row) for row in rows]
        assert all(len(row) == 1 or sum(lengths[i] for i in row) <= row_tokens for row in rows)
        assert len(rows) == 1 or len(rows) * max(widths) <= budget


@given(LENGTHS, st.integers(1, 5))
@settings(deadline=None)
def test_ranks_differ_by_at_most_the_longest_sequence(lengths: list[int], world_size: int) -> None:
    loads = [sum(lengths[i] for i in share) for share in assign_ranks(lengths, world_size)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def trajectory(number: int, length: int, draw: torch.Generator) -> Trajectory:
    """Random tokens; the mask has a hole, as after a tool's answer."""
    mask = [int(t >= 2 and t % 5 != 0) for t in range(length)]
    return Trajectory(
        key=BranchKey("r", str(number)),
        step=0,
        task_id="t",
        group_id="g",
        group_size=2,
        task_index=0,
        sample_index=number,
        token_ids=tuple(torch.randint(0, 47, (length,), generator=draw).tolist()),
        loss_mask=tuple(mask),
        behavior_logprobs=tuple(-0.5 * bit for bit in mask),
        version_spans=(),
        reward=1.0,
        seed=0,
        temperature=0.5 + number / 10,
    )


def batch_of(lengths: list[int]) -> TrainBatch:
    draw = torch.Generator().manual_seed(1)
    made = [trajectory(i, n, draw) for i, n in enumerate(lengths)]
    return make_batch(made, 0)


@pytest.mark.parametrize(
    "lm",
    [
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    ],
    ids=["llama", "qwen2", "qwen3"],
)
def test_packed_rows_give_the_log_probs_of_rows_of_their_own(lm: object) -> None:
    torch.manual_seed(2)
    model = PolicyModel(lm()).double().eval()  # type: ignore[operator]
    batch = batch_of([7, 12, 5, 9, 3])
    with torch.no_grad():
        packed, entropy = model(make_micro_batch(batch, [[1, 0, 4], [3, 2]]))
        alone = [model(make_micro_batch(batch, [[i]])) for i in (1, 0, 4, 3, 2)]
    assert torch.allclose(packed, torch.cat([logprobs for logprobs, _ in alone]), atol=1e-10)
    assert torch.allclose(entropy, torch.cat([h for _, h in alone]), atol=1e-10)


def test_a_long_trajectory_is_computed_alone_and_widens_nobody() -> None:
    lengths = [32_000] + [60 + i % 90 for i in range(511)]
    plan = plan_micro_batches(lengths, world_size=2, row_tokens=512, tokens_per_micro_batch=8192)
    micro_batches = [rows for rounds in plan for rows in rounds if rows]
    assert [[0]] in micro_batches
    sizes = [
        len(rows) * max(sum(lengths[i] for i in row) for row in rows) for rows in micro_batches
    ]
    assert (
        max(size for rows, size in zip(micro_batches, sizes, strict=True) if rows != [[0]]) <= 8192
    )
    cells = sum(
        len(rows) * max(sum(lengths[i] for i in row) for row in rows) ** 2 for rows in micro_batches
    )
    assert cells <= 1.5 * sum(length**2 for length in lengths)


def test_a_micro_batch_holds_target_owner_and_temperature_of_each_trained_token() -> None:
    batch = batch_of([7, 4])
    micro = make_micro_batch(batch, [[1, 0]])
    assert micro.input_ids.shape == (1, 9)
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5]]
    first, second = batch.token_ids[:7].tolist(), batch.token_ids[7:].tolist()
    assert micro.input_ids.tolist() == [[*second[:-1], *first[:-1]]]
    assert micro.predict_at.tolist() == [1, 2, 4, 5, 6, 8]
    assert micro.targets.tolist() == [*second[2:], *first[2:5], first[6]]
    assert batch.owners[micro.tokens].tolist() == [1, 1, 0, 0, 0, 0]
    assert micro.sequences.tolist() == [0, 0, 1, 1, 1, 1]
    assert micro.positions.tolist() == [2, 3, 2, 3, 4, 6]
    assert micro.temperatures.tolist() == pytest.approx([0.6, 0.6, 0.5, 0.5, 0.5, 0.5])
    assert batch.behavior_logprobs.tolist() == [-0.5] * 6


def test_a_batch_knows_sessions_groups_and_how_old_each_token_is() -> None:
    draw = torch.Generator().manual_seed(1)
    spans = (VersionSpan(2, 4, 5), VersionSpan(4, 9, 7))
    made = [
        dataclasses.replace(
            trajectory(i, 9, draw),
            key=BranchKey("r", session),
            group_id=group,
            version_spans=spans if i else (),
            draw_spans=(DrawSpan(2, 4, "off", "int8"), DrawSpan(4, 9, f"ngram:{i}_1_2", "int8"))
            if i
            else (),
        )
        for i, (session, group) in enumerate([("x", "b"), ("y", "a"), ("y", "a")])
    ]
    batch = make_batch(made, 8)
    assert batch.sessions.tolist() == [0, 1, 1]
    assert batch.groups.tolist() == [0, 1, 1]
    assert batch.weights.tolist() == [1.0, 0.5, 0.5]
    by_way = batch.masks_by_way(torch.arange(18))
    assert {name: mask.int().tolist() for name, mask in by_way.items()} == {
        "numbers=int8": [0] * 6 + [1] * 12,
        "start=computed": [0] * 6 + [1] * 12,
        "arm=off": [0] * 6 + [1, 1, 0, 0, 0, 0] * 2,
        "arm=ngram:1_1_2": [0] * 6 + [0, 0, 1, 1, 1, 1] + [0] * 6,
        "arm=ngram:2_1_2": [0] * 14 + [1] * 4,
    }
    at = [2, 3, 4, 6, 7, 8]
    assert batch.trained.tolist() == [t + 9 * i for i in range(3) for t in at]
    assert batch.lags.tolist() == [0] * 6 + [3, 3, 1, 1, 1, 1] * 2


def test_an_idle_rank_gets_one_padding_token() -> None:
    idle = make_micro_batch(batch_of([6]), [])
    assert idle.input_ids.shape == (1, 1)
    assert idle.targets.shape == (0,)
