"""The draw follows softmax, is a pure function of seed and position, and honours masks."""

from __future__ import annotations

import math

import gumbel_oracle
import numpy as np
import pytest
import torch

from paceline.models.sampling import (
    CANDIDATES,
    MORE_CANDIDATES,
    DrawParams,
    behavior_logprobs,
    draw,
    gumbel_noise,
    top_alternatives,
    uniform,
    uniform_of,
)

CHI2_999 = {7: 24.32, 63: 103.4}  # critical values at alpha 1e-3


def test_noise_is_the_documented_function() -> None:
    seeds, positions = torch.tensor([0, 7, (1 << 63) - 1]), torch.tensor([0, 511, 131_071])
    got = uniform(seeds, positions, 50)
    for row in range(3):
        for token in (0, 1, 49):
            expected = gumbel_oracle.uniform(int(seeds[row]), int(positions[row]), token)
            assert got[row, token].item() == expected
            one = torch.tensor([token])
            own = uniform_of(seeds[row : row + 1], positions[row : row + 1], one)
            assert own.item() == expected


def test_noise_of_the_target_keeps_its_values() -> None:
    """Sequences that were drawn once can be drawn again: these numbers never change."""
    got = uniform(torch.tensor([0, 7, -3]), torch.tensor([0, 511, 5]), 2)
    pinned = [
        ("0x1.5a2a6c2c68b01p-2", "0x1.1396e2c51fbddp-2"),
        ("0x1.1831a19d366e0p-1", "0x1.6007cfd9525f6p-1"),
        ("0x1.a4940c251b032p-1", "0x1.e0a7fb02ee8f8p-1"),
    ]
    assert got.tolist() == [[float.fromhex(value) for value in row] for row in pinned]


def test_noise_is_bitwise_the_same_in_any_batch() -> None:
    seeds, positions = torch.arange(40) * 977, torch.arange(40) * 3
    together = gumbel_noise(seeds, positions, 97)
    alone = torch.cat([gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 97) for i in range(40)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("varying", ["seed", "position"])
def test_draws_follow_softmax(varying: str) -> None:
    n, temperature = 60_000, 0.7
    logits = torch.tensor([1.0, 0.3, -0.5, 0.0, 1.4, -1.2, 0.6, -0.1])
    counter, fixed = torch.arange(n), torch.full((n,), 12_345)
    seeds, positions = (counter, fixed) if varying == "seed" else (fixed, counter)
    params = DrawParams.of(seeds.tolist(), [temperature] * n)
    tokens = draw(logits.expand(n, -1), positions, params).tokens
    expected = torch.softmax(logits / temperature, dim=0) * n
    chi2 = ((torch.bincount(tokens, minlength=8) - expected) ** 2 / expected).sum().item()
    assert chi2 < CHI2_999[7]


def test_neighbouring_positions_and_tokens_are_independent() -> None:
    n = 40_000
    u = uniform(torch.full((n,), 99), torch.arange(n), 2).numpy()
    for first, second in ((u[:-1, 0], u[1:, 0]), (u[:, 0], u[:, 1])):
        table = np.histogram2d(first, second, bins=8, range=[[0, 1], [0, 1]])[0]
        chi2 = ((table - len(first) / 64) ** 2 / (len(first) / 64)).sum()
        assert chi2 < CHI2_999[63]


def test_temperature_zero_is_argmax_and_reports_plain_logprobs() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    got = draw(logits, torch.arange(5), DrawParams.of(list(range(5)), [0.0] * 5))
    assert torch.equal(got.tokens, logits.argmax(-1))
    torch.testing.assert_close(got.logprobs, logits.log_softmax(-1).max(-1).values)


def test_behavior_logprobs_are_of_the_full_vocabulary_whatever_the_masks() -> None:
    logits = torch.randn(64, 30, generator=torch.Generator().manual_seed(0))
    params = DrawParams.of(list(range(64)), [0.8] * 64, top_k=[3] * 64)
    got = draw(logits, torch.arange(64), params)
    full = behavior_logprobs(logits, params.temperatures)
    torch.testing.assert_close(got.logprobs, full.gather(1, got.tokens[:, None])[:, 0])
    torch.testing.assert_close(full.exp().sum(-1), torch.ones(64))


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.55}, {0, 1}),
        ({"top_p": 0.45}, {0}),
        ({"min_p": 0.35}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.55}, {0, 1}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_masks_keep_exactly_the_tokens_they_name(
    setting: dict[str, float], allowed: set[int]
) -> None:
    n = 4000
    logits = torch.tensor([0.5, 0.25, 0.2, 0.05]).log().expand(n, -1)
    given = {name: [value] * n for name, value in setting.items()}
    params = DrawParams.of(list(range(n)), [1.0] * n, **given)  # type: ignore[arg-type]
    assert set(draw(logits, torch.zeros(n, dtype=torch.int64), params).tokens.tolist()) == allowed


