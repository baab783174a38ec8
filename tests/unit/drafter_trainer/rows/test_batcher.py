"""Rows pair (h_t, token t+1) with h_{t+1} and token t+2; documents and branches of one row do not
see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from unit.drafter_trainer.samples import (
    PROMPT,
    TARGET,
    VOCABULARY,
    batch,
    sample,
    sample_with_rejected,
    toy_policy,
    with_rejected,
)

from paceline.services.drafter_trainer.rows.batcher import pack
from paceline.services.drafter_trainer.rows.sample import Branches, FeatureSample, sample_from
from paceline.speculators.eagle import EagleNet
from paceline.speculators.loading import trained_net
from paceline.speculators.packed import PackedRow
from paceline.streams import decode_features, encode_features

LENGTHS = (9, 14, 6, 21)
MAKERS = (sample, sample_with_rejected)


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


def made(maker: Callable[[int, int], FeatureSample]) -> list[FeatureSample]:
    return [maker(length, seed) for seed, length in enumerate(LENGTHS)]


def packed(samples: Sequence[FeatureSample], window: int = 512) -> PackedRow:
    return pack(samples, window=window)


def contexts(sample: FeatureSample) -> list[tuple[list[Tensor], list[int], Tensor]]:
    """Oracle: for every training position its path alone: states and next tokens from row 0 on, and
    the state after.

    The sequence's positions first, then those of rejected drafts, in the order of the sample.
    """
    rows, tokens = list(sample.hidden), sample.token_ids.tolist()
    found = [(rows[: t + 1], tokens[1 : t + 2], rows[t + 1]) for t in range(len(rows) - 1)]
    drafts = sample.branches
    for number in range(len(drafts) if drafts is not None else 0):
        assert drafts is not None
        chain, node = list[int](), number
        while node >= 0:
            chain.insert(0, node)
            node = int(drafts.parents[node]) - len(rows)
        root = int(drafts.parents[chain[0]])
        states = rows[: root + 1] + [drafts.hidden[node] for node in chain]
        found.append(
            (states[:-1], tokens[1 : root + 1] + drafts.token_ids[chain].tolist(), states[-1])
        )
    return found


def test_rejected_rows_come_after_their_sequence_and_change_no_bit_of_it() -> None:
    without = [batch(length, seed) for seed, length in enumerate(LENGTHS)]
    for one in without:
        plain, beside = (
            packed([sample_from(decode_features(*encode_features(part)), TARGET)], window=16)
            for part in (one, with_rejected(one))
        )
        for part in fields(PackedRow):
            expected, got = getattr(plain, part.name), getattr(beside, part.name)
            assert (
                torch.equal(got[: len(plain)], expected)
                if isinstance(expected, Tensor)
                else got == expected
            )


@pytest.mark.parametrize("maker", MAKERS)
def test_the_targets_own_step_maps_every_pair_to_its_target(
    maker: Callable[[int, int], FeatureSample],
) -> None:
    policy = toy_policy()
    row = packed(made(maker))
    torch.testing.assert_close(policy.step(row.states, row.next_tokens), row.next_states)
    drawn = row.valid & (row.draft_tokens >= 0)
    assert torch.equal((row.next_states @ policy.head.T).argmax(-1)[drawn], row.draft_tokens[drawn])
    # A sequence of N tokens has N - 1 rows, N - 2 pairs; tokens from PROMPT on are the policy's.
    sequences = row.draft_tokens >= 0
    assert int(sequences.sum()) == sum(length - 2 for length in LENGTHS)
    assert int(drawn.sum()) == sum(length - PROMPT for length in LENGTHS)
    assert row.positions[sequences].tolist() == [t for length in LENGTHS for t in range(length - 2)]


def test_rejected_drafts_are_learned_from_and_never_a_drawn_token() -> None:
    samples = made(sample_with_rejected)
    row = packed(samples)
    branches = row.draft_tokens < 0
    assert (
        int(branches.sum())
        == sum(len(one.branches) for one in samples if one.branches is not None)
        == 24
    )
    assert row.valid[branches].all()


@pytest.mark.parametrize("maker", MAKERS)
def test_a_position_of_a_packed_row_predicts_as_its_path_alone(
    maker: Callable[[int, int], FeatureSample],
) -> None:
    samples, net, got = made(maker), rough_net(), None
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


@pytest.mark.parametrize("maker", MAKERS)
def test_loss_and_gradients_of_a_packed_row_are_those_of_its_samples(
    maker: Callable[[int, int], FeatureSample],
) -> None:
    samples, whole, alone = made(maker), rough_net(), rough_net()
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


@pytest.mark.parametrize("kind", ["eagle", "lstm", "mlp"])  # rows of EAGLE-3 are like EAGLE's
def test_padding_changes_neither_loss_nor_gradients(kind: str) -> None:
    samples = made(sample_with_rejected)
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
    """Another token there, and other states from it on; drafts as they were."""
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


def test_a_changed_branch_moves_no_prediction_but_its_own_and_those_under_it() -> None:
    samples = made(sample_with_rejected)
    row, before = packed(samples), features(packed(samples))
    branches = samples[1].branches
    assert branches is not None
    for number in range(len(branches)):
        tokens = branches.token_ids.clone()
        tokens[number] = (tokens[number] + 1) % VOCABULARY
        other = replace(samples[1], branches=replace(branches, token_ids=tokens))
        moved = (features(packed([samples[0], other, *samples[2:]])) - before).abs().amax(-1) > 0
        under, rows = {number}, len(samples[1].hidden)
        for child, parent in enumerate(branches.parents.tolist()):
            under |= {child} if parent - rows in under else set()
        first = samples[0].size + samples[1].positions
        assert moved.nonzero()[:, 0].tolist() == [first + node for node in sorted(under)]
    assert len(before) == len(row)


def test_a_long_sample_gives_its_last_window() -> None:
    whole, cut = packed([sample(21, 3)]), packed([sample(21, 3)], window=5)
    assert torch.equal(cut.states, whole.states[-5:])
    assert torch.equal(cut.next_tokens, whole.next_tokens[-5:])
    assert torch.equal(cut.draft_tokens, whole.draft_tokens[-5:])
    assert torch.equal(cut.next_states, whole.next_states[-5:])
    assert cut.positions.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("start", range(16))
def test_a_window_holds_the_drafts_beside_its_own_positions(start: int) -> None:
    whole = sample_from(with_rejected(batch(20, 5), 5, count=30), TARGET)
    cut = whole.cut(start, 3)
    assert isinstance(whole.branches, Branches)
    assert isinstance(cut.branches, Branches)
    kept = [
        (t, d)
        for t, d in zip(
            whole.branches.token_ids.tolist(), whole.branches.depths.tolist(), strict=True
        )
    ]
    kept = [
        one
        for one, root in zip(kept, whole.branches.roots.tolist(), strict=True)
        if start <= root <= start + 3
    ]
    assert (
        list(zip(cut.branches.token_ids.tolist(), cut.branches.depths.tolist(), strict=True))
        == kept
    )
    row = packed([cut])
    torch.testing.assert_close(toy_policy().step(row.states, row.next_tokens), row.next_states)
    sequence = packed([whole])
    assert torch.equal(row.states[:3], sequence.states[start : start + 3])
    assert torch.equal(row.draft_tokens[:3], sequence.draft_tokens[start : start + 3])
    assert torch.equal(row.valid[:3], sequence.valid[start : start + 3])
    assert (row.positions >= 0).all()
    for here, (_, tokens, _) in enumerate(contexts(cut)):
        assert row.next_tokens[row.mask()[here]].tolist() == tokens


def test_states_of_an_older_policy_version_and_drafts_under_them_are_no_target() -> None:
    mixed = with_rejected(batch(12, 0, version=4), 0, count=20)
    mixed.versions[:7] = 3
    made_of = sample_from(mixed, TARGET)
    row = packed([made_of])
    # Row t is learned from when row t + 1, its target, is of the last version.
    assert row.valid[:10].tolist() == [t + 1 >= 7 for t in range(10)]
    assert made_of.branches is not None
    assert 0 < len(made_of.branches) < 20
    assert (made_of.branches.roots >= 7).all()
