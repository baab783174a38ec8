"""The engine's DFlash drafter drafts as the trainer's network predicts.

The oracle is `chain_logits` of the whole sequence, computed from scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import load_model, save_random
from torch import Tensor
from unit.drafter_trainer.samples import chain_logits
from unit.speculators.eagle3_rows import LAYERS, row_of

from paceline.errors import ConfigError, DataLoss, WeightsError
from paceline.models import decoder
from paceline.models.decoder import DecoderWeights
from paceline.speculators.base import DraftBatch, DraftShape, SpeculatorSetup
from paceline.speculators.dflash import DflashDrafter, DflashNet, DflashOptions
from paceline.speculators.kinds import find_kind
from paceline.speculators.net import build_drafter

V, H, TOKENS, BLOCK = 97, 48, 30, 6
LENGTHS = [TOKENS, TOKENS - 7]


def target_of(directory: Path, family: str = "llama") -> DecoderWeights:
    """A target of 8 layers; the drafter reads the inputs of layers 2, 4 and 5."""
    save_random(directory, family, num_hidden_layers=8)
    return load_model(directory, dtype=torch.float32)


def rough_net(weights: DecoderWeights, seed: int = 5, **options: object) -> DflashNet:
    """A net in which every weight matters."""
    generator = torch.Generator().manual_seed(seed)
    given = DflashOptions.model_validate({"block_size": BLOCK, "layers": 2, **options})
    net = DflashNet.fresh(weights.config, given, 3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    net.bind(weights.embed, weights.head)
    return net


def served(
    weights: DecoderWeights, net: DflashNet, directory: Path, capacity: int = 64
) -> DflashDrafter:
    net.save(directory)
    return DflashDrafter(SpeculatorSetup(weights, 4, capacity, torch.float32, 0, directory, LAYERS))


def known_batch() -> DraftBatch:
    """Two sequences in slots 1 and 2; states of LAYERS."""
    generator = torch.Generator().manual_seed(0)
    tokens, states = torch.zeros(4, 64, dtype=torch.int64), torch.zeros(4, 64, 5 * H)
    tokens[1:3] = torch.randint(0, V, (2, 64), generator=generator)
    states[1:3] = torch.randn(2, 64, 5 * H, generator=generator)
    return DraftBatch([1, 2], LENGTHS, tokens, states)


def predicted(net: DflashNet, batch: DraftBatch, row: int) -> Tensor:
    """Logits [B - 1, V] of the drafts of one sequence, from its tokens and true states alone."""
    slot, n = batch.slots[row], batch.lengths[row]
    tokens = torch.cat((batch.token_ids[slot, :n], torch.zeros(1, dtype=torch.int64)))
    # The drafter lacks the state of token n - 1: no prediction may depend on it.
    states = torch.cat((batch.hidden[slot, : n - 1], torch.full((1, 5 * H), 7.0)))
    one = row_of(states, tokens, hidden=H)
    return torch.stack([logits[n - 2] for logits in chain_logits(net, one, BLOCK - 1)])


def best(net: DflashNet, batch: DraftBatch, steps: int) -> list[list[int]]:
    rows = range(len(batch.slots))
    return [predicted(net, batch, row)[:steps].argmax(-1).tolist() for row in rows]


@pytest.mark.parametrize("family", ["llama", "llama3-scaled", "llama-tied", "qwen2", "qwen3"])
@torch.inference_mode()
def test_rounds_draft_what_a_forward_from_scratch_predicts(family: str, tmp_path: Path) -> None:
    weights = target_of(tmp_path, family)
    net = rough_net(weights)
    drafter, whole = served(weights, net, tmp_path / "drafter"), known_batch()
    # Rounds of unequal progress, a pause, and a round in which nothing was added.
    for lengths in ([5, 9], [6, 14], [26, 20], [26, 23], LENGTHS):
        batch = replace(whole, lengths=lengths)
        drafts = drafter.propose(batch, DraftShape(BLOCK - 1))
        assert drafts.parents is None
        for row in range(2):
            expected = predicted(net, batch, row)
            assert drafts.tokens[row].tolist() == expected.argmax(-1).tolist()
            likely = expected.softmax(-1).max(-1).values.cumprod(0)
            torch.testing.assert_close(drafts.scores[row], likely, rtol=1e-3, atol=0)


@torch.inference_mode()
def test_a_shorter_arm_verifies_the_first_drafts_of_the_same_block(tmp_path: Path) -> None:
    weights = target_of(tmp_path)
    net = rough_net(weights)
    drafter, batch = served(weights, net, tmp_path / "drafter"), known_batch()
    whole = drafter.propose(batch, DraftShape(BLOCK - 1))
    for steps in (1, 3, BLOCK + 4):
        some = drafter.propose(batch, DraftShape(steps))
        kept = min(steps, BLOCK - 1)
        assert torch.equal(some.tokens, whole.tokens[:, :kept])
        torch.testing.assert_close(some.scores, whole.scores[:, :kept])


@torch.inference_mode()
def test_all_drafts_of_a_round_take_one_forward_of_each_layer_and_context_is_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = target_of(tmp_path)
    drafter = served(weights, rough_net(weights), tmp_path / "drafter")
    batch, forwards, fed = known_batch(), [], []
    forward, feed = decoder.layer_forward, drafter._feed

    def noted(*args: Any) -> Tensor:
        forwards.append(len(args[2]))
        return forward(*args)

    def noted_feed(
        given: DraftBatch, slots: Sequence[int], lengths: Sequence[int], rows: int
    ) -> Tensor:
        fed.append(rows)
        return feed(given, slots, lengths, rows)

    monkeypatch.setattr(decoder, "layer_forward", noted)
    monkeypatch.setattr(drafter, "_feed", noted_feed)
    for lengths in ([8, 8], [10, 10], [13, 11], [13, 11]):
        drafter.propose(replace(batch, lengths=lengths), DraftShape(BLOCK - 1))
    assert forwards == [2 * BLOCK] * (4 * 2)
    assert fed == [7, 2, 3]


@torch.inference_mode()
def test_a_sequence_of_one_token_and_one_at_the_end_of_its_slot_are_drafted_for(
    tmp_path: Path,
) -> None:
    weights = target_of(tmp_path)
    net = rough_net(weights)
    drafter = served(weights, net, tmp_path / "drafter", capacity=TOKENS)
    batch = replace(known_batch(), lengths=[1, TOKENS])
    drafts = drafter.propose(batch, DraftShape(BLOCK - 1)).tokens
    assert drafts.shape == (2, BLOCK - 1)
    assert drafts[1].tolist() == predicted(net, batch, 1).argmax(-1).tolist()
    batch = replace(batch, lengths=[4, TOKENS])
    assert drafter.propose(batch, DraftShape(2)).tokens.tolist() == best(net, batch, 2)


@torch.inference_mode()
def test_a_moved_sequence_is_drafted_for_as_before_and_a_freed_slot_starts_anew(
    tmp_path: Path,
) -> None:
    weights = target_of(tmp_path)
    net = rough_net(weights)
    drafter, batch = served(weights, net, tmp_path / "drafter"), known_batch()
    drafter.propose(replace(batch, lengths=[20, 20]), DraftShape(2))
    drafter.move(1, 3, 20)
    tokens, states = batch.token_ids.clone(), batch.hidden.clone()
    tokens[3], states[3] = tokens[1], states[1]
    tokens[1], states[1] = tokens[2].flip(0), states[2].flip(0)
    drafter.free(1)
    moved = DraftBatch([3, 1], [22, 12], tokens, states)
    assert drafter.propose(moved, DraftShape(4)).tokens.tolist() == best(net, moved, 4)


@torch.inference_mode()
def test_every_node_of_a_tree_scores_as_its_path(tmp_path: Path) -> None:
    weights = target_of(tmp_path, "qwen3")
    net = rough_net(weights)
    drafter, batch = served(weights, net, tmp_path / "drafter"), known_batch()
    drafts = drafter.propose(batch, DraftShape(4, 3, 12))
    assert drafts.parents is not None
    for row in range(2):
        levels = predicted(net, batch, row).log_softmax(-1)
        parents, tokens = drafts.parents[row].tolist(), drafts.tokens[row].tolist()
        depths, sums = [0], [0.0]
        for node in range(12):
            above = parents[node]
            depths.append(depths[above] + 1)
            sums.append(sums[above] + float(levels[depths[above], tokens[node]]))
            assert tokens[node] in levels[depths[above]].topk(3).indices
            assert float(drafts.scores[row, node].log()) == pytest.approx(sums[-1], abs=1e-3)
        assert max(depths) > 1


@torch.inference_mode()
def test_drafts_end_below_the_floor(tmp_path: Path) -> None:
    weights = target_of(tmp_path)
    drafter = served(weights, rough_net(weights), tmp_path / "drafter")
    scores = drafter.propose(known_batch(), DraftShape(5)).scores
    floor = float(scores[:, 1].max()) * 1.001
    assert drafter.propose(known_batch(), DraftShape(5, floor=floor)).tokens.shape[1] == 2


@torch.inference_mode()
def test_a_new_version_and_a_new_target_are_served_after_the_commit(tmp_path: Path) -> None:
    weights = target_of(tmp_path)
    old, new = rough_net(weights), rough_net(weights, seed=6)
    drafter, batch = served(weights, old, tmp_path / "old"), known_batch()
    first = drafter.propose(batch, DraftShape(3)).tokens
    new.save(tmp_path / "new")
    state = drafter.load_state(tmp_path / "new")
    assert torch.equal(drafter.propose(batch, DraftShape(3)).tokens, first)
    drafter.commit_state(state)
    moved = replace(weights, embed=weights.embed.flip(0), head=weights.head.flip(0).contiguous())
    for target in (weights, moved):
        drafter.bind(target)
        for slot in batch.slots:
            drafter.free(slot)
        new.bind(target.embed, target.head)
        assert drafter.propose(batch, DraftShape(3)).tokens.tolist() == best(new, batch, 3)


def test_a_version_that_the_engine_cannot_draft_with_is_refused(tmp_path: Path) -> None:
    weights = target_of(tmp_path)
    drafter = served(weights, rough_net(weights), tmp_path / "drafter")
    for name, options in (("block", {"block_size": 4}), ("deep", {"layers": 3})):
        rough_net(weights, **options).save(tmp_path / name)
        with pytest.raises(WeightsError, match="attention is not the serving one's"):
            drafter.load_state(tmp_path / name)
    rough_net(weights, inner_layers=(1, 4, 7)).save(tmp_path / "states")
    with pytest.raises(DataLoss, match="reads: 7;"):
        drafter.load_state(tmp_path / "states")


def test_an_arm_beyond_the_block_that_was_trained_is_refused(tmp_path: Path) -> None:
    weights, kind = target_of(tmp_path), find_kind("dflash")
    rough_net(weights).save(tmp_path / "drafter")
    setup = SpeculatorSetup(weights, 4, 64, torch.float32, 0, tmp_path / "drafter", LAYERS)
    assert build_drafter(kind, replace(setup, steps=BLOCK - 1)).trainable
    with pytest.raises(ConfigError, match=r"block was trained for; seen: 6; allowed: 1 to 5"):
        build_drafter(kind, replace(setup, steps=BLOCK))
    with pytest.raises(DataLoss, match="2, 4, 5"):
        build_drafter(kind, replace(setup, layers="last"))
