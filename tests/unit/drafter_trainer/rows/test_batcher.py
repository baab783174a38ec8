"""Rows pair (h_t, token t+1) with h_{t+1} and token t+2; documents of one row do not
see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from unit.drafter_trainer.samples import (
    PROMPT,
    TARGET,
    VOCABULARY,
    batch,
    sample,
    toy_policy,
)

from paceline.services.drafter_trainer.rows.sample import FeatureSample, pack, sample_from
from paceline.speculators.eagle import EagleNet
from paceline.speculators.net import trained_net
from paceline.speculators.packed import PackedRow

LENGTHS = (9, 14, 6, 21)


def rough_net() -> EagleNet:
    policy, net = toy_policy(), EagleNet(TARGET, seed=2)
    net.bind(policy.embed, policy.head)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.2 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(7)
            )
    return net


def features(row: PackedRow) -> Tensor:
    with torch.no_grad():
        return rough_net().features(
            row.states[None], row.next_tokens[None], row.positions[None], row.mask()[None]
        )[0]


def made() -> list[FeatureSample]:
    return [sample(length, seed) for seed, length in enumerate(LENGTHS)]


def packed(samples: Sequence[FeatureSample], window: int = 512) -> PackedRow:
    return pack(samples, window=window)


def contexts(sample: FeatureSample) -> list[tuple[list[Tensor], list[int], Tensor]]:
    """Oracle: for every training position its path alone: states and next tokens from row 0 on, and
    the state after.
    """
    rows, tokens = list(sample.hidden), sample.token_ids.tolist()
    return [(rows[: t + 1], tokens[1 : t + 2], rows[t + 1]) for t in range(len(rows) - 1)]


def test_the_targets_own_step_maps_every_pair_to_its_target() -> None:
    policy = toy_policy()
    row = packed(made())
    torch.testing.assert_close(policy.step(row.states, row.next_tokens), row.next_states)
    drawn = row.valid
    assert torch.equal((row.next_states @ policy.head.T).argmax(-1)[drawn], row.draft_tokens[drawn])
    # A sequence of N tokens has N - 1 rows, N - 2 pairs; tokens from PROMPT on are the policy's.
    assert len(row) == sum(length - 2 for length in LENGTHS)
    assert int(drawn.sum()) == sum(length - PROMPT for length in LENGTHS)
    assert row.positions.tolist() == [t for length in LENGTHS for t in range(length - 2)]


def test_a_position_of_a_packed_row_predicts_as_its_path_alone() -> None:
    samples, net, got = made(), rough_net(), None
    row = packed(samples)
    got = features(row)
    paths = [one for part in samples for one in contexts(part)]
    assert len(paths) == len(row)
    for here, (states, tokens, after) in enumerate(paths):
        with torch.no_grad():
            alone = net.features(
                torch.stack(states)[None], torch.tensor([tokens]), torch.arange(len(tokens))[None]
            )
        torch.testing.assert_close(got[here], alone[0, -1], atol=1e-5, rtol=0)
        assert torch.equal(row.next_states[here], after)
        assert int(row.positions[here]) == len(tokens) - 1


def test_loss_and_gradients_of_a_packed_row_are_those_of_its_samples() -> None:
    samples, whole, alone = made(), rough_net(), rough_net()
    objective = whole(packed(samples))
    parts = [alone(packed([one])) for one in samples]
    objective.loss.backward()
    torch.stack([part.loss for part in parts]).sum().backward()
    count = float(objective.positions)
    assert count == sum(float(part.positions) for part in parts)
    assert float(objective.loss.detach()) / count == pytest.approx(
        sum(float(part.loss.detach()) for part in parts) / count, abs=1e-5
    )
    for (name, one), other in zip(whole.named_parameters(), alone.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(
            one.grad / count, other.grad / count, atol=1e-5, rtol=0, msg=name
        )


@pytest.mark.parametrize("kind", ["eagle", "lstm"])  # rows of EAGLE-3 are like EAGLE's
def test_padding_changes_neither_loss_nor_gradients(kind: str) -> None:
    samples = made()
    net = trained_net(kind).fresh(TARGET, trained_net(kind).Options(), 3)
    policy = toy_policy()
    net.bind(policy.embed, policy.head)
    row, seen = packed(samples), list[list[Tensor]]()
    for one in (row, row.padded(5)):
        loss, targets, _ = net(one)
        assert int(targets) == int(row.valid.sum())
        seen.append([loss, *torch.autograd.grad(loss, list(net.parameters()))])
    for bare, padded in zip(*seen, strict=True):
        torch.testing.assert_close(padded, bare, rtol=1e-4, atol=1e-6)


def changed_token(sample: FeatureSample, at: int) -> FeatureSample:
    """Another token there, and other states from it on."""
    tokens, hidden = sample.token_ids.clone(), sample.hidden.clone()
    tokens[at] = (tokens[at] + 1) % VOCABULARY
    hidden[at:] += 1
    return replace(sample, token_ids=tokens, hidden=hidden)


def test_a_changed_token_moves_no_earlier_prediction_and_none_of_another_document() -> None:
    samples = [sample(length, seed) for seed, length in enumerate(LENGTHS)]
    before = features(packed(samples))
    for at in range(1, LENGTHS[1] - 1):
        row = packed([samples[0], changed_token(samples[1], at), *samples[2:]])
        moved = (features(row) - before).abs().amax(-1) > 0
        # Position t holds token t + 1, so t = at - 1 is the first that holds the changed one.
        assert torch.equal(moved, (row.documents == 1) & (row.positions >= at - 1))


def test_a_long_sample_gives_its_last_window() -> None:
    whole, cut = packed([sample(21, 3)]), packed([sample(21, 3)], window=5)
    assert torch.equal(cut.states, whole.states[-5:])
    assert torch.equal(cut.next_tokens, whole.next_tokens[-5:])
    assert torch.equal(cut.draft_tokens, whole.draft_tokens[-5:])
    assert torch.equal(cut.next_states, whole.next_states[-5:])
    assert cut.positions.tolist() == [0, 1, 2, 3, 4]


def test_states_of_an_older_policy_version_are_no_target() -> None:
    mixed = batch(12, 0, version=4)
    mixed.versions[:7] = 3
    row = packed([sample_from(mixed, TARGET)])
    # Row t is learned from when row t + 1, its target, is of the last version.
    assert row.valid.tolist() == [t + 1 >= 7 for t in range(10)]
