"""Multiplies matrices on a CPU in the fastest form.

Few rows (up to MOST_ROWS) read each weight once, so the rate of memory limits them. torch's form of
a product reaches a third of that rate. The matrices of a served model are therefore multiplied in
the form that was measured to be the fastest for their shape, dtype and number of rows
(`serve_matrices`):
- linear: torch's own, or oneDNN by the rule below;
- turned: W x^T, for one row as a batch of blocks of W;
- onednn: oneDNN on W as it is stored;
- packed: oneDNN on a second copy of W in oneDNN's own layout.
Measured choices are kept in a file by processor, threads and version of torch.

For many rows torch sends float32 to MKL, which uses AVX2 on AMD's processors. With AVX-512, oneDNN
takes half of the time there from some dozen rows on; on Intel's processors MKL is faster.

Forms add the same numbers in another order, so results differ by rounding. See docs/adr/0071.
"""

import json
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline import processor
from paceline.errors import ResourceExhausted
from paceline.whole_files import write_whole

FEWEST_ROWS, STEP, MANY_ROWS = 32, 16, 1024
"""With fewer rows than the first, oneDNN's start-up cost exceeds the saving. It builds a kernel for
each number of rows (2 ms a layer) and keeps a thousand. So it is used for multiples of STEP, and
where one product is worth a kernel.
"""
WIDE = 512
"""Wider matrices are several times as fast in bfloat16 if the processor has such products."""


def prefers_bfloat16(width: int, device: torch.device) -> bool:
    """Whether a drafter multiplies matrices of this shorter side in bfloat16, not float32."""
    fast = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return width > WIDE and bool(fast)


def _quicker() -> bool:
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    mkl_is_held_back = processor.processor_field("vendor_id") not in ("", "GenuineIntel")
    return torch.backends.mkldnn.is_available() and wide and mkl_is_held_back


ONEDNN = _quicker()
"""Whether oneDNN is used at all."""
MOST_ROWS = 64
"""Largest number of rows for a measured form."""
MEASURED_ROWS = (1, 2, 3, 4, 5, 8, 16, MOST_ROWS)
"""Numbers of rows that are timed; a number between two takes the form of the larger."""
_TIMINGS, _TIMED_BYTES = 5, 64 << 20
"""Timings of a form, and weights read in each of them: more than the caches hold."""
_MARGIN = 1.05
"""Factor by which a form must be faster to replace the form for fewer rows, at first `linear`."""
_QUIET = 1.25
"""Ratio of median and least time above which other processes disturbed the timings."""


def spare_rows(x: Tensor) -> int:
    """Rows to add to x [M, K] so that oneDNN can be used for products of M.

    0 if oneDNN is not used, or can be used without.
    """
    asked = _float32_on_cpu(x) and FEWEST_ROWS <= len(x) < MANY_ROWS
    return -len(x) % STEP if asked else 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, [..., N], of x [..., K] and W [N, K], with gradients; see functional.linear."""
    if (served := _served_matrix(x, weight)) is not None:
        few = served.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], len(weight))
        return few if bias is None else few.add_(bias)
    if not _suits(x, weight) or torch.is_autocast_enabled("cpu"):
        return functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        product: Tensor = _WithGradients.apply(x, weight)
        return product if bias is None else product + bias
    return _product(x, weight, bias)


def linear_padded(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` of x [..., K]; of x [M, K] with the number of rows that is fastest."""
    if x.dim() != 2 or not (spare := spare_rows(x)):
        return linear(x, weight)
    return linear(functional.pad(x, (0, 0, 0, spare)), weight)[: len(x)]


