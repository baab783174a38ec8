"""The engine's EAGLE-3 drafter drafts as the trainer's network predicts; the oracle is
`chain_logits`.
"""

from __future__ import annotations

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
from paceline.models.decoder import DecoderWeights
from paceline.speculators.base import DraftBatch, DraftShape, SpeculatorSetup
from paceline.speculators.eagle3 import Eagle3Drafter, Eagle3Net, Eagle3Options
from paceline.speculators.kinds import find_kind
from paceline.speculators.net import build_drafter

V, H, TOKENS = 97, 48, 30
LENGTHS = [TOKENS, TOKENS - 7]


def target_of(directory: Path, family: str = "llama") -> DecoderWeights:
    """A target of 8 layers; the drafter reads the inputs of layers 2, 4 and 5."""
    save_random(directory, family, num_hidden_layers=8)
    return load_model(directory, dtype=torch.float32)


def rough_net(weights: DecoderWeights, seed: int = 5, **options: object) -> Eagle3Net:
    """A net in which every weight matters."""
    generator = torch.Generator().manual_seed(seed)
    net = Eagle3Net.fresh(weights.config, Eagle3Options.model_validate(options), 3)
    if net.options.draft_vocab_size:
        net.choose_tokens(torch.arange(V) * 31 % 17)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    net.bind(weights.embed, weights.head)
    return net


def served(weights: DecoderWeights, net: Eagle3Net, directory: Path) -> Eagle3Drafter:
    net.save(directory)
    return Eagle3Drafter(SpeculatorSetup(weights, 4, 64, torch.float32, 0, directory, LAYERS))


def known_batch() -> DraftBatch:
    """Two sequences in slots 1 and 2; states of LAYERS."""
    generator = torch.Generator().manual_seed(0)
    tokens, states = torch.zeros(4, 64, dtype=torch.int64), torch.zeros(4, 64, 5 * H)
    tokens[1:3] = torch.randint(0, V, (2, 64), generator=generator)
    states[1:3] = torch.randn(2, 64, 5 * H, generator=generator)
    return DraftBatch([1, 2], LENGTHS, tokens, states)


def predicted(
    net: Eagle3Net, batch: DraftBatch, row: int, drafts: list[int], steps: int
) -> list[Tensor]:
    """Return logits [V] of drafts 1 .. steps of one sequence; `drafts` is its true continuation."""
    slot, n = batch.slots[row], batch.lengths[row]
    tokens = torch.cat((batch.token_ids[slot, :n], torch.tensor([*drafts, 0])))
    # The drafter lacks the states behind row n - 2: no prediction may depend on them.
    states = torch.cat((batch.hidden[slot, : n - 1], torch.full((len(drafts) + 1, 5 * H), 7.0)))
    one = row_of(states[: len(tokens) - 1], tokens, hidden=H)
    return [logits[n - 2] for logits in chain_logits(net, one, steps)]


@pytest.mark.parametrize("family", ["llama", "llama3-scaled", "llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 41, "norm_before_residual": True}])
@torch.inference_mode()
def test_engine_drafts_what_the_chain_predicts(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    weights = target_of(tmp_path, family)
    net = rough_net(weights, **options)
    drafter = served(weights, net, tmp_path / "drafter")
    batch = known_batch()
    # First at a short length, then after a pause in which the sequences grew by different amounts.
    drafter.propose(replace(batch, lengths=[5, 9]), DraftShape(4))
    drafts = drafter.propose(batch, DraftShape(5))
    for row in range(2):
        proposed = drafts.tokens[row].tolist()
        expected = predicted(net, batch, row, proposed, 5)
        assert proposed == [int(logits.argmax()) for logits in expected]
        likely = torch.stack([logits.softmax(-1).max() for logits in expected]).cumprod(0)
        torch.testing.assert_close(drafts.scores[row], likely, rtol=1e-3, atol=0)


@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 41}])
@torch.inference_mode()
def test_every_node_of_a_tree_scores_as_its_path_alone(
    options: dict[str, Any], tmp_path: Path
) -> None:
    weights = target_of(tmp_path, "qwen3")
    net = rough_net(weights, **options)
    drafter = served(weights, net, tmp_path / "drafter")
    batch = known_batch()
    drafts = drafter.propose(batch, DraftShape(4, 3, 12))
    assert drafts.parents is not None
    for row in range(2):
        parents, tokens = drafts.parents[row].tolist(), drafts.tokens[row].tolist()
        first = {tokens[node] for node in range(12) if parents[node] == 0}
        assert first <= set(predicted(net, batch, row, [], 1)[0].topk(3).indices.tolist())
        for node in range(12):
            path: list[int] = []
            above = node + 1
            while above:
                path.insert(0, tokens[above - 1])
                above = parents[above - 1]
            steps = [
                logits.log_softmax(-1) for logits in predicted(net, batch, row, path, len(path))
            ]
            expected = sum(
                (float(step[token]) for step, token in zip(steps, path, strict=True)), start=0.0
            )
            assert float(drafts.scores[row, node].log()) == pytest.approx(expected, abs=1e-3)


