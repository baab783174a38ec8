"""The G-test of observed counts against exact probabilities, and its power against another
distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_EXPECTED = 10.0
"""Cells with smaller expected counts are pooled, so that the statistic follows chi-square."""


@dataclass(frozen=True)
class GTest:
    """G = 2 sum O ln(O / E); under the null chi-square with `df` degrees of freedom."""

    statistic: float
    df: int
    p_value: float

    def __str__(self) -> str:
        return f"G = {self.statistic:.1f}, df = {self.df}, p = {self.p_value:.2e}"


def g_test(observed: Tensor, probabilities: Tensor) -> GTest:
    """observed: counts [cells]; probabilities float64 [cells], in all 1; a cell of probability 0
    admits no count.
    """
    observed = observed.double()
    count = float(observed.sum())
    if observed[probabilities == 0].any():
        return GTest(math.inf, 1, 0.0)
    cell = pooled_cells(probabilities * count)
    cells = int(cell.max()) + 1
    seen = torch.zeros(cells, dtype=torch.float64).index_add_(0, cell, observed)
    expected = torch.zeros(cells, dtype=torch.float64).index_add_(0, cell, probabilities * count)
    statistic = 2 * float(torch.xlogy(seen, seen / expected).sum())
    return GTest(statistic, cells - 1, _survival(statistic, cells - 1))


def pooled_cells(expected: Tensor) -> Tensor:
    """Cell number int64 [cells] of each outcome: the rarest outcomes share cell 0, every other
    outcome has a cell.
    """
    order = expected.argsort()
    ordered = expected[order]
    enough = (ordered.cumsum(0) >= LEAST_EXPECTED) & (ordered.roll(-1) >= LEAST_EXPECTED)
    first_alone = int(enough.long().argmax()) + 1
    cell = torch.empty_like(order)
    cell[order] = (torch.arange(len(expected)) - first_alone + 1).clamp(min=0)
    return cell


def power(count: int, probabilities: Tensor, other: Tensor, alpha: float) -> float:
    """Chance that `g_test` of `count` draws from `other` has p < alpha, by the noncentral
    chi-square.

    Its noncentrality is count * sum (other - probabilities)^2 / probabilities over the pooled
    cells; its law is taken as normal with the same mean and variance, which is close for many
    cells.
    """
    cell = pooled_cells(probabilities * count)
    cells = int(cell.max()) + 1
    base = torch.zeros(cells, dtype=torch.float64).index_add_(0, cell, probabilities)
    moved = torch.zeros(cells, dtype=torch.float64).index_add_(0, cell, other)
    noncentrality = count * float(((moved - base) ** 2 / base).sum())
    mean, deviation = cells - 1 + noncentrality, math.sqrt(2 * (cells - 1 + 2 * noncentrality))
    return 0.5 * math.erfc((_critical(cells - 1, alpha) - mean) / deviation / math.sqrt(2))


def _survival(statistic: float, df: int) -> float:
    half = torch.tensor([df / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _critical(df: int, alpha: float) -> float:
    low, high = 0.0, 10.0 * df + 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _survival(middle, df) > alpha else (low, middle)
    return high