def added(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """residual + x W^T, [M, N], of residual [M, N], x [M, K] and W [N, K], without gradients."""
    if (served := _served_matrix(x, weight)) is not None:
        return served.product(x).add_(residual)
    if not _suits(x, weight):
        return torch.addmm(residual, x, weight.t())
    return _product(x, weight).add_(residual)


def _suits(x: Tensor, weight: Tensor) -> bool:
    if not _float32_on_cpu(x) or weight.dtype is not torch.float32:
        return False
    rows = x.numel() // x.shape[-1]
    return rows >= MANY_ROWS or (rows >= FEWEST_ROWS and rows % STEP == 0)


def _float32_on_cpu(x: Tensor) -> bool:
    return ONEDNN and x.dtype is torch.float32 and x.device.type == "cpu"


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


# --- the measured form of a served matrix ---------------------------------------------------------


class ServedMatrix:
    """A matrix W [N, K] with a form for each number of rows, and its packed copy if one has it."""

    def __init__(self, weight: Tensor, forms: Sequence[str]) -> None:
        """forms: names in FORMS for MEASURED_ROWS."""
        self.weight = weakref.ref(weight)
        self.forms = [
            FORMS[next(form for top, form in zip(MEASURED_ROWS, forms, strict=True) if rows <= top)]
            for rows in range(MOST_ROWS + 1)
        ]
        self.copy: Tensor | None = None

    def pack(self) -> None:
        """Makes the copy, or renews its numbers."""
        copy = torch.ops.mkldnn._reorder_linear_weight(self.whole(), PACKED_FOR)
        self.copy = copy if self.copy is None else self.copy.copy_(copy)

    def product(self, x: Tensor) -> Tensor:
        """x W^T [M, N] of x [M, K], M at most MOST_ROWS, without gradients."""
        return self.forms[len(x)](x, self)

    def whole(self) -> Tensor:
        """W, which the caller holds."""
        weight = self.weight()
        assert weight is not None
        return weight


def _by_torch(x: Tensor, matrix: ServedMatrix) -> Tensor:
    weight = matrix.whole()
    return _product(x, weight) if _suits(x, weight) else functional.linear(x, weight)


def _turned(x: Tensor, matrix: ServedMatrix) -> Tensor:
    weight = matrix.whole()
    if len(x) > 1:
        return torch.mm(weight, x.t()).t().contiguous()
    # torch reads whole matrices at a third of the memory's rate for one column, and blocks at all.
    outputs, inputs = weight.shape
    blocks = next(count for count in (16, 8, 4, 2, 1) if outputs % count == 0)
    # These strides: with others torch takes a slower path.
    column = x.contiguous().as_strided((blocks, inputs, 1), (0, 1, inputs))
    return torch.bmm(weight.view(blocks, -1, inputs), column).view(1, outputs)


def _by_onednn(x: Tensor, matrix: ServedMatrix) -> Tensor:
    return _product(x, matrix.whole())


def _packed(x: Tensor, matrix: ServedMatrix) -> Tensor:
    if matrix.copy is None:
        matrix.pack()
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix.copy, None, "none", [], "")
    return found


PACKED_FOR = 8
"""Rows that a packed copy is laid out for; other numbers are as fast."""
Form = Callable[[Tensor, ServedMatrix], Tensor]
FORMS: dict[str, Form] = {
    "linear": _by_torch,
    "turned": _turned,
    "onednn": _by_onednn,
    "packed": _packed,
}
_served: dict[int, ServedMatrix] = {}
"""By the identity of the weight."""


def _served_matrix(x: Tensor, weight: Tensor) -> ServedMatrix | None:
    served = _served.get(id(weight))
    if served is None or not 0 < x.numel() <= MOST_ROWS * x.shape[-1] or x.dtype != weight.dtype:
        return None
    return None if torch.is_grad_enabled() and x.requires_grad else served


def serve_matrices(weights: Iterable[Tensor]) -> None:
    """Uses the fastest form for these matrices [N, K] while they exist: `linear`, `added`.

    Matrices below processor.FEWEST_BYTES or on other devices are skipped. Matrices of other dtypes
    than float32 and bfloat16 are put into huge pages only. Times the forms at the first use of a
    shape on this machine.
    """
    large = [
        one
        for one in {id(one): one for one in weights}.values()
        if one.device.type == "cpu" and one.is_contiguous()
        if one.nbytes >= processor.FEWEST_BYTES
    ]
    processor.use_huge_pages((one.data_ptr(), one.nbytes) for one in large)
    served = [one for one in large if one.dtype in (torch.float32, torch.bfloat16)]
    small = sum(one.nbytes for one in served) < processor.memory_bytes() / processor.PACKED_SHARE
    groups: dict[str, list[Tensor]] = {}
    for one in served:
        # Choices without a copy are kept beside those with one.
        name = f"{one.dtype} {len(one)}x{one.shape[1]}{'' if small else ' unpacked'}"
        groups.setdefault(name, []).append(one)
    usable = {name: _usable_forms(same[0].dtype, small) for name, same in groups.items()}
    known = _read_choices() if groups else {}
    machine = known.setdefault(_machine(), {})
    old = {name for name in groups if set(machine.get(name, ("",))) <= set(usable[name])}
    if new := {name: same for name, same in groups.items() if name not in old}:
        chosen, quiet = _fastest_forms(new, usable)
        machine |= chosen
        if quiet:  # else the next process times again
            _write_choices(known)
    packed = list[ServedMatrix]()
    for name, same in groups.items():
        for one in same:
            matrix = _served[id(one)] = ServedMatrix(one, machine[name])
            weakref.finalize(one, _served.pop, id(one), None)
            if "packed" in machine[name]:
                packed.append(matrix)
    _pack(packed)


