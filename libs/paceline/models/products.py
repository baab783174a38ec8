"""Multiplies float32 matrices on a CPU with the faster library.

torch sends such products to MKL, which uses AVX2 on processors of other makers than Intel, and uses
oneDNN for compiled layers only. With AVX-512 (measured: AMD Zen 5), oneDNN takes half of the time
from some dozen rows on, and longer below because of its start-up cost. On Intel's own processors
MKL is faster (measured: a Xeon, up to twice): `paceline bench products`. Both add the same numbers
in another order, so results differ by rounding.

All other products use torch's choice. See docs/adr/0071.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.processor import processor_field

FEWEST_ROWS = 32
"""With fewer rows, oneDNN's start-up cost exceeds the saving."""
STEP = 16
MANY_ROWS = 1024
"""oneDNN builds a kernel for each number of rows (2 ms for the matrices of a layer) and keeps a
thousand. So it is used for multiples of STEP, and from the number of rows at which one product is
worth a kernel.
"""


def _quicker() -> bool:
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    mkl_is_held_back = processor_field("vendor_id") not in ("", "GenuineIntel")
    return torch.backends.mkldnn.is_available() and wide and mkl_is_held_back


ONEDNN = _quicker()
"""Whether oneDNN is used at all."""


def spare_rows(x: Tensor) -> int:
    """Rows to add to x [M, K] so that oneDNN can be used for products of M.

    0 if oneDNN is not used, or can be used without.
    """
    asked = _float32_on_cpu(x) and FEWEST_ROWS <= len(x) < MANY_ROWS
    return -len(x) % STEP if asked else 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, [..., N], of x [..., K] and W [N, K], with gradients; see functional.linear."""
    if not _suits(x, weight):
        return functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        product: Tensor = _WithGradients.apply(x, weight)
        return product if bias is None else product + bias
    return _product(x, weight, bias)


def added(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """residual + x W^T, [M, N], of residual [M, N], x [M, K] and W [N, K], without gradients."""
    if not _suits(x, weight):
        return torch.addmm(residual, x, weight.t())
    return _product(x, weight).add_(residual)


def _suits(x: Tensor, weight: Tensor) -> bool:
    if not _float32_on_cpu(x) or weight.dtype is not torch.float32:
        return False  # first, as a compiled graph may not depend on rows
    rows = x.numel() // x.shape[-1]
    return rows >= MANY_ROWS or (rows >= FEWEST_ROWS and rows % STEP == 0)


def _float32_on_cpu(x: Tensor) -> bool:
    # a graph compiler chooses its products itself
    compiles = torch.compiler.is_compiling()
    return ONEDNN and x.dtype is torch.float32 and x.device.type == "cpu" and not compiles


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, dense(weight), bias, "none", [], "")
    return found


def dense(weight: Tensor) -> Tensor:
    """Rows or columns [N, K] without a gap: for other layouts oneDNN has no kernel and is a
    thousand times slower.
    """
    return weight if weight.is_contiguous() or weight.t().is_contiguous() else weight.contiguous()


class _WithGradients(torch.autograd.Function):
    """Three products: one of the activations, two for the gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _product(gradient, weight.t())
        if ctx.needs_input_grad[1]:
            rows = gradient.flatten(0, -2).t()
            of_weight = _product(rows, x.flatten(0, -2).t())
        return of_x, of_weight


class Linear(nn.Linear):
    """nn.Linear computed by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """See nn.Linear.forward."""
        return linear(x, self.weight, self.bias)


def use_linear(module: nn.Module) -> None:
    """Turns every nn.Linear below `module` into a Linear, in place; its parameters stay."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = Linear
