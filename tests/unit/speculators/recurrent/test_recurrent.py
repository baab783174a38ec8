"""The kind "lstm", with an embedding for each gate or for all: alignment, loss, packing, and equal
drafts of engine and trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from random_models import load_model, save_random
from torch import Tensor
from unit.drafter_trainer.samples import (
    HASH,
    HIDDEN,
    PROMPT,
    TARGET,
    VOCABULARY,
    chain_logits,
    sample,
    toy_policy,
)

from paceline.errors import WeightsError
from paceline.models.config import ModelConfig
from paceline.services.drafter_trainer.config import DrafterOptimizerConfig
from paceline.services.drafter_trainer.learn.learner import DrafterLearner
from paceline.services.drafter_trainer.rows.sample import FeatureSample, pack
from paceline.speculators.base import DraftBatch, DraftShape, SpeculatorSetup
from paceline.speculators.kinds import find_kind
from paceline.speculators.lstm import LstmNet
from paceline.speculators.lstm_drafter import LstmDrafter
from paceline.speculators.net import build_drafter, trained_net
from paceline.speculators.packed import PackedRow

HEADS = 4
KINDS = {
    "lstm": {"tie_lstm_embs": False},
    "lstm tied": {"tie_lstm_embs": True},
}
LENGTHS = (9, 14, 6, 21)


def fresh_net(kind: str, target: ModelConfig = TARGET, **options: object) -> LstmNet:
    found = trained_net(kind.split()[0])
    settings = {"n_predict": HEADS, **KINDS[kind], **options}
    net = found.fresh(target, found.Options.model_validate(settings), seed=3)
    assert isinstance(net, LstmNet)
    net.bind(toy_policy().embed, toy_policy().head)
    return net


def rough_net(kind: str, target: ModelConfig = TARGET, **options: object) -> LstmNet:
    """A net in which every weight matters."""
    net, generator = fresh_net(kind, target, **options), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return net


# ---- drafting in the engine


class Engine:
    """Two sequences of random tokens and states in slots 1 and 2 of 4."""

    def __init__(self, kind: str, directory: Path) -> None:
        save_random(directory, "llama")
        self.weights = load_model(directory, dtype=torch.float32)
        self.net = rough_net(kind, self.weights.config)
        self.net.save(directory / "drafter")
        self.drafter = build_drafter(
            find_kind(kind.split()[0]),
            SpeculatorSetup(self.weights, 4, 64, torch.float32, 0, directory / "drafter"),
        )
        assert isinstance(self.drafter, LstmDrafter)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 97, (4, 64), generator=generator)
        self.states = torch.randn(4, 64, 48, generator=generator)

    def batch(self, *lengths: int) -> DraftBatch:
        return DraftBatch([1, 2], lengths, self.tokens, self.states)

    def chain(self, slot: int, length: int, drafts: list[int]) -> list[Tensor]:
        """Return the trainer's log-probs of the drafts after `length` tokens, teacher-forced on
        `drafts`.
        """
        states = torch.zeros(length + len(drafts), 48)
        states[: length - 1] = self.states[slot, : length - 1]
        tokens = torch.cat((self.tokens[slot, :length], torch.tensor([*drafts, 0])))
        row = pack([FeatureSample("", 0, 0, HASH, states, tokens, tokens >= 0, 48)], window=512)
        with torch.no_grad():
            return [
                torch.log_softmax(logits[length - 2], -1)
                for logits in chain_logits(self.net, row, len(drafts))
            ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_drafts_what_the_trainers_chain_predicts(kind: str, tmp_path: Path) -> None:
    engine = Engine(kind, tmp_path)
    engine.drafter.propose(engine.batch(5, 9), DraftShape(2))
    for lengths in ((30, 23), (2, 31)):
        drafts = engine.drafter.propose(engine.batch(*lengths), DraftShape(HEADS))
        for row, length in enumerate(lengths):
            tokens = drafts.tokens[row].tolist()
            chain = engine.chain(row + 1, length, tokens)
            assert tokens == [int(logprobs.argmax()) for logprobs in chain]
            expected = torch.stack([logprobs.max() for logprobs in chain]).cumsum(0).exp()
            torch.testing.assert_close(drafts.scores[row], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_of_a_tree_scores_as_its_path_and_the_likeliest_child_each_time_is_the_chain(
    kind: str, tmp_path: Path
) -> None:
    engine, lengths = Engine(kind, tmp_path), (30, 23)
    drafts = engine.drafter.propose(engine.batch(*lengths), DraftShape(HEADS, 3, 12))
    chains = engine.drafter.propose(engine.batch(*lengths), DraftShape(HEADS)).tokens
    assert drafts.parents is not None
    for row, length in enumerate(lengths):
        paths: list[list[int]] = [[]]
        for token, parent, score in zip(
            drafts.tokens[row], drafts.parents[row], drafts.scores[row], strict=True
        ):
            paths.append([*paths[int(parent)], int(token)])
            logprobs = zip(engine.chain(row + 1, length, paths[-1]), paths[-1], strict=True)
            assert float(score.log()) == pytest.approx(
                sum(float(step[one]) for step, one in logprobs), abs=1e-3
            )
        node = 0
        greedy: list[int] = []
        while children := [
            i for i, parent in enumerate(drafts.parents[row].tolist()) if parent == node
        ]:
            best = max(children, key=lambda child: float(drafts.scores[row, child]))
            node, greedy = best + 1, [*greedy, int(drafts.tokens[row, best])]
        # How far the chain is in the tree depends on how likely it is.
        assert greedy == chains[row, : len(greedy)].tolist()
        assert len(greedy) >= 2


@pytest.mark.parametrize("shape", [DraftShape(9), DraftShape(9, 2, 12)])
def test_more_steps_than_heads_are_as_many_steps_as_heads(
    shape: DraftShape, tmp_path: Path
) -> None:
    engine = Engine("lstm tied", tmp_path)
    got = engine.drafter.propose(engine.batch(30, 23), shape)
    expected = engine.drafter.propose(engine.batch(30, 23), replace(shape, steps=HEADS))
    assert torch.equal(got.tokens, expected.tokens)
    assert torch.equal(got.scores, expected.scores)


def test_a_chain_ends_below_the_floor(tmp_path: Path) -> None:
    engine = Engine("lstm", tmp_path)
    scores = engine.drafter.propose(engine.batch(30, 23), DraftShape(HEADS)).scores.amax(0).tolist()
    cut = engine.drafter.propose(
        engine.batch(30, 23), DraftShape(HEADS, floor=(scores[0] + scores[1]) / 2)
    )
    assert cut.tokens.shape == (2, 2)


@pytest.mark.parametrize("heads", [HEADS, 2])
def test_a_new_version_serves_with_the_shape_its_config_tells(heads: int, tmp_path: Path) -> None:
    engine = Engine("lstm", tmp_path)
    other = fresh_net("lstm", engine.weights.config, n_predict=heads, inner_dim=20)
    other.save(tmp_path / "other")
    before = engine.drafter.propose(engine.batch(30, 23), DraftShape(HEADS)).tokens
    state = engine.drafter.load_state(tmp_path / "other")
    engine.drafter.bind(engine.weights)
    assert torch.equal(
        engine.drafter.propose(engine.batch(30, 23), DraftShape(HEADS)).tokens, before
    )
    engine.drafter.commit_state(state)
    after = engine.drafter.propose(engine.batch(30, 23), DraftShape(HEADS)).tokens
    setup = SpeculatorSetup(engine.weights, 4, 64, torch.float32, 0, tmp_path / "other")
    expected = (
        build_drafter(find_kind("lstm"), setup)
        .propose(engine.batch(30, 23), DraftShape(HEADS))
        .tokens
    )
    assert after.shape == (2, heads)
    assert torch.equal(after, expected)


def test_pushed_tensors_alone_must_have_the_serving_shape(tmp_path: Path) -> None:
    engine = Engine("lstm", tmp_path)
    for width, name in ((0, "good"), (20, "narrow")):
        fresh_net("lstm", engine.weights.config, inner_dim=width).save(tmp_path / name)
        (tmp_path / name / "config.json").unlink()
    engine.drafter.commit_state(engine.drafter.load_state(tmp_path / "good"))
    with pytest.raises(WeightsError, match=r"forget_emb\.0\.weight.*20"):
        engine.drafter.load_state(tmp_path / "narrow")


# ---- learning


def slow_loss(net: LstmNet, samples: list[FeatureSample], *, soft: bool) -> list[float]:
    """Per head, position by position: cross-entropy while the policy drew every token up to the
    head's.
    """
    policy, losses = toy_policy(), [0.0] * HEADS
    for one in samples:
        chain = chain_logits(net, pack([one], window=512), HEADS)
        for t in range(one.positions):
            for i in range(HEADS):
                if t + 2 + i >= len(one.token_ids) or not one.generated[t + 2 : t + 3 + i].all():
                    break
                logprobs = torch.log_softmax(chain[i][t], -1)
                if soft:
                    losses[i] -= float(
                        (torch.softmax(policy.head @ one.hidden[t + 1 + i], -1) * logprobs).sum()
                    )
                else:
                    losses[i] -= float(logprobs[one.token_ids[t + 2 + i]])
    return losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", ["drawn", "distribution"])
def test_the_loss_is_the_sum_over_heads_where_the_policy_drew_the_whole_chain(
    kind: str, targets: str
) -> None:
    net, samples = (
        rough_net(kind, targets=targets),
        [sample(length, seed) for seed, length in enumerate(LENGTHS)],
    )
    samples[3].generated[11:13] = False  # a tool's tokens
    with torch.no_grad():
        loss, positions, terms = net(pack(samples, window=512))
        expected = slow_loss(net, samples, soft=targets == "distribution")
    assert float(loss) == pytest.approx(sum(expected), rel=1e-5)
    assert int(positions) == sum(length - PROMPT for length in LENGTHS) - 2
    for i, value in enumerate(expected):
        assert float(terms[f"loss_{i}"]) == pytest.approx(value, rel=1e-5)


def random_row(seed: int, count: int = 20, length: int = 22) -> PackedRow:
    """Documents of random tokens with the toy policy's states: no state predicts the token after
    it.
    """
    policy, generator = toy_policy(), torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (count, length), generator=generator)
    states = [torch.tanh(torch.randn(count, HIDDEN, generator=generator))]
    for t in range(1, length - 1):
        states.append(policy.step(states[-1], tokens[:, t]))
    drawn = torch.ones(length, dtype=torch.bool)
    return pack(
        [
            FeatureSample("", 0, 0, HASH, hidden, ids, drawn, HIDDEN)
            for hidden, ids in zip(torch.stack(states, dim=1), tokens, strict=True)
        ],
        window=512,
    )


def trained_divergence(kind: str, *, shifted: bool) -> float:
    """Mean KL of policy and first head on a fresh row after 200 steps; shifted: row t is given
    token t, not t + 1.
    """

    def made(seed: int) -> PackedRow:
        row = random_row(seed)
        return replace(row, next_tokens=row.next_tokens.roll(1)) if shifted else row

    net = fresh_net(kind, inner_dim=96, n_predict=2, targets="distribution")
    rows, judged = [made(seed) for seed in range(20)], made(99)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, 200)
    for step in range(200):
        optimizer.zero_grad()
        loss, positions, _ = net(rows[step % 20])
        (loss / positions).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        _, positions, terms = net(judged)
    logprobs = torch.log_softmax(judged.next_states @ toy_policy().head.T, dim=-1)
    least = -(logprobs.exp() * logprobs).sum(-1).mean()
    return float(terms["loss_0"] / positions - least)


@pytest.mark.parametrize("kind", ["lstm tied"])
def test_the_next_state_is_learned_as_rows_are_aligned_and_not_with_tokens_shifted_by_one(
    kind: str,
) -> None:
    assert trained_divergence(kind, shifted=False) < 0.17
    assert trained_divergence(kind, shifted=True) > 1.3


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_row_has_the_loss_and_gradients_of_its_documents_alone(kind: str) -> None:
    samples = [sample(length, seed) for seed, length in enumerate(LENGTHS)]
    packed, apart = rough_net(kind), rough_net(kind)
    whole = packed(pack(samples, window=512))
    parts = [apart(pack([one], window=512)) for one in samples]
    whole.loss.backward()
    for part in parts:
        part.loss.backward()
    torch.testing.assert_close(whole.loss, sum(part.loss for part in parts), atol=0, rtol=1e-5)
    assert whole.positions == sum(part.positions for part in parts)
    for (name, got), expected in zip(packed.named_parameters(), apart.parameters(), strict=True):
        assert expected.grad is not None
        assert got.grad is not None
        assert float((got.grad - expected.grad).norm()) <= 1e-5 * float(expected.grad.norm()), name
        # The first draft forgets nothing: there is no memory before it.
        assert float(expected.grad.norm()) > 0 or name == "forget_proj.0.weight", name


@pytest.mark.parametrize("kind", KINDS)
def test_no_earlier_prediction_or_loss_sees_a_later_token_or_another_document(kind: str) -> None:
    net, changed = rough_net(kind), 15
    samples = [sample(12, 0), sample(21, 1), sample(9, 2)]
    later, neighbour = sample(21, 1), sample(12, 77)
    later.token_ids[changed] = (later.token_ids[changed] + 1) % VOCABULARY
    later.hidden[changed:] += 1
    before = pack(samples, window=512)
    for after in (
        pack([samples[0], later, samples[2]], window=512),
        pack([neighbour, *samples[1:]], window=512),
    ):
        own = before.documents == 1
        earlier = own & (before.positions + 2 < changed)
        with torch.no_grad():
            pairs = zip(
                chain_logits(net, before, HEADS), chain_logits(net, after, HEADS), strict=True
            )
            for step, (one, two) in enumerate(pairs):
                reach = own & (before.positions + 1 + step < changed)
                assert torch.equal(one[reach], two[reach])
                assert not torch.equal(one, two)
            losses = [net(replace(row, valid=row.valid & earlier)).loss for row in (before, after)]
        assert float(losses[0]) == float(losses[1]) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_has_a_gradient_even_without_a_position_to_learn_from(kind: str) -> None:
    """Ranks that shard a net must agree on which gradients there are."""
    net, row = rough_net(kind), pack([sample(4, 0)], window=512)
    for valid in (row.valid, torch.zeros_like(row.valid)):
        net.zero_grad()
        loss, positions, terms = net(replace(row, valid=valid))
        loss.backward()
        assert all(parameter.grad is not None for parameter in net.parameters())
        assert (float(loss.detach()) > 0) == (int(positions) > 0)
        assert float(terms[f"loss_{HEADS - 1}"]) == 0


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.few(2)
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", KINDS)
def test_the_learner_trains_it_and_its_loss_falls(kind: str) -> None:
    learner = DrafterLearner(
        fresh_net(kind), DrafterOptimizerConfig(lr=1e-2, warmup_steps=2, average=0), micro_batches=2
    )
    row, head = (
        pack([sample(24, seed) for seed in range(8)], window=512),
        toy_policy().policy_head(),
    )
    results = [learner.micro_step(row, head) for _ in range(60)]
    assert learner.total_steps == 30
    assert results[-1].loss < 0.6 * results[0].loss
    assert set(results[0].terms) == {"correct", *(f"loss_{i}" for i in range(HEADS))}
    assert results[0].loss == pytest.approx(
        sum(results[0].terms[f"loss_{i}"] for i in range(HEADS)), rel=1e-5
    )
    snapshot = learner.snapshot()
    snapshot.bind(head.embed_tokens, head.lm_head)
    with torch.no_grad():
        loss, positions, _ = snapshot(row)
    assert float(loss / positions) < results[-2].loss
