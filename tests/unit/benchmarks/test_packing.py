"""The packing benchmark's two forms are the same work."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.packing import (
    DEMO,
    LONGEST,
    SHORTEST,
    compare,
    draw_samples,
    packed_loss,
    padded_loss,
)
from paceline.speculators.eagle import EagleNet, EagleOptions


def test_packed_and_padded_samples_have_one_loss_and_one_gradient() -> None:
    samples, once = draw_samples(12, seed=5), EagleOptions(ttt_steps=1)
    nets = [EagleNet(DEMO, once, seed=1) for _ in range(2)]
    generator = torch.Generator().manual_seed(2)
    for net in nets:
        net.bind(
            *torch.randn(2, DEMO.vocab_size, DEMO.hidden_size, generator=generator.manual_seed(2))
        )
    packed, padded = packed_loss(nets[0], samples), padded_loss(nets[1], samples)
    count = int(packed.positions)
    assert int(padded.positions) == count == sum(int(one.generated[2:].sum()) for one in samples)
    assert float(packed.loss.detach()) / count == pytest.approx(
        float(padded.loss.detach()) / count, rel=1e-5
    )
    for one, objective in zip(nets, (packed, padded), strict=True):
        (objective.loss / count).backward()
        assert one.fc.weight.grad is not None
    for (name, one_weight), other in zip(
        nets[0].named_parameters(), nets[1].parameters(), strict=True
    ):
        torch.testing.assert_close(one_weight.grad, other.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_lengths_are_those_of_the_demo() -> None:
    lengths = [len(one.token_ids) for one in draw_samples(2_000, seed=0)]
    assert (min(lengths), 231) == (SHORTEST, LONGEST)
    assert max(lengths) <= LONGEST
    assert np.median(lengths) == pytest.approx(21, abs=2)
    assert np.mean(lengths) == pytest.approx(29, abs=2)
    assert np.quantile(lengths, 0.9) == pytest.approx(56, abs=5)


def test_a_comparison_reports_both_rates_and_their_ratio() -> None:
    found = compare(batches=3, samples=4)
    assert min(found.packed, found.padded) > 0
    assert found.quartiles[0] <= found.ratio <= found.quartiles[1]
    assert 0 < found.filled < 1
