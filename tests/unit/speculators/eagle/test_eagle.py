"""The EAGLE network, its chain and its checkpoint; engine's drafter and trainer's module agree."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from random_models import FAMILIES, load_model, save_random
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from paceline.errors import InvalidInput, WeightsError
from paceline.models import products, sampling
from paceline.models.decoder import DecoderWeights
from paceline.speculators import net_drafter
from paceline.speculators.base import DraftBatch, DraftShape, SpeculatorSetup
from paceline.speculators.eagle import EagleDrafter, EagleNet, EagleOptions
from paceline.speculators.packed import PackedRow

TOKENS = 30


def rough_net(weights: DecoderWeights, **options: object) -> EagleNet:
    """A net in which every weight matters."""
    net = EagleNet(weights.config, EagleOptions(**options), seed=3)
    net.choose_tokens(torch.zeros(weights.config.vocab_size, dtype=torch.int64))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    net.bind(weights.embed, weights.head)
    return net


def chain_of(
    net: EagleNet,
    hidden: torch.Tensor,
    next_tokens: torch.Tensor,
    steps: int,
    positions: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Features [T, H] of each step, of states [T, H] and tokens [T]."""
    count = len(hidden)
    row = PackedRow(
        states=hidden,
        next_states=hidden,
        next_tokens=next_tokens,
        draft_tokens=next_tokens,
        positions=torch.arange(count) if positions is None else positions,
        documents=torch.zeros(count, dtype=torch.int64) if documents is None else documents,
        valid=torch.ones(count, dtype=torch.bool),
        lm_head_hash="",
    )
    return [features for features, _, _ in net.unroll(row, steps)]


def rows(seed: int = 0, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 97, (batch, 64), generator=generator), torch.randn(
        batch, 64, 48, generator=generator
    )


def test_the_layer_is_a_llama_layer_without_input_norm(tmp_path: Path) -> None:
    model = save_random(tmp_path, "llama")
    net = rough_net(load_model(tmp_path, dtype=torch.float32))
    layer = LlamaDecoderLayer(model.config, 0)
    missing = layer.load_state_dict(net.layers[0].state_dict(), strict=False).missing_keys
    assert missing == ["input_layernorm.weight"]
    layer.input_layernorm = nn.Identity()
    tokens, hidden = rows()
    positions = torch.arange(TOKENS).expand(2, -1)
    causal = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        embedded = model.get_input_embeddings()(tokens[:, 1 : TOKENS + 1])
        x = net.fc(torch.cat((embedded, hidden[:, :TOKENS]), dim=-1))
        angles = LlamaRotaryEmbedding(model.config)(x, positions)
        expected = layer(x, attention_mask=causal, position_embeddings=angles)
        got = net.features(hidden[:, :TOKENS], tokens[:, 1 : TOKENS + 1], positions)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "switch", "size"),
    [*itertools.product(FAMILIES, ("", "fc_bias", "norms"), (0, 41))],
)
def test_engine_drafts_what_the_trainers_chain_predicts(
    family: str, switch: str, size: int, tmp_path: Path
) -> None:
    save_random(tmp_path, family)
    weights = load_model(tmp_path, dtype=torch.float32)
    net = rough_net(weights, draft_vocab_size=size, **({switch: True} if switch else {}))
    net.follow_tokens(torch.arange(97) * 31 % 17)
    ids = torch.arange(97) if net.token_ids is None else net.token_ids
    assert len(ids) == (size or 97)
    net.save(tmp_path / "drafter")
    drafter = EagleDrafter(SpeculatorSetup(weights, 4, 64, torch.float32, 0, tmp_path / "drafter"))
    tokens, hidden = rows()
    known, states = torch.zeros(4, 64, dtype=torch.int64), torch.zeros(4, 64, 48)
    known[1:3], states[1:3] = tokens, hidden
    with torch.inference_mode():
        # First at a short length, then after a pause in which the sequences grew by different
        # amounts.
        drafter.propose(DraftBatch([1, 2], [5, 9], known, states), DraftShape(4))
        lengths = [TOKENS, TOKENS - 7]
        drafts = drafter.propose(DraftBatch([1, 2], lengths, known, states), DraftShape(5))
        for row, n in enumerate(lengths):
            sequence = torch.cat((tokens[row, :n], drafts.tokens[row]))
            chain = chain_of(net, hidden[row, : n + 4], sequence[1:], 5)
            shares = [torch.softmax(net.logits(one)[n - 2], dim=-1).max(dim=-1) for one in chain]
            assert drafts.tokens[row].tolist() == [int(ids[one.indices]) for one in shares]
            expected = torch.stack([one.values for one in shares]).cumprod(dim=0)
            torch.testing.assert_close(drafts.scores[row], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [0, 41])
