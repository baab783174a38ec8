"""Muon: each matrix moves by its momentum with all singular values made alike (Jordan et al. 2024,
"Muon: An optimizer for hidden layers in neural networks"), at one root mean square whatever its
shape (Liu et al. 2025, arXiv 2502.16982, section 2.2).

Directions in which gradients are small thus learn as fast as the others: a drafter that follows a
moving policy gets further in as many seconds, although each step costs some products more
(docs/adr/0075).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.models.products import added, linear
from paceline.training.shards import local_of, local_rows

MOMENTUM = "exp_avg"
"""Name of the state: an exponential average of gradients, like AdamW's first moment."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: they raise small singular values fastest, and leave those near one
between 0.7 and 1.2.
"""
RMS = 0.6
"""Root mean square of an update at a learning rate of one. With it the rates that are best for
AdamW are best for Muon too (docs/adr/0075); Liu et al. have 0.2.
"""
_SMALLEST = 1e-7


def orthogonalised(matrix: Tensor, iterations: int) -> Tensor:
    """About U V^T of matrix = U S V^T, [M, N] in its own dtype, by Newton-Schulz iterations

    X <- (a + b G + c G^2) X with G = X X^T, from X = matrix / |matrix|, over the shorter side.

    All their factors are polynomials of the first G, so they commute: G <- F G F follows without
    X, which is met twice in all, where it is long.
    """
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    scaled = (wide / wide.norm().clamp(min=_SMALLEST)).contiguous()
    gram = linear(scaled, scaled)
    turn: Tensor | None = None
    for number in range(iterations):  # the products are of symmetric matrices, and symmetric
        factor = added(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        turn = factor if turn is None else linear(factor, turn)
        if number + 1 < iterations:
            gram = linear(linear(factor, gram), factor)
    found = scaled if turn is None else linear(turn, scaled.t())
    return found if wide is matrix else found.t()


class Muon(Optimizer):
    """Of matrices, whole or sharded by rows; moments begin as zeros.

    With m <- beta m + (1 - beta) g and Nesterov's u = beta m + (1 - beta) g, a matrix [M, N] moves
    by -lr RMS sqrt(max(M, N)) orthogonalised(u). Every rank computes that of the whole matrix.
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
        """Moves every matrix that has a gradient; returns nothing."""
        assert closure is None, "a loss is not computed again"
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._move(matrix, group)

    def _move(self, matrix: Tensor, settings: dict[str, Any]) -> None:
        gradient, beta = matrix.grad, settings["momentum"]
        assert gradient is not None
        average = self.state[matrix][MOMENTUM].lerp_(gradient, 1 - beta)
        ahead = gradient.lerp(average, beta)
        whole = ahead.full_tensor() if isinstance(ahead, DTensor) else ahead

        direction = orthogonalised(whole, settings["iterations"])
        rate = settings["lr"] * RMS * math.sqrt(max(matrix.shape))
        own = local_of(matrix).mul_(1 - settings["lr"] * settings["weight_decay"])
        own.sub_(local_rows(direction, matrix), alpha=rate)
