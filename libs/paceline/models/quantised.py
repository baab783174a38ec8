"""Stores weight matrices in eight bits, or in four for drafts, and computes their products.

loading.py selects the matrices, and profiles.py defines the number formats and scales.

Eight bits are symmetric: W[n, k] = values[n, k] * scales[n], or one scale for all rows. For INT8,
torchao selects the scales and rounds, as in its Int8WeightOnlyConfig. For FP8, a scale is the
largest weight / 448, the largest number of e4m3 (Micikevicius et al. 2022, arXiv 2209.05433).
torchao's tensor subclasses are not used. Each of their products takes 10-20 us of Python dispatch,
more than a whole product of a small model (4 us). They also never reach the fused CPU kernel below.

`int8` has two products on a CPU. Times are on one core with AVX-512, relative to a plain matrix
in bfloat16:
- bfloat16 and at most FUSED_ROWS rows: torch's fused kernel, which reads eight bits per weight.
  From 512 x 1408 on it takes 0.5-0.7 of the time for one row, and 1.5 for eight rows in a warm
  cache. From about twelve rows on the second product is faster.
- Otherwise: values in the activations' dtype, one product, scales on the result. It costs a cast of
  the matrix per product. float32 always uses it; the fused kernel takes ten times as long there.
A step of 8 layers of 512 x 1408 exceeds the caches. One row: 9.9 -> 5.6 ms in float32, 8.0 ->
3.4 ms in bfloat16. Eight rows: 16 -> 14 ms, 11 -> 9 ms. If the weights fit into the caches, float32
gains nothing.

A row of the fused product, and of a product of integers (`int8_w8a8`), is independent of the
other rows. The other products round like a plain matrix. In float32, draws differ at near-ties
only; in bfloat16, they may differ between batch shapes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import ConfigError, WeightsError
from paceline.models.profiles import Profile

EPSILON = torch.finfo(torch.float32).eps
"""Smallest scale, so that a row of zeros also has one."""
FUSED_ROWS = 8
"""Largest number of activation rows for the fused kernel."""
LARGEST = 127
"""Largest absolute value of a rounded activation."""
E4M3_LARGEST = torch.finfo(torch.float8_e4m3fn).max
EXACT_COLUMNS = 1024
"""Number of 8-bit products that float32 sums without rounding: 1024 * 127 * 128 < 2^24."""
ROUNDED_AT_ONCE = 1 << 20
"""Weights rounded at once; rounding needs a few times as many numbers beside the matrix."""
_INT_MM_ROWS = 17
"""Least number of rows for torch._int_mm on CUDA."""


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A matrix W [N, K] in eight bits; W[n, k] = values[n, k] * scales[n]."""

    values: Tensor
    """int8 or float8_e4m3fn [N, K]"""
    scales: Tensor
    """[N], or [1] for all rows; the activations' dtype"""
    profile: Profile

    def product(self, x: Tensor) -> Tensor:
        """x W^T: [M, N] of activations x [M, K]."""
        return _PRODUCTS[self.profile.name](x, self.values, self.scales)

    def whole(self) -> Tensor:
        """W as used in the product, float32 [N, K]."""
        return self.values.float() * self.scales.float()[:, None]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix W [N, K] in four bits, a scale and a zero point for each GROUP columns of a row, in
    the layout of torch's fused CPU product: for drafts only.

    Activations are rounded to bfloat16. One row of SmolLM2-135M's layers takes 3 ms on two threads
    of a Zen 5, 5 ms with eight bits.
    """

    values: Tensor
    """uint8; N and K are padded to multiples of ROWS_AT_ONCE and GROUP"""
    scales: Tensor
    """bfloat16 [K / GROUP, N, 2], padded too: scales, then zero points"""
    rows: int
    """N"""

    def product(self, x: Tensor) -> Tensor:
        """x W^T: [M, N] of activations x [M, K]."""
        columns = len(self.scales) * GROUP - x.shape[1]
        few = functional.pad(x, (0, columns)) if columns else x
        found = torch._weight_int4pack_mm_for_cpu(few.bfloat16(), self.values, GROUP, self.scales)
        return found[:, : self.rows].to(x.dtype)


GROUP, ROWS_AT_ONCE = 32, 64
"""Columns of a packed matrix with one scale, and rows that its product computes together."""
_LEVELS = 15
"""Steps between the least and the largest of 16 levels; the product subtracts 8 from a level."""


def packed(weight: Tensor | QuantisedMatrix | PackedMatrix) -> PackedMatrix:
    """A matrix [N, K] on the CPU; each number moves by about half a step of its group at most. A
    step is a fifteenth of the group's range; bfloat16 rounds it and the zero point.
    """
    if isinstance(weight, PackedMatrix):
        return weight
    whole = weight if isinstance(weight, Tensor) else weight.whole()
    rows, columns = whole.shape
    exact = functional.pad(whole, (0, -columns % GROUP, 0, -rows % ROWS_AT_ONCE))
    at_once = max(1, ROUNDED_AT_ONCE // exact.shape[1] // ROWS_AT_ONCE) * ROWS_AT_ONCE
    parts = [_four_bits(part) for part in exact.split(at_once)]
    values, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return PackedMatrix(values, scales.transpose(0, 1).contiguous(), rows)


def _four_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed values of some rows [N, K], and bfloat16 [N, K / GROUP, 2]."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = torch.aminmax(groups, dim=2, keepdim=True)
    steps = ((high - low) / _LEVELS).bfloat16().float().clamp_(min=EPSILON)
    zeros = (low + 8 * steps).bfloat16().float()
    levels = ((groups - zeros) / steps).round_().add_(8).clamp_(0, _LEVELS)
    values = torch._convert_weight_to_int4pack_for_cpu(levels.flatten(1).int(), 2)
    return values, torch.cat((steps, zeros), dim=2).bfloat16()


def _int8_product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """int8 weights, unrounded activations."""
    if x.dtype == torch.bfloat16 and x.shape[0] <= FUSED_ROWS and x.device.type == "cpu":
        return torch._weight_int8pack_mm(x, values, scales)
    return functional.linear(x, values.to(x.dtype)).mul_(scales)


def _rounded_product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """int8 weights; activations are rounded to int8 with a scale for each row of x: its largest
    number / 127.

    The product sums integers without rounding, so it is the same on every device.
    """
    exact = x.float()
    step = exact.abs().amax(1, keepdim=True).clamp_(min=EPSILON).div_(LARGEST)
    product = _whole_product((exact / step).round_(), values)
    return product.mul_(step).mul_(scales.float()).to(x.dtype)


def _fp8_product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """e4m3 weights; activations unrounded on the CPU, e4m3 per row of x on CUDA."""
    if x.device.type != "cuda":
        # 256: see _in_half.
        return functional.linear(x, _in_half(values).to(x.dtype)).mul_(scales * 256)
    step = x.float().abs().amax(1, keepdim=True).clamp_(min=EPSILON).div_(E4M3_LARGEST)
    rounded = (x.float() / step).clamp_(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    rows = scales.float().expand(len(values))[None].contiguous()
    # Row-wise scales require a result in bfloat16.
    return torch._scaled_mm(
        rounded, values.t(), scale_a=step, scale_b=rows, out_dtype=torch.bfloat16
    ).to(x.dtype)


_PRODUCTS = {
    "int8": _int8_product,
    "int8_w8a8": _rounded_product,
    "fp8_channel": _fp8_product,
    "fp8_tensor": _fp8_product,
}


def quantised(weight: Tensor, profile: Profile) -> QuantisedMatrix:
    """A matrix [N, K] in the format of `profile`, each element rounded by at most half a step.

    Half a step is half the scale for int8. For e4m3 it is 2^-4 of the element, plus its scale *
    2^-10. Scales have the dtype of `weight`. Needs memory for ROUNDED_AT_ONCE numbers beside the
    matrix. Raises WeightsError for a scale that is not finite, ConfigError if int8 is chosen
    without torchao.
    """
    values = torch.empty(weight.shape, dtype=getattr(torch, profile.weight_dtype))
    values = values.to(weight.device)
    rows = max(1, ROUNDED_AT_ONCE // weight.shape[1])
    if profile.weight_dtype == "int8":
        scales = torch.cat(
            [_int8(*part) for part in zip(weight.split(rows), values.split(rows), strict=True)]
        )
    else:
        scales = _e4m3_scales(weight, per_row=profile.scale_per == "row")
        _check_finite(scales)
        for part, out, own in zip(
            weight.split(rows),
            values.split(rows),
            scales.expand(len(weight)).split(rows),
            strict=True,
        ):
            exact = (part.float() / own.float()[:, None]).clamp_(-E4M3_LARGEST, E4M3_LARGEST)
            out.copy_(exact.to(out.dtype))
    return QuantisedMatrix(values, scales, profile)


def _int8(weight: Tensor, out: Tensor) -> Tensor:
    """Rounds some rows into `out`; returns their scales."""
    try:
        from torchao.quantization import MappingType, choose_qparams_affine, quantize_affine
    except ImportError as error:
        message = "INT8 weights need torchao: pip install 'paceline[int8]'"
        allowed = "profile = '', fp8_channel or fp8_tensor"
        raise ConfigError(message, seen=str(error), allowed=allowed) from error

    exact, block = weight.float(), (1, weight.shape[1])
    wanted, zeros = choose_qparams_affine(
        exact,
        MappingType.SYMMETRIC,
        block,
        torch.int8,
        eps=EPSILON,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.int32,
    )
    scales = _rounded_up(wanted, weight.dtype)
    _check_finite(scales)
    out.copy_(quantize_affine(exact, block, scales.float(), zeros, torch.int8))
    return scales.view(-1)


def _e4m3_scales(weight: Tensor, *, per_row: bool) -> Tensor:
    low, high = (
        torch.aminmax(weight, dim=1) if per_row else torch.aminmax(weight.view(1, -1), dim=1)
    )
    largest = torch.maximum(high.float(), -low.float())
    return _rounded_up((largest / E4M3_LARGEST).clamp_(min=EPSILON), weight.dtype)


def _rounded_up(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in another dtype, rounded up: a smaller scale would clip its row's largest weight."""
    near = scales.to(dtype)
    return torch.where(near < scales, torch.nextafter(near, torch.full_like(near, torch.inf)), near)


