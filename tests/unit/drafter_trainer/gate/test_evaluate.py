"""The packed chain is the engine's chain, step by step."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from unit.drafter_trainer.samples import HASH, TARGET, chain_logits, sample, toy_policy

from paceline.models import sampling
from paceline.services.drafter_trainer.config import GateConfig
from paceline.services.drafter_trainer.gate.evaluate import (
    FIRST_ROWS,
    ROW_POSITIONS,
    GateJob,
    Pace,
    chain_survival,
)
from paceline.services.drafter_trainer.rows.sample import FeatureSample, PolicyHead, pack
from paceline.speculators.eagle import EagleNet
from paceline.speculators.packed import PackedRow

STEPS = 4


def rough_net(seed: int) -> EagleNet:
    """A net that is right now and then."""
    policy, net = toy_policy(), EagleNet(TARGET, seed=seed)
    net.bind(policy.embed, policy.head)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return net.eval()


@torch.inference_mode()
def slow_matches(net: EagleNet, one: FeatureSample) -> list[list[bool]]:
    """Drafts from every position with a generated token ahead: the sequence grows by the net's own
    states.
    """
    tokens, matches = one.token_ids, []
    for t in range(one.positions):
        if not one.generated[t + 2]:
            continue
        hidden, row = one.hidden[: t + 1], []
        for step in range(STEPS):
            ahead = t + 2 + step
            if ahead >= len(tokens):
                row.append(False)
                continue
            inputs = tokens[1:ahead][None]
            out = net.features(hidden[None], inputs, torch.arange(inputs.shape[1])[None])[0, -1]
            row.append(bool(net.logits(out).argmax() == tokens[ahead]))
            hidden = torch.cat([hidden, out[None]])
        matches.append(row)
    return matches


@torch.inference_mode()
def chain_matches(net: Any, row: PackedRow, head: PolicyHead, steps: int) -> torch.Tensor:
    """[N, K] bool at the N valid positions of a row: whether draft k of a greedy chain equals the
    policy's own token.

    Teacher-forced on the true tokens, which equals the engine's chain as long as all earlier drafts
    are right. Drafts past the end of a document count as misses.
    """
    net.bind(head.embed_tokens, head.lm_head)
    matches = []
    for step, logits in enumerate(chain_logits(net, row, steps)):
        there, inside = row.ahead(step)
        matches.append((logits.argmax(-1) == row.draft_tokens[there]) & inside)
    return torch.stack(matches, dim=1)[row.valid]


def test_chain_matches_are_those_of_a_sequence_that_grows_step_by_step() -> None:
    samples = [sample(length, seed) for seed, length in enumerate((14, 5, 22))]
    net = rough_net(3)
    got = chain_matches(net, pack(samples, window=512), toy_policy().policy_head(), STEPS)
    expected = torch.tensor([row for one in samples for row in slow_matches(net, one)])
    assert torch.equal(got, expected)
    assert 0 < expected.float().mean() < 1
    assert len(expected[0]) == STEPS


def test_a_measurement_in_pieces_is_that_of_all_positions() -> None:
    """At a temperature near 0 the toy policy draws its argmax, so survival is the count of
    matches.
    """
    samples = [sample(30 + seed, seed) for seed in range(7)]
    nets = (rough_net(3), rough_net(4))
    job = GateJob(
        nets,
        samples,
        {HASH: toy_policy().policy_head()},
        GateConfig(draft_steps=STEPS),
        512,
        Pace(0.0),
    )
    pieces = 0
    while not job.done:
        job.advance()
        pieces += 1
    positions = sum(one.positions for one in samples)
    assert pieces > 2 * STEPS * positions, "in no time a piece is one position of one draft"
    accepted, groups = job.measured()
    for net, got in zip(nets, accepted, strict=True):
        counts = np.concatenate(
            [np.cumprod(slow_matches(net, one), axis=1).sum(axis=1) for one in samples]
        )
        assert abs(got.sum(axis=1).mean() - counts.mean()) < 1e-3
    assert len(groups) == sum(int(one.generated[2:].sum()) for one in samples)
    assert sorted(np.unique(groups, return_counts=True)[1]) == sorted(
        int(one.generated[2:].sum()) for one in samples
    )


class TimedNet(EagleNet):
    """A net that takes a fixed time per position, on its own clock."""

    def __init__(self, seconds_per_position: float) -> None:
        super().__init__(TARGET, seed=3)
        self.now_s, self._cost_s = 0.0, seconds_per_position

    def draft_logits(self, step: int, states: torch.Tensor) -> torch.Tensor:
        self.now_s += self._cost_s * len(states)
        return super().draft_logits(step, states)


@pytest.mark.parametrize("seconds_per_position", [1e-6, 1e-3, 0.02, 0.5])
def test_a_piece_of_the_gate_takes_its_time_however_slow_a_position_is(
    seconds_per_position: float,
) -> None:
    piece_s = 0.04
    net = TimedNet(seconds_per_position)
    pace = Pace(piece_s, clock=lambda: net.now_s)
    samples = [sample(60 + seed, seed) for seed in range(9)]
    heads = {HASH: toy_policy().policy_head()}
    job = GateJob([net], samples, heads, GateConfig(draft_steps=STEPS), 512, pace)
    took_s = []
    while not job.done:
        began_s = net.now_s
        job.advance()
        took_s.append(net.now_s - began_s)
    assert took_s[0] <= max(piece_s, FIRST_ROWS * seconds_per_position) + piece_s
    longest_s = max(2 * piece_s, seconds_per_position)
    assert max(took_s[1:], default=0.0) <= longest_s, "a piece has one position at least"
    computed = STEPS * sum(one.positions for one in samples) * seconds_per_position
    assert sum(took_s) == pytest.approx(computed)
    rows = -(-sum(one.positions for one in samples) // ROW_POSITIONS) + 1
    assert len(took_s) <= computed / piece_s * 4 + rows + computed / seconds_per_position


@pytest.mark.slow
def test_a_recall_waits_less_than_a_second_for_the_gate_at_a_vocabulary_of_49_thousand() -> None:
    target = dataclasses.replace(TARGET, vocab_size=49_152, hidden_size=256, head_dim=64)
    embed = torch.randn(49_152, 256, generator=torch.Generator().manual_seed(1))
    head = PolicyHead(HASH, 0, embed, embed)
    samples = [
        dataclasses.replace(one, hidden=torch.randn(one.positions + 1, 256), hidden_size=256)
        for one in (sample(190, 1), sample(300, 2))
    ]
    job = GateJob([EagleNet(target)], samples, {HASH: head}, GateConfig(), 512, Pace())
    took_s = []
    while not job.done:
        began_s = time.thread_time()
        job.advance()
        took_s.append(time.thread_time() - began_s)
    assert max(took_s) < 1.0
    assert len(took_s) > 2, "a row takes several pieces"


def test_positions_of_siblings_are_of_one_group_whatever_piece_they_are_in() -> None:
    groups = ["a", "b", "a", "", "b", "a"]
    samples = [
        dataclasses.replace(sample(100 + seed, seed), group=group)
        for seed, group in enumerate(groups)
    ]
    heads = {HASH: toy_policy().policy_head()}
    job = GateJob([rough_net(3)], samples, heads, GateConfig(draft_steps=1), 512, Pace())
    while not job.done:
        job.advance()
    sizes = Counter[str]()
    for one in samples:
        sizes[one.siblings] += int(one.generated[2:].sum())
    assert job.groups == len(sizes) == 3
    counts = np.unique(job.measured()[1], return_counts=True)[1]
    assert sorted(counts) == sorted(sizes.values())


def test_rows_of_two_policy_versions_are_measured_each_with_its_own_head() -> None:
    policy, other = toy_policy(), "ff" * 8
    heads = {
        HASH: policy.policy_head(),
        other: PolicyHead(other, 1, policy.embed.flip(0), policy.head.flip(0)),
    }
    samples = [
        dataclasses.replace(one, temperature=1.0)
        for one in (sample(20, 0), sample(24, 1, head=other))
    ]
    net, alone = rough_net(3), []
    for one in samples:
        row, head = pack([one], window=512), heads[one.lm_head_hash]
        alone.append(chain_survival(net, row, head, STEPS, temperature=1.0).numpy())
    job = GateJob([net], samples, heads, GateConfig(draft_steps=STEPS), 512, Pace())
    while not job.done:
        job.advance()
    (got,) = job.measured()[0]
    assert sorted(got.sum(axis=1)) == pytest.approx(sorted(np.concatenate(alone).sum(axis=1)))
    assert job.head is heads[other]


def test_rows_of_two_temperatures_are_measured_each_at_its_own() -> None:
    head = toy_policy().policy_head()
    samples = [
        dataclasses.replace(sample(length, length), temperature=heat)
        for length, heat in ((20, 0.5), (24, 2.0))
    ]
    net, alone = rough_net(3), []
    for one in samples:
        row = pack([one], window=512)
        alone.append(chain_survival(net, row, head, STEPS, temperature=one.temperature).numpy())
    job = GateJob([net], samples, {HASH: head}, GateConfig(draft_steps=STEPS), 512, Pace())
    while not job.done:
        job.advance()
    (got,) = job.measured()[0]
    assert sorted(got.sum(axis=1)) == pytest.approx(sorted(np.concatenate(alone).sum(axis=1)))
    at_one = chain_survival(net, pack(samples[:1], window=512), head, STEPS, temperature=1.0)
    assert not np.allclose(at_one.numpy(), alone[0])


class TableNet:
    """Drafts by a table of logits [V, V] over the token before: everything about it can be
    enumerated.
    """

    token_ids = None

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def bind(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        """Shares nothing with the target."""

    def chain_states(self, row: PackedRow, steps: int) -> Iterator[tuple[int, slice, torch.Tensor]]:
        tokens = row.next_tokens
        for step in range(steps):
            yield step, slice(0, len(row)), tokens
            tokens = torch.cat([tokens[1:], tokens[:1]])

    def draft_logits(self, step: int, states: torch.Tensor) -> torch.Tensor:
        return self.table[states]


SYMBOLS, DEPTH, HEAT = 3, 3, 0.7


def paths() -> tuple[PackedRow, PolicyHead, torch.Tensor, torch.Tensor]:
    """Every continuation of token 0 by DEPTH tokens as a document, with its probability [P]; and p
    [V, V].

    The state after a token is its one-hot vector, so the head's columns are the policy's logits
    behind each token.
    """
    logits = torch.randn(SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(5)).double()
    p = (logits / HEAT).softmax(-1)
    drawn = torch.cartesian_prod(*[torch.arange(SYMBOLS)] * DEPTH)
    tokens = torch.cat([torch.zeros(len(drawn), 1, dtype=torch.int64), drawn], dim=1)
    weights = p[tokens[:, :-1], tokens[:, 1:]].prod(dim=1)
    first = torch.arange(len(drawn) * DEPTH).view(-1, DEPTH)
    row = PackedRow(
        states=torch.zeros(first.numel(), SYMBOLS),
        next_states=torch.eye(SYMBOLS)[tokens[:, :-1].reshape(-1)],
        next_tokens=tokens[:, :-1].reshape(-1),
        draft_tokens=tokens[:, 1:].reshape(-1),
        positions=torch.arange(DEPTH).repeat(len(drawn)),
        documents=torch.arange(len(drawn)).repeat_interleave(DEPTH),
        valid=torch.ones(first.numel(), dtype=torch.bool),
        lm_head_hash="00" * 8,
    )
    head = PolicyHead("00" * 8, 0, torch.eye(SYMBOLS), logits.T.float())
    return row, head, weights, p


def test_survival_of_likeliest_drafts_is_exact_and_varies_less_than_matches() -> None:
    row, head, weights, p = paths()
    table = torch.randn(SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(11))
    net: Any = TableNet(table)
    survival, token, exact = 1.0, 0, []
    for _ in range(DEPTH):  # the engine's chain from token 0
        draft = int(table[token].argmax())
        survival *= float(p[token, draft])
        exact.append(survival)
        token = draft
    got = chain_survival(net, row, head, DEPTH, temperature=HEAT, noise=False)[::DEPTH]
    drawn = chain_matches(net, row, head, DEPTH)[::DEPTH].long().cumprod(1).double()
    assert (weights[:, None] * got).sum(0).tolist() == pytest.approx(exact, abs=1e-6)
    assert (weights[:, None] * drawn).sum(0).tolist() == pytest.approx(exact, abs=1e-6)
    variances = [
        (weights[:, None] * (one - torch.tensor(exact)) ** 2).sum(0) for one in (got, drawn)
    ]
    assert (variances[0] < variances[1]).all()
    assert 0.02 < exact[-1] < exact[0] < 0.98


def shared(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Probability of each token to be drawn from p and from q with the same noise, [V]."""
    ratios = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
    return 1 / ratios.sum(1)


