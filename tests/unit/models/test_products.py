"""Products in float32, whichever library makes them, beside float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.models import products
from paceline.models.products import (
    FEWEST_ROWS,
    Linear,
    added,
    dense,
    linear,
    spare_rows,
    use_linear,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-4}
ROWS = (1, FEWEST_ROWS - 1, FEWEST_ROWS, 200)


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    monkeypatch.setattr(products, "ONEDNN", request.param)
    return bool(request.param)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [None, numbers(48, seed=3)], ids=["plain", "bias"])
@pytest.mark.usefixtures("asked")
def test_a_product_is_that_of_float64(rows: int, bias: torch.Tensor | None) -> None:
    x, weight = numbers(rows, 32), numbers(48, 32, seed=1)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(linear(x, weight, bias).double(), expected, **CLOSE)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.usefixtures("asked")
def test_a_residual_is_added_and_stays(rows: int) -> None:
    residual, x, weight = numbers(rows, 48), numbers(rows, 32, seed=1), numbers(48, 32, seed=2)
    before = residual.clone()
    expected = residual.double() + x.double() @ weight.double().t()
    torch.testing.assert_close(added(residual, x, weight).double(), expected, **CLOSE)
    assert torch.equal(residual, before)


@pytest.mark.usefixtures("asked")
def test_parts_of_wider_tensors_are_multiplied_as_they_stand() -> None:
    x, weight = numbers(40, 64)[:, 16:48], numbers(32, 48, seed=1).t()
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(linear(x, weight).double(), expected, **CLOSE)


@pytest.mark.parametrize(
    ("rows", "spare"),
    [(0, 0), (1, 0), (31, 0), (32, 0), (33, 15), (47, 1), (48, 0), (1023, 1), (1025, 0)],
)
def test_rows_are_spared_up_to_a_number_that_onednn_is_asked_for(
    rows: int, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "ONEDNN", True)
    assert spare_rows(numbers(rows, 8)) == spare
    assert spare_rows(numbers(rows, 8).double()) == 0
    monkeypatch.setattr(products, "ONEDNN", False)
    assert spare_rows(numbers(rows, 8)) == 0


def test_no_matrix_reaches_onednn_with_gaps_between_its_rows() -> None:
    whole = numbers(48, 64)
    for one in (whole, whole.t(), whole[:, :32], whole.t()[:, :32], whole[::2]):
        found = dense(one)
        assert torch.equal(found, one)
        assert found.is_contiguous() or found.t().is_contiguous()
    assert dense(whole.t()).data_ptr() == whole.data_ptr(), "nothing is copied without need"


@pytest.mark.parametrize("shape", [(60, 32), (5, 12, 32)], ids=["rows", "batch of rows"])
@pytest.mark.parametrize("trained", ["x", "weight", "both"])
@pytest.mark.usefixtures("asked")
def test_gradients_are_those_of_float64(shape: tuple[int, ...], trained: str) -> None:
    x, weight, bias = numbers(*shape), numbers(48, 32, seed=1), numbers(48, seed=2)
    seen: dict[torch.dtype, list[torch.Tensor]] = {}
    for dtype in (torch.float64, torch.float32):
        own = x.to(dtype, copy=True).requires_grad_(trained != "weight")
        matrix = weight.to(dtype, copy=True).requires_grad_(trained != "x")
        offset = bias.to(dtype, copy=True).requires_grad_()
        made = (functional.linear if dtype is torch.float64 else linear)(own, matrix, offset)
        made.square().sum().backward()
        seen[dtype] = [one.grad for one in (own, matrix, offset) if one.grad is not None]
    assert len(seen[torch.float32]) == (3 if trained == "both" else 2)
    for found, expected in zip(seen[torch.float32], seen[torch.float64], strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-2)


@pytest.mark.usefixtures("asked")
def test_a_gradient_that_is_one_number_repeated_is_taken() -> None:
    x, weight = numbers(64, 32).requires_grad_(), numbers(48, 32, seed=1).requires_grad_()
    linear(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(64, 32), **CLOSE)
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(48, 32), **CLOSE)


def test_few_rows_and_other_numbers_go_where_torch_sends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "ONEDNN", True)
    monkeypatch.setattr(products, "_product", lambda *_: pytest.fail("oneDNN was asked"))
    weight = numbers(48, 32)
    for x in (numbers(FEWEST_ROWS - 1, 32), numbers(0, 32), numbers(200, 32).double()):
        matrix = weight.to(x.dtype)
        assert torch.equal(linear(x, matrix), functional.linear(x, matrix))


def test_modules_keep_their_parameters_and_multiply_by_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.ModuleList([nn.Linear(48, 8)])[0])
    before = dict(module.named_parameters())
    use_linear(module)
    assert [type(one) for one in module] == [Linear, nn.SiLU, Linear]
    assert dict(module.named_parameters()).keys() == before.keys()
    assert all(one is before[name] for name, one in module.named_parameters())
    made = list[int]()
    monkeypatch.setattr(products, "ONEDNN", True)
    monkeypatch.setattr(products, "_product", lambda x, *_: made.append(len(x)) or x @ x.t())
    linear_layer = module[0]
    assert isinstance(linear_layer, Linear)
    with torch.no_grad():
        linear_layer(numbers(32, 32))
    assert made == [32]


@pytest.mark.parametrize(
    ("vendor", "capability", "asked"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("GenuineIntel", "AVX512", False),
        ("AuthenticAMD", "AVX2", False),
        ("", "AVX512", False),
    ],
)
def test_onednn_is_asked_where_mkl_is_held_back(
    vendor: str, capability: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products.processor, "processor_field", {"vendor_id": vendor}.__getitem__)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert products._quicker() is asked
