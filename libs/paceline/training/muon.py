"""Muon moves each matrix by its momentum with equal singular values (Jordan et al. 2024, "Muon: An
optimizer for hidden layers in neural networks"). The root mean square of the update is the same for
every shape (Liu et al. 2025, arXiv 2502.16982, section 2.2).

Directions of small gradients therefore learn as fast as large ones. A drafter that follows a moving
policy learns more per second, although each step costs more matrix products (docs/adr/0075).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.models.products import linear
from paceline.training.shards import local_of, local_rows

MOMENTUM = "exp_avg"
"""Name of the state: an exponential average of gradients, like AdamW's first moment."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration. They raise small singular values fastest, and keep values
near one between 0.7 and 1.2.
"""
RMS = 0.6
"""Root mean square of an update at a learning rate of one. With this value the best rates of AdamW
are also best for Muon (docs/adr/0075); Liu et al. use 0.2.
"""
TOGETHER = 1 << 20
"""Largest number of elements in a joint product of several matrices: 16 matrices of the demo. A
larger matrix uses the whole processor by itself. A rank of a sharded drafter gathers one matrix at
a time.
"""
_SMALLEST = 1e-7


def orthogonalised(matrices: Sequence[Tensor], iterations: int) -> list[Tensor]:
    """Approximates U V^T of each matrix = U S V^T, [M, N] in its own dtype, by Newton-Schulz
    iterations

        X <- (a + b G + c G^2) X with G = X X^T, from X = matrix / |matrix|, over the shorter side.

    All factors are polynomials of the first G, so they commute. G <- F G F therefore follows
    without X, and the long X is used only twice. All matrices have the same shorter side m, and
    their G [K, m, m] are multiplied together, since small products cost mainly their calls.
    """
    a, b, c = COEFFICIENTS
    scaled = [_wide(one) / one.norm().clamp(min=_SMALLEST) for one in matrices]
    gram = torch.stack([linear(one, one) for one in map(Tensor.contiguous, scaled)])
    turn: Tensor | None = None
    for number in range(iterations):  # products of symmetric matrices, which are symmetric again
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        turn = factor if turn is None else factor @ turn
        if number + 1 < iterations:
            gram = factor @ gram @ factor
    if turn is not None:
        scaled = [linear(each, one.t()) for each, one in zip(turn, scaled, strict=True)]
    return [
        found if matrix.shape == found.shape else found.t()
        for found, matrix in zip(scaled, matrices, strict=True)
    ]


def _wide(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()


def multiplied_together(matrices: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups of matrices with one shorter side m, in order. A group has at most TOGETHER elements
    in its m x m products, or a single matrix.
    """
    batches: dict[int, list[list[Tensor]]] = defaultdict(lambda: [[]])
    for matrix in matrices:
        side = min(matrix.shape)
        last = batches[side][-1]
        if last and (len(last) + 1) * side * side > TOGETHER:
            batches[side].append(last := [])
        last.append(matrix)
    return [batch for of_side in batches.values() for batch in of_side]


class Muon(Optimizer):
    """Optimiser of matrices, whole or sharded by rows; moments start at zero.

    With m <- beta m + (1 - beta) g and Nesterov's u = beta m + (1 - beta) g, a matrix [M, N] moves
    by -lr RMS sqrt(max(M, N)) orthogonalised(u). Every rank computes the update of the whole
    matrix.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        iterations: int,
    ) -> None:
        settings: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "iterations": iterations,
        }
        super().__init__(matrices, settings)
        for group in self.param_groups:
            for matrix in group["params"]:
                self.state[matrix] = {MOMENTUM: torch.zeros_like(matrix)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Moves every matrix that has a gradient. Returns None."""
        assert closure is None, "a loss is not computed again"
        for group in self.param_groups:
            learned = [matrix for matrix in group["params"] if matrix.grad is not None]
            for batch in multiplied_together(learned):
                ahead = [self._ahead(matrix, group["momentum"]) for matrix in batch]
                directions = orthogonalised(ahead, group["iterations"])
                for matrix, direction in zip(batch, directions, strict=True):
                    _move(matrix, direction, group["lr"], group["weight_decay"])

    def _ahead(self, matrix: Tensor, beta: float) -> Tensor:
        """Nesterov's average of the whole matrix."""
        gradient = matrix.grad
        assert gradient is not None
        average = self.state[matrix][MOMENTUM].lerp_(gradient, 1 - beta)
        ahead = gradient.lerp(average, beta)
        return ahead.full_tensor() if isinstance(ahead, DTensor) else ahead


def _move(matrix: Tensor, direction: Tensor, lr: float, weight_decay: float) -> None:
    own = local_of(matrix).mul_(1 - lr * weight_decay)
    own.sub_(local_rows(direction, matrix), alpha=lr * RMS * math.sqrt(max(matrix.shape)))