def test_drafts_of_warm_requests_are_the_draws_of_a_policy_that_equals_the_drafter(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net_drafter, "DRAWN_FROM", 97)
    save_random(tmp_path, "llama")
    weights = load_model(tmp_path, dtype=torch.float32)
    net = rough_net(weights, draft_vocab_size=size)
    ids = torch.arange(97) if net.token_ids is None else net.token_ids
    net.save(tmp_path / "drafter")
    drafter = EagleDrafter(SpeculatorSetup(weights, 4, 64, torch.float32, 0, tmp_path / "drafter"))
    known, states = rows(batch=4)
    lengths, heats, seeds = [TOKENS, 9, 20], [0.0, 1.0, 1.4], [3, 4, 5]
    draws = sampling.DrawParams.of(seeds, heats)
    batch = DraftBatch([0, 1, 2], lengths, known, states, draws=draws)
    with torch.inference_mode():
        drafts = drafter.propose(batch, DraftShape(4))
        tree = drafter.propose(batch, DraftShape(4, 3, 8))
        for row, (n, heat, seed) in enumerate(zip(lengths, heats, seeds, strict=True)):
            sequence = torch.cat((known[row, :n], drafts.tokens[row]))
            chain = chain_of(net, states[row, : n + 3], sequence[1:], 4)
            for level, features in enumerate(chain):
                logits = torch.full((1, 97), -torch.inf)
                logits[0, ids] = net.logits(features)[n - 2]
                one = sampling.DrawParams.of([seed], [heat])
                drawn = sampling.draw(logits, torch.tensor([n + level]), one)
                assert int(drafts.tokens[row, level]) == int(drawn.tokens)
    assert (tree.tokens == drafts.tokens[:, :1]).any(1).all()
    assert ((tree.scores > 0) & (tree.scores <= 1)).all()


