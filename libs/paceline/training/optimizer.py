"""Optimises named parameters with AdamW, or their matrices with Muon if requested: warm-up,
clipping and named state.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from paceline.config import OptimizerConfig
from paceline.errors import ConfigError
from paceline.models.products import linear, prefers_bfloat16
from paceline.training.checkpoints import copy_local, copy_on_cpu
from paceline.training.shards import local_of, local_rows, tensors_of

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
    if prefers_bfloat16(len(scaled[0]), scaled[0].device):
        scaled = [one.bfloat16() for one in scaled]
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
    turned = (
        found if matrix.shape == found.shape else found.t()
        for found, matrix in zip(scaled, matrices, strict=True)
    )
    return [found.to(matrix.dtype) for found, matrix in zip(turned, matrices, strict=True)]


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

    def __init__(self, matrices: Iterable[Tensor], **settings: Any) -> None:
        """`settings`: lr, momentum, weight_decay and iterations."""
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


def quantised_adamw(
    parameters: Iterable[Tensor], settings: Mapping[str, Any], moments: Iterable[str]
) -> Optimizer:
    """An optimiser with zero moments under these names. Raises ConfigError if torchao is not
    installed.

    `settings`: arguments of torch's AdamW.
    """
    if find_spec("torchao") is None:
        message = "moments of eight bits need torchao: pip install 'paceline[int8]'"
        raise ConfigError(message, seen="optimizer.moments=int8", allowed="float32 without it")
    from torchao.optim import AdamW8bit  # takes seconds to import
    from torchao.optim.subclass_8bit import OptimState8bit

    class Exact(AdamW8bit):
        """Writing moments as float32 and reading them again preserves every bit."""

        @staticmethod
        def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> Tensor:
            made = OptimState8bit.zeros(p.shape, signed, block_size, p.device, dtype=p.dtype)
            if signed:
                # torchao's lowest level is -0.993. A block with a negative largest number would get
                # another scale after every reading.
                made.qmap[0] = -1.0
            return made

        def step(self, closure: Any = None) -> Any:
            # On a CPU these kernels need a compiler and tens of seconds to compile.
            on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
            with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
                return super().step(closure)

    made = Exact(parameters, **settings)
    for group in made.param_groups:
        for parameter in group["params"]:
            fresh = {
                name: made._new_buffer(parameter, signed=not i) for i, name in enumerate(moments)
            }
            made.state[parameter] = {"step": torch.zeros(()), **fresh}
    return made


MOMENTS = ("exp_avg", "exp_avg_sq")


class NamedOptimizer:
    """AdamW, or Muon and AdamW, over parameters by name, whole or sharded.

    Moments start at zero, so the state has its final shape before the first step.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: OptimizerConfig,
        *,
        moments: Literal["float32", "int8"] = "float32",
        matrices: Collection[str] = (),
        iterations: int = 0,
    ) -> None:
        """`matrices`: parameters that Muon moves, with their number of iterations. Raises
        ConfigError if int8 moments lack torchao.
        """
        self.parameters = dict(parameters)
        self._config = config
        rest = [one for name, one in self.parameters.items() if name not in matrices]
        self._parts: list[Optimizer] = [_adamw(rest, config, moments)] if rest else []
        if matrices:
            muon = Muon(
                [self.parameters[name] for name in matrices],
                lr=config.lr,
                momentum=config.betas[0],
                weight_decay=config.weight_decay,
                iterations=iterations,
            )
            self._parts.append(muon)

    def moments(self, name: str) -> dict[str, Tensor]:
        """Moments of one parameter, live; AdamW's include its step."""
        parameter = self.parameters[name]
        (found,) = (part.state[parameter] for part in self._parts if parameter in part.state)
        return found

    def forget(self) -> None:
        """Drops the gradients."""
        for part in self._parts:
            part.zero_grad()

    def _groups(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            yield from part.param_groups

    def configure(self, config: OptimizerConfig, eps: float) -> None:
        """Replaces the settings of later steps. `eps`: AdamW's addend to the root of the second
        moment.
        """
        self._config = config
        for group in self._groups():
            group |= {"betas": config.betas, "weight_decay": config.weight_decay, "eps": eps}

    def step(self, number: int, rate: float = 1.0) -> float:
        """Takes step `number`, counted from 1, and drops the gradients.

        lr_t = rate * lr * min(1, t / warmup_steps). Returns the global gradient norm before
        clipping, equal on all ranks. A step with a non-finite norm is not taken.
        """
        found = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._config.clip_norm)
        norm = float(found.full_tensor() if isinstance(found, DTensor) else found)
        if math.isfinite(norm):
            warm = min(1.0, number / max(self._config.warmup_steps, 1))
            for group in self._groups():
                lr = rate * self._config.lr * warm
                group["lr"] = torch.tensor(lr) if isinstance(group["lr"], Tensor) else lr
            for part in self._parts:
                part.step()
        self.forget()
        return norm

    def named(self) -> dict[str, Tensor]:
        """Parameters and moments, live, by "model/<name>" and "optimizer/<name>/<moment>"."""
        found = {f"model/{name}": value for name, value in self.parameters.items()}
        for name in self.parameters:
            found |= {f"optimizer/{name}/{key}": one for key, one in self.moments(name).items()}
        return found

    def state(
        self,
        mesh: DeviceMesh | None,
        into: Mapping[str, Any] | None = None,
        numbers: Callable[[Tensor], Tensor] = local_of,
    ) -> dict[str, Any]:
        """Copies of this rank's shards in fp32 on the CPU, over `mesh`, by the names of `named`.

        `into`: an earlier state of these parameters, which is overwritten. `numbers`: returns the
        values of a shard (Offload.numbers).
        """
        old = into or {}
        live = self.named()
        return {key: copy_on_cpu(one, mesh, old.get(key), numbers) for key, one in live.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a `state` of the same number of ranks, nested by the parts of its names or not.
        Raises KeyError for a missing tensor.
        """
        found = dict(tensors_of(state))
        for key, one in self.named().items():
            copy_local(found[key], one)


def _adamw(
    parameters: list[Tensor], config: OptimizerConfig, moments: Literal["float32", "int8"]
) -> Optimizer:
    settings: dict[str, Any] = config.model_dump(include={"lr", "betas", "weight_decay"})
    if moments == "int8":
        return quantised_adamw(parameters, settings, MOMENTS)
    made = AdamW(parameters, **settings, fused=True)
    for parameter in parameters:
        fresh = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        # The fused kernel counts steps on the device of the parameter, other kernels on the CPU.
        made.state[parameter] = {"step": torch.zeros((), device=parameter.device), **fresh}
    return made