@pytest.mark.parametrize("spread", [0.3, 4.0])  # most tokens of a row kept, or a few
@pytest.mark.parametrize("more", [2 * CANDIDATES, MORE_CANDIDATES])
def test_a_masked_draw_over_a_large_vocabulary_is_the_best_of_the_tokens_kept(
    spread: float, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with few and with many kept tokens, and rows without masks, in one batch."""
    monkeypatch.setattr("paceline.models.sampling.MORE_CANDIDATES", more)
    rows, vocab = 24, 4 * CANDIDATES
    logits = spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5))
    temperatures = [0.0 if row % 6 == 5 else 0.8 for row in range(rows)]
    top_p = [(0.9, 1.0, 0.5)[row % 3] for row in range(rows)]
    top_k = [(0, 0, 300, 40)[row % 4] for row in range(rows)]
    params = DrawParams.of(list(range(rows)), temperatures, top_p=top_p, top_k=top_k)
    got = draw(logits, torch.arange(rows), params)
    noise = gumbel_noise(params.seeds, torch.arange(rows), vocab)
    for row in range(rows):
        heat = temperatures[row] or 1.0
        scores = (logits[row] / torch.tensor(heat)).log_softmax(-1).double()
        order = sorted(range(vocab), key=lambda token: -float(scores[token]))
        kept = order[: top_k[row] or vocab]
        mass, last = 0.0, 0
        while last < len(kept) and (mass < top_p[row] or top_p[row] == 1.0):
            mass += math.exp(scores[kept[last]])
            last += 1
        best = {
            token: float(scores[token]) + (float(noise[row, token]) if temperatures[row] else 0.0)
            for token in kept[:last]
        }
        assert int(got.tokens[row]) == max(best, key=best.__getitem__)


def test_the_gap_is_between_the_two_best_perturbed_scores() -> None:
    logits = torch.randn(20, 11, generator=torch.Generator().manual_seed(3))
    params = DrawParams.of(list(range(20)), [1.0] * 20)
    got = draw(logits, torch.arange(20), params)
    for row in range(20):
        scores = np.sort(logits[row].double().numpy() + gumbel_oracle.gumbel(row, row, 11))
        assert got.gaps[row].item() == pytest.approx(scores[-1] - scores[-2], abs=1e-6)


def test_adjusted_logits_decide_the_token_and_raw_logits_the_logprob() -> None:
    generator = torch.Generator().manual_seed(5)
    raw, adjusted = (
        torch.randn(64, 30, generator=generator),
        torch.randn(64, 30, generator=generator) * 3,
    )
    params = DrawParams.of(list(range(64)), [0.8] * 64, top_k=[4] * 64)
    positions = torch.arange(64)
    got = draw(raw, positions, params, adjusted)
    as_given = draw(adjusted, positions, params)
    assert torch.equal(got.tokens, as_given.tokens)
    assert torch.equal(got.gaps, as_given.gaps)
    assert not torch.equal(got.tokens, draw(raw, positions, params).tokens)
    assert (
        (adjusted.topk(4, dim=-1).indices == got.tokens[:, None]).any(dim=-1).all()
    )  # masks see adjusted logits
    expected = (raw / 0.8).log_softmax(-1).gather(1, got.tokens[:, None])[:, 0]
    torch.testing.assert_close(got.logprobs, expected)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_alternatives_are_the_likeliest_tokens_in_order(temperature: float) -> None:
    logits = torch.tensor([[0.1, 2.0, -1.0, 1.0], [3.0, 0.0, 1.0, -4.0]])
    expected = (logits.double() / (temperature or 1.0)).log_softmax(-1)
    for row, order in zip(
        top_alternatives(logits, temperature, 3), ([1, 3, 0], [0, 2, 1]), strict=True
    ):
        assert [token for token, _ in row] == order
    for found, exact in zip(top_alternatives(logits, temperature, 9), expected, strict=True):
        assert [value for _, value in found] == pytest.approx(
            sorted(exact.tolist(), reverse=True), abs=1e-6
        )
        assert len(found) == 4