def _pack(matrices: Iterable[ServedMatrix]) -> None:
    onednn, copies = torch.ops.mkldnn, list[tuple[int, int]]()
    for matrix in matrices:
        matrix.pack()
        copies.append((onednn.data_ptr(matrix.copy), onednn._nbytes(matrix.copy)))
    processor.use_huge_pages(copies)


def renew_copy(weight: Tensor) -> None:
    """Packs a matrix with new numbers again, if it has a copy."""
    if (served := _served.get(id(weight))) and served.copy is not None:
        served.pack()


def free_copy(weight: Tensor) -> int:
    """Frees the packed copy of a matrix; returns its bytes, 0 without a copy."""
    if (served := _served.get(id(weight))) is None or served.copy is None:
        return 0
    served.copy = None
    return weight.nbytes


def _usable_forms(dtype: torch.dtype, small: bool) -> Sequence[str]:
    """Forms that this processor and this build of torch can compute, and that memory allows."""
    onednn = torch.backends.mkldnn.is_available()
    if onednn and dtype is torch.bfloat16:
        onednn = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    needs = {"onednn": onednn and not small, "packed": onednn and small}
    return [name for name in FORMS if needs.get(name, True)]


def _fastest_forms(
    groups: Mapping[str, Sequence[Tensor]], usable: Mapping[str, Sequence[str]]
) -> tuple[dict[str, list[str]], bool]:
    """The fastest of the usable forms of each group of equal shape, for each of MEASURED_ROWS, and
    whether the machine was quiet.

    Each timing is a pass over matrices of all groups, as in a model's forward, so that no cache
    holds the next weight. Forms take turns. A matrix has the least of its times. The form for fewer
    rows stays unless another form is faster by the margin.
    """
    deepest = max(map(len, groups.values()))
    a_layer = sum(same[0].nbytes for same in groups.values())
    timed = [
        (name, ServedMatrix(same[layer], ["linear"] * len(MEASURED_ROWS)))
        for layer in range(min(deepest, 2 + _TIMED_BYTES // a_layer))
        for name, same in groups.items()
        if layer < len(same)
    ]
    _pack(matrix for name, matrix in timed if "packed" in usable[name])
    chosen: dict[str, list[str]] = {name: [] for name in groups}
    generator, best_s, usual_s = torch.Generator().manual_seed(0), 0.0, 0.0
    for rows in MEASURED_ROWS:
        inputs = {
            name: torch.randn(rows, same[0].shape[1], generator=generator).to(same[0].dtype)
            for name, same in groups.items()
        }
        seconds = _seconds(timed, inputs, usable)
        for name in groups:
            own = [times for (group, _), times in zip(timed, seconds, strict=True) if group == name]
            total = {form: sum(min(times[form]) for times in own) for form in usable[name]}
            best, before = min(total, key=total.__getitem__), (chosen[name] or ["linear"])[-1]
            chosen[name].append(best if total[before] > _MARGIN * total[best] else before)
            best_s += total[best]
            usual_s += sum(statistics.median(times[best]) for times in own)
    return chosen, usual_s < _QUIET * best_s


def _seconds(
    timed: Sequence[tuple[str, ServedMatrix]],
    inputs: Mapping[str, Tensor],
    usable: Mapping[str, Sequence[str]],
) -> list[dict[str, list[float]]]:
    """Times of each matrix in each form."""
    seconds = [{form: list[float]() for form in usable[name]} for name, _ in timed]
    for _, (form, compute) in product(range(_TIMINGS), FORMS.items()):
        for (name, matrix), times in zip(timed, seconds, strict=True):
            if form in times:
                began = time.perf_counter()
                compute(inputs[name], matrix)
                times[form].append(time.perf_counter() - began)
    return seconds


def _machine() -> str:
    name = processor.processor_field("model name") or "unknown processor"
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _choices_file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "paceline" / "products.json"


def _read_choices() -> dict[str, dict[str, list[str]]]:
    """Forms by machine, then by dtype and shape; empty without a file of valid choices."""
    try:
        found = json.loads(_choices_file().read_text(encoding="utf-8"))
        return {
            str(machine): {
                str(matrix): list(forms)
                for matrix, forms in kinds.items()
                if len(forms) == len(MEASURED_ROWS) and set(forms) <= FORMS.keys()
            }
            for machine, kinds in found.items()
        }
    except (OSError, RuntimeError, ValueError, AttributeError, TypeError):
        return {}


def _write_choices(choices: dict[str, dict[str, list[str]]]) -> None:
    # No home, no permission or no room: the next start times the forms again.
    with suppress(OSError, RuntimeError, ResourceExhausted):
        write_whole(_choices_file(), json.dumps(choices, indent=1, sort_keys=True))