def test_survival_of_drawn_drafts_is_what_enumerating_all_draws_gives() -> None:
    row, head, weights, p = paths()
    table = torch.randn(SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(11))
    q = (table.double() / HEAT).softmax(-1)
    both = torch.stack([shared(*one) for one in zip(p, q, strict=True)])
    reached, exact = torch.eye(SYMBOLS, dtype=torch.float64)[0], []
    for _ in range(DEPTH):
        reached = reached @ both
        exact.append(float(reached.sum()))
    net: Any = TableNet(table)
    got = chain_survival(net, row, head, DEPTH, temperature=HEAT)[::DEPTH]
    assert (weights[:, None] * got).sum(0).tolist() == pytest.approx(exact, abs=1e-6)


def test_two_draws_with_the_same_noise_agree_as_often_as_the_gate_computes() -> None:
    count, heat = 20_000, 0.8
    generator = torch.Generator().manual_seed(3)
    p, q = torch.randn(2, 1, 6, generator=generator, dtype=torch.float64) * 2
    params = sampling.DrawParams.of([9], [heat]).rows(torch.zeros(count, dtype=torch.int64))
    positions = torch.arange(count)
    drawn, _ = sampling.draw_likely(p.expand(count, -1), positions, params)
    drafts, _ = sampling.draw_likely(q.expand(count, -1), positions, params)
    expected = float(shared((p / heat).softmax(-1)[0], (q / heat).softmax(-1)[0]).sum())
    assert 0.2 < expected < 0.9
    assert float((drawn == drafts).double().mean()) == pytest.approx(expected, abs=0.015)


def test_drafts_of_tokens_that_others_wrote_are_not_counted() -> None:
    """A tool's answer in the middle: the chain ends before it, and its own positions are not
    judged.
    """
    one = sample(20, 1)
    generated = one.generated.clone()
    generated[10:14] = False
    broken, head = dataclasses.replace(one, generated=generated), toy_policy().policy_head()
    survival = chain_survival(
        rough_net(3), pack([broken], window=512), head, STEPS, temperature=1.0
    )
    judged = [t for t in range(one.positions) if generated[t + 2]]
    assert len(survival) == len(judged)
    for row, t in zip(survival, judged, strict=True):
        tokens = list(range(t + 2, min(t + 2 + STEPS, len(generated))))
        stop = next((i for i, token in enumerate(tokens) if not generated[token]), len(tokens))
        assert (row[stop:] == 0).all()
        assert row[0] > 0