def _check_finite(scales: Tensor) -> None:
    wrong = scales[~torch.isfinite(scales)]
    if len(wrong):
        message = f"{len(wrong)} scales are not finite"
        raise WeightsError(message, seen=float(wrong[0]), allowed="finite")


def _whole_product(x: Tensor, values: Tensor) -> Tensor:
    """x values^T, float32 [M, N], of integers x float32 [M, K] and int8 [N, K]; sums are exact, and
    rounded once.
    """
    if values.device.type == "cuda":
        rows = max(_INT_MM_ROWS - len(x), 0)
        padded = functional.pad(x.to(torch.int8), (0, 0, 0, rows))
        return torch._int_mm(padded, values.t())[: len(x)].float()
    if torch.cpu._is_vnni_supported():
        return torch._int_mm(x.to(torch.int8), values.t()).float()
    if x.shape[1] <= EXACT_COLUMNS:
        return functional.linear(x, values.float())
    # Without these instructions _int_mm takes 4 to 20 times as long as the product in float32.
    parts = zip(x.split(EXACT_COLUMNS, 1), values.split(EXACT_COLUMNS, 1), strict=True)
    return sum(functional.linear(a, b.float()).double() for a, b in parts).float()  # type: ignore[union-attr]


def _in_half(values: Tensor) -> Tensor:
    """e4m3 numbers / 256 in float16, exactly: the bits of e4m3, shifted, are a float16 with an
    exponent lower by 8. Faster on the CPU than torch's cast.
    """
    return (values.view(torch.int8).to(torch.int16) << 7).bitwise_and_(~(1 << 14)).view(torch.half)
