"""The packed chain is the engine's chain, step by step."""

from __future__ import annotations

import numpy as np
import torch
from unit.drafter_trainer.samples import TARGET, sample, toy_policy

from drafter_trainer.batcher import pack
from drafter_trainer.evaluate import PIECE_POSITIONS, GateJob, chain_matches
from drafter_trainer.gate import accepted_tokens
from drafter_trainer.sample import FeatureSample
from paceline.speculators.eagle import EagleNet

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
    """Drafts from every position with a generated token ahead: the sequence grows by the net's own states."""
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


def test_chain_matches_are_those_of_a_sequence_that_grows_step_by_step() -> None:
    samples = [sample(length, seed) for seed, length in enumerate((14, 5, 22))]
    net = rough_net(3)
    got = chain_matches(net, pack(samples, window=512), toy_policy().policy_head(), STEPS)
    expected = torch.tensor([row for one in samples for row in slow_matches(net, one)])
    assert torch.equal(got, expected)
    assert 0 < expected.float().mean() < 1
    assert len(expected[0]) == STEPS


def test_a_judgement_in_pieces_is_the_judgement_of_all_positions() -> None:
    samples = [sample(30 + seed, seed) for seed in range(14)]
    candidate, serving = rough_net(3), rough_net(4)
    job = GateJob(candidate, serving, samples, toy_policy().policy_head(), steps=STEPS, window=512)
    pieces = 0
    while not job.done:
        job.advance()
        pieces += 1
    assert pieces >= sum(one.positions for one in samples) / PIECE_POSITIONS
    verdict = job.judgement(resamples=100)
    for net, got in ((candidate, verdict.candidate), (serving, verdict.serving)):
        counts = [accepted_tokens(np.array(slow_matches(net, one))) for one in samples]
        assert abs(got - (1 + np.concatenate(counts).mean())) < 1e-12
    assert verdict.positions == sum(int(one.generated[2:].sum()) for one in samples)