def test_a_tree_of_requests_with_one_allowed_token_has_scores_above_zero(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    weights = load_model(tmp_path, dtype=torch.float32)
    drafter = EagleDrafter(SpeculatorSetup(weights, 4, 64, torch.float32, 0))
    known, states = rows()
    draws = sampling.DrawParams.of([1, 2], [1.0, 1.0], top_k=[1, 0])
    batch = DraftBatch([0, 1], [TOKENS, 9], known, states, draws=draws)
    with torch.inference_mode():
        tree = drafter.propose(batch, DraftShape(3, 3, 12))
        greedy = drafter.propose(DraftBatch([0, 1], [TOKENS, 9], known, states), DraftShape(1))
    assert (tree.scores > 0).all()
    best = tree.scores[0, :3].argmax()
    assert tree.tokens[0, best] == greedy.tokens[0, 0]


def test_a_wide_drafter_drafts_in_bfloat16_what_it_drafts_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random(tmp_path, "llama")
    weights = load_model(tmp_path, dtype=torch.float32)
    rough_net(weights, draft_vocab_size=41).save(tmp_path / "drafter")
    tokens, states = rows(batch=4)
    setup = SpeculatorSetup(weights, 4, 64, torch.float32, 0, tmp_path / "drafter")
    found = []
    for wide in (False, True):
        monkeypatch.setattr(products, "prefers_bfloat16", lambda *_, wide=wide: wide)
        batch = DraftBatch([1, 2], [TOKENS, 9], tokens, states)
        with torch.inference_mode():
            found.append(EagleDrafter(setup).propose(batch, DraftShape(1)))
    assert torch.equal(found[0].tokens, found[1].tokens)
    torch.testing.assert_close(found[0].scores, found[1].scores, rtol=0.1, atol=0)
    assert not torch.equal(found[0].scores, found[1].scores)


def test_a_draft_vocabulary_follows_the_counts_and_a_sampler_sees_no_other_token(
    tmp_path: Path,
) -> None:
    save_random(tmp_path, "llama")
    weights = load_model(tmp_path, dtype=torch.float32)
    net = rough_net(weights, draft_vocab_size=5)
    counts = torch.zeros(97, dtype=torch.int64)
    counts[[90, 7, 60]] = torch.tensor([3, 2, 9])
    assert net.token_ids is not None
    before = net.token_ids.tolist()
    net.follow_tokens(counts)
    assert net.token_ids.tolist() == sorted([*before[:2], 7, 60, 90])  # unseen ones stay by id
    net.save(tmp_path / "drafter")
    drafter = EagleDrafter(SpeculatorSetup(weights, 4, 64, torch.float32, 0, tmp_path / "drafter"))
    tokens, hidden = rows()
    known, states = torch.zeros(4, 64, dtype=torch.int64), torch.zeros(4, 64, 48)
    known[1:3], states[1:3] = tokens, hidden
    seen = []

    def sampler(logits: torch.Tensor, step: int) -> torch.Tensor:
        seen.append(logits)
        return logits.argmax(-1)

    batch = DraftBatch([1, 2], [5, 9], known, states, sampler)
    with torch.inference_mode():
        drafter.propose(batch, DraftShape(3))
        tree = drafter.propose(DraftBatch([1, 2], [5, 9], known, states), DraftShape(3, 2, 6))
    for logits in seen:
        assert logits.shape == (2, 97)
        assert logits.isfinite()[0].nonzero()[:, 0].tolist() == net.token_ids.tolist()
    assert set(tree.tokens.flatten().tolist()) <= set(net.token_ids.tolist())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_node_of_a_tree_scores_as_its_path_alone(family: str, tmp_path: Path) -> None:
    """Oracle: the trainer's chain over each path, one by one."""
    save_random(tmp_path, family)
    weights = load_model(tmp_path, dtype=torch.float32)
    net = rough_net(weights)
    net.save(tmp_path / "drafter")
    drafter = EagleDrafter(SpeculatorSetup(weights, 4, 64, torch.float32, 0, tmp_path / "drafter"))
    tokens, hidden = rows()
    known, states = torch.zeros(4, 64, dtype=torch.int64), torch.zeros(4, 64, 48)
    known[1:3], states[1:3] = tokens, hidden
    lengths = [TOKENS, TOKENS - 7]
    with torch.inference_mode():
        drafts = drafter.propose(DraftBatch([1, 2], lengths, known, states), DraftShape(4, 3, 12))
    assert drafts.parents is not None
    for row, n in enumerate(lengths):
        for node in range(12):
            path, above = [], node + 1
            while above:
                path.insert(0, int(drafts.tokens[row, above - 1]))
                above = int(drafts.parents[row, above - 1])
            sequence = torch.cat((tokens[row, :n], torch.tensor(path)))
            count = n - 1 + len(path)
            with torch.no_grad():
                chain = chain_of(net, hidden[row, :count], sequence[1:], len(path))
                steps = [torch.log_softmax(net.logits(one)[n - 2], dim=-1) for one in chain]
            expected = sum(float(step[token]) for step, token in zip(steps, path, strict=True))
            assert float(drafts.scores[row, node].log()) == pytest.approx(expected, abs=1e-3)


def test_a_chain_step_sees_true_rows_and_its_own_earlier_steps(tmp_path: Path) -> None:
    """Oracle: one plain forward over true rows followed by the chain's own rows, for one starting
    row.
    """
    save_random(tmp_path, "qwen3")
    net = rough_net(load_model(tmp_path, dtype=torch.float32))
    tokens, hidden = rows(batch=1)
    start, steps = 11, 4
    with torch.no_grad():
        chain = chain_of(net, hidden[0, :40], tokens[0, 1:41], steps)
        inputs = hidden[:, : start + 1]
        for step in range(steps):
            length = start + 1 + step
            out = net.features(inputs, tokens[:, 1 : length + 1], torch.arange(length)[None])
            torch.testing.assert_close(chain[step][start], out[0, -1], atol=1e-5, rtol=0)
            inputs = torch.cat((inputs, out[:, -1:]), dim=1)


def test_packed_documents_do_not_see_each_other(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    net = rough_net(load_model(tmp_path, dtype=torch.float32))
    tokens, hidden = rows(batch=1)
    lengths = (12, 18)
    document = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        packed = chain_of(net, hidden[0, :30], tokens[0, 1:31], 3, positions, document)
        alone = chain_of(net, hidden[0, 12:30], tokens[0, 13:31], 3)
    for step in range(3):
        torch.testing.assert_close(
            packed[step][12 : 30 - step], alone[step][: 18 - step], atol=1e-5, rtol=0
        )


def test_the_targets_tensors_are_neither_trained_nor_exported(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    net = rough_net(load_model(tmp_path, dtype=torch.float32))
    names = set(net.export_tensors())
    assert "fc.weight" in names
    assert "layers.0.self_attn.q_proj.weight" in names
    assert not {
        name for name in names if "embed" in name or "head" in name or "input_layernorm" in name
    }
    assert {name for name, _ in net.named_parameters()} == names


def test_a_checkpoint_survives_the_round_trip(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen2")
    weights = load_model(tmp_path, dtype=torch.float32)
    net = rough_net(weights)
    net.save(tmp_path / "drafter")
    again = EagleNet.read(tmp_path / "drafter", weights.config)
    for name, tensor in net.export_tensors().items():
        assert torch.equal(tensor, again.export_tensors()[name])
    raw = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert raw["architectures"] == ["Qwen2ForCausalLMEagle"]
    assert raw["max_position_embeddings"] == weights.config.max_position_embeddings


def test_a_drafter_of_another_target_is_refused_by_name(tmp_path: Path) -> None:
    save_random(tmp_path / "a", "llama")
    save_random(tmp_path / "b", "llama", vocab_size=101)
    small, large = (load_model(tmp_path / part, dtype=torch.float32) for part in "ab")
    rough_net(small).save(tmp_path / "drafter")
    with pytest.raises(InvalidInput, match="vocab_size"):
        EagleNet.read(tmp_path / "drafter", large.config)
    tensors = rough_net(small).export_tensors()
    tensors.pop("fc.weight")
    with pytest.raises(WeightsError, match=r"fc\.weight"):
        rough_net(small).load_tensors(tensors)


def test_gradients_reach_every_weight_through_the_chain(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen3")
    net = rough_net(load_model(tmp_path, dtype=torch.float32))
    tokens, hidden = rows()
    chain = chain_of(net, hidden[0, :20], tokens[0, 1:21], 2)
    chain[1].square().mean().backward()
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in net.parameters()
    )