@torch.inference_mode()
def test_drafting_stops_below_the_floor(tmp_path: Path) -> None:
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
    first = drafter.propose(batch, DraftShape(1)).tokens
    new.save(tmp_path / "new")
    state = drafter.load_state(tmp_path / "new")
    assert torch.equal(drafter.propose(batch, DraftShape(1)).tokens, first)
    drafter.commit_state(state)
    for slot in batch.slots:
        drafter.free(slot)
    moved = replace(weights, embed=weights.embed.flip(0).contiguous())
    for target in (weights, moved):
        drafter.bind(target)
        for slot in batch.slots:
            drafter.free(slot)
        new.bind(target.embed, target.head)
        expected = [int(predicted(new, batch, row, [], 1)[0].argmax()) for row in range(2)]
        assert drafter.propose(batch, DraftShape(1)).tokens[:, 0].tolist() == expected


@torch.inference_mode()
def test_a_version_may_have_another_draft_vocabulary_and_other_states_if_its_config_says_so(
    tmp_path: Path,
) -> None:
    weights, batch = target_of(tmp_path), known_batch()
    drafter = served(weights, rough_net(weights, draft_vocab_size=41), tmp_path / "drafter")
    other = rough_net(weights, inner_layers=(1, 4, 5))
    other.save(tmp_path / "other")
    drafter.commit_state(drafter.load_state(tmp_path / "other"))
    for slot in batch.slots:
        drafter.free(slot)
    drafts = drafter.propose(batch, DraftShape(3)).tokens.tolist()
    for row in range(2):
        assert drafts[row] == [
            int(logits.argmax()) for logits in predicted(other, batch, row, drafts[row], 3)
        ]
    (tmp_path / "drafter" / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"wrong shape"):
        drafter.load_state(tmp_path / "drafter")


def test_a_version_that_the_engine_cannot_draft_with_is_refused(tmp_path: Path) -> None:
    weights = target_of(tmp_path)
    drafter = served(weights, rough_net(weights), tmp_path / "drafter")
    rough_net(weights, inner_layers=(1, 4, 7)).save(tmp_path / "states")
    with pytest.raises(DataLoss, match="reads: 7;"):
        drafter.load_state(tmp_path / "states")
    heads = Eagle3Net(
        replace(drafter.load_state(tmp_path / "drafter").config, num_kv_heads=4), (2, 4, 5)
    )
    heads.save(tmp_path / "heads")
    with pytest.raises(WeightsError, match="attention is not the serving one's"):
        drafter.load_state(tmp_path / "heads")


def test_an_engine_that_keeps_no_inner_states_is_refused(tmp_path: Path) -> None:
    weights = target_of(tmp_path)
    kind = find_kind("eagle3")
    with pytest.raises(DataLoss, match="2, 4, 5"):
        build_drafter(kind, SpeculatorSetup(weights, 4, 64, torch.float32, 0))
    fresh = build_drafter(kind, SpeculatorSetup(weights, 4, 64, torch.float32, 0, layers=LAYERS))
    assert fresh.capture.layers == "2,4,5,last"
    assert fresh.trainable


def test_a_target_of_three_layers_has_no_eagle3_drafter(tmp_path: Path) -> None:
    save_random(tmp_path, "llama", num_hidden_layers=3)
    weights = load_model(tmp_path, dtype=torch.float32)
    with pytest.raises(ConfigError, match=">= 4 layers"):
        Eagle3Drafter(SpeculatorSetup(weights, 4, 64, torch.float32, 0, layers="1,2,last"))
