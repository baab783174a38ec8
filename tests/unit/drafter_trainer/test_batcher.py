"""Rows pair (h_t, token t+1) with h_{t+1} and token t+2, and documents of one row do not see each other."""

from __future__ import annotations

from dataclasses import fields

import torch
from unit.drafter_trainer.samples import PROMPT, TARGET, batch, sample, toy_policy, with_rejected

from drafter_trainer.batcher import pack
from drafter_trainer.sample import sample_from
from paceline.speculators import PackedRow
from paceline.speculators.eagle import EagleNet
from paceline.streams import decode_features, encode_features

LENGTHS = (9, 14, 6, 21)


def features(row: PackedRow) -> torch.Tensor:
    policy, net = toy_policy(), EagleNet(TARGET, seed=2)
    net.bind(policy.embed, policy.head)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
        out: torch.Tensor = net.features(
            row.states[None], row.next_tokens[None], row.positions[None], row.mask()[None]
        )[0]
    return out


def test_rejected_rows_beside_a_sequence_change_no_bit_of_the_packed_row() -> None:
    made = [batch(length, seed) for seed, length in enumerate(LENGTHS)]
    read = [
        [sample_from(decode_features(*encode_features(one)), TARGET) for one in batches]
        for batches in (made, [with_rejected(one) for one in made])
    ]
    without, beside = (pack(samples, window=16) for samples in read)
    for part in fields(PackedRow):
        expected, got = getattr(without, part.name), getattr(beside, part.name)
        assert torch.equal(got, expected) if isinstance(expected, torch.Tensor) else got == expected, part.name


def test_the_targets_own_step_maps_every_pair_to_its_target() -> None:
    policy = toy_policy()
    row = pack([sample(length, seed) for seed, length in enumerate(LENGTHS)], window=512)
    torch.testing.assert_close(policy.step(row.states, row.next_tokens), row.next_states)
    generated = row.valid
    assert torch.equal((row.next_states @ policy.head.T).argmax(-1)[generated], row.draft_tokens[generated])
    # A sequence of N tokens has N - 1 rows, N - 2 pairs; tokens from PROMPT on are the policy's.
    assert row.valid.shape[0] == sum(length - 2 for length in LENGTHS)
    assert int(row.valid.sum()) == sum(length - PROMPT for length in LENGTHS)
    assert row.positions.tolist() == [t for length in LENGTHS for t in range(length - 2)]


def test_a_packed_row_gives_the_features_of_its_documents_alone() -> None:
    samples = [sample(length, seed) for seed, length in enumerate(LENGTHS)]
    alone = torch.cat([features(pack([one], window=512)) for one in samples])
    torch.testing.assert_close(features(pack(samples, window=512)), alone, atol=1e-6, rtol=1e-5)


def test_changing_one_document_changes_no_other() -> None:
    samples = [sample(length, seed) for seed, length in enumerate(LENGTHS)]
    before = pack(samples, window=512)
    after = pack([samples[0], sample(LENGTHS[1], 99), *samples[2:]], window=512)
    moved = (features(before) - features(after)).abs().amax(-1) > 0
    assert torch.equal(moved, before.documents == 1)


def test_a_long_sample_gives_its_last_window() -> None:
    whole, cut = pack([sample(21, 3)], window=512), pack([sample(21, 3)], window=5)
    assert torch.equal(cut.states, whole.states[-5:])
    assert torch.equal(cut.next_tokens, whole.next_tokens[-5:])
    assert torch.equal(cut.draft_tokens, whole.draft_tokens[-5:])
    assert torch.equal(cut.next_states, whole.next_states[-5:])
    assert cut.positions.tolist() == [0, 1, 2, 3, 4]


def test_states_of_an_older_policy_version_are_no_target() -> None:
    mixed = batch(12, 0, version=4)
    mixed.versions[:7] = 3
    row = pack([sample_from(mixed, TARGET)], window=512)
    # Row t is learned from when row t + 1, its target, is of the last version.
    assert row.valid.tolist() == [t + 1 >= 7 for t in range(10)]
