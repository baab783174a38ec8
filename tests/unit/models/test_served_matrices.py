"""Matrices of a served model: every form gives the product, and the measured one is used."""

import gc
import json
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from paceline.models import products
from paceline.models.products import FORMS, MEASURED_ROWS, MOST_ROWS, ServedMatrix

OUTPUTS, INPUTS = 576, 512
"""A matrix just above FEWEST_BYTES."""
Groups = dict[str, list[torch.Tensor]]
Chosen = tuple[dict[str, list[str]], bool]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of choices, in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paceline" / "products.json"


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def served(form: str, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        products, "_fastest_forms", lambda groups, _: (dict.fromkeys(groups, all_rows(form)), True)
    )
    products.serve_matrices([weight])


def all_rows(form: str) -> list[str]:
    return [form] * len(MEASURED_ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 5, 32, MOST_ROWS])
def test_every_form_is_the_product_of_float64(form: str, rows: int, dtype: torch.dtype) -> None:
    x, weight = numbers(rows, INPUTS).to(dtype), numbers(OUTPUTS, INPUTS, seed=1).to(dtype)
    found = ServedMatrix(weight, [form] * len(MEASURED_ROWS)).product(x)
    expected = x.double() @ weight.double().t()
    close = 1e-5 if dtype is torch.float32 else 8e-3
    torch.testing.assert_close(found.double(), expected, rtol=close, atol=close * 20)
    assert found.is_contiguous()


@pytest.mark.parametrize("form", FORMS)
def test_linear_and_added_use_the_form_for_few_rows_without_gradients(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, used = numbers(OUTPUTS, INPUTS), list[int]()
    compute = FORMS[form]

    def counted(x: torch.Tensor, matrix: ServedMatrix) -> torch.Tensor:
        used.append(len(x))
        return compute(x, matrix)

    monkeypatch.setitem(FORMS, form, counted)
    served(form, weight, monkeypatch)
    bias, residual = numbers(OUTPUTS, seed=2), numbers(6, OUTPUTS, seed=3)
    x = numbers(2, 3, INPUTS, seed=4)
    expected = functional.linear(x, weight, bias)
    torch.testing.assert_close(products.linear(x, weight, bias), expected, rtol=1e-5, atol=1e-3)
    flat = x.view(6, INPUTS)
    torch.testing.assert_close(
        products.added(residual, flat, weight), residual + flat @ weight.t(), rtol=1e-5, atol=1e-3
    )
    assert used == [6, 6]
    for many in (numbers(MOST_ROWS + 1, INPUTS), numbers(2, INPUTS).requires_grad_()):
        torch.testing.assert_close(
            products.linear(many, weight), functional.linear(many, weight), rtol=1e-5, atol=1e-3
        )
    assert used == [6, 6]


def test_new_numbers_in_a_served_storage_reach_its_packed_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, x = numbers(OUTPUTS, INPUTS), numbers(4, INPUTS, seed=1)
    served("packed", weight, monkeypatch)
    weight.copy_(numbers(OUTPUTS, INPUTS, seed=2))
    products.renew_copy(weight)
    torch.testing.assert_close(
        products.linear(x, weight), functional.linear(x, weight), rtol=1e-5, atol=1e-3
    )


def test_a_freed_copy_is_packed_again_for_a_later_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = numbers(OUTPUTS, INPUTS), numbers(4, INPUTS, seed=1)
    served("packed", weight, monkeypatch)
    before = products.linear(x, weight)
    assert products.free_copy(weight) == weight.nbytes
    assert products.free_copy(weight) == 0
    products.renew_copy(weight)
    assert products.free_copy(weight) == 0
    assert torch.equal(products.linear(x, weight), before)


def test_a_matrix_that_ends_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = numbers(OUTPUTS, INPUTS)
    served("packed", weight, monkeypatch)
    key = id(weight)
    assert key in products._served
    del weight
    gc.collect()
    assert key not in products._served


def test_small_matrices_and_other_dtypes_keep_the_form_of_torch() -> None:
    others = [numbers(64, 64), numbers(OUTPUTS, INPUTS).double(), numbers(INPUTS, OUTPUTS).t()]
    products.serve_matrices(others)
    assert not {id(one) for one in others} & products._served.keys()


def test_timing_draws_no_random_numbers_of_the_process() -> None:
    before = torch.get_rng_state()
    products.serve_matrices([numbers(OUTPUTS, INPUTS)])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("missing", "dtype"), [("onednn", torch.float32), ("bf16", torch.bfloat16)]
)
def test_without_onednn_a_matrix_is_served_in_the_other_forms(
    missing: str, dtype: torch.dtype, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = numbers(OUTPUTS, INPUTS).to(dtype)
    served("packed", weight, monkeypatch)  # the file may be that of a better processor
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: missing != "onednn")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: missing != "bf16")
    for form in ("onednn", "packed"):
        monkeypatch.setitem(FORMS, form, refused)
    products.serve_matrices([weight])
    x = numbers(3, INPUTS, seed=1).to(dtype)
    expected = functional.linear(x, weight)
    torch.testing.assert_close(products.linear(x, weight), expected, rtol=1e-2, atol=0.5)


def test_a_container_with_little_memory_gets_no_second_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[list[str]]()

    def forms(groups: Groups, usable: dict[str, list[str]]) -> Chosen:
        asked.extend(usable.values())
        return dict.fromkeys(groups, all_rows("linear")), True

    monkeypatch.setattr(products.processor, "GROUP_LIMIT", tmp_path / "memory.max")
    monkeypatch.setattr(products, "_fastest_forms", forms)
    for limit in ("max", f"{4 * OUTPUTS * INPUTS}"):
        (tmp_path / "memory.max").write_text(limit)
        products.serve_matrices([numbers(OUTPUTS, INPUTS)])
    assert ["packed" in usable for usable in asked] == [True, False]


@pytest.mark.parametrize("damage", [None, "", "[]", '{"m": 3}', '{"m": {"s": ["linear"]}}'])
def test_choices_of_a_quiet_machine_are_kept_and_a_damaged_file_is_no_choice(
    damage: str | None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if damage is not None:
        cache.parent.mkdir()
        cache.write_text(damage)
    timed = list[int]()
    usable = products._usable_forms(torch.float32, True)
    names = ([*usable] * len(MEASURED_ROWS))[: len(MEASURED_ROWS)]

    def forms(groups: Groups, usable: dict[str, list[str]]) -> Chosen:
        timed.extend(map(len, groups.values()))
        return dict.fromkeys(groups, names), len(timed) > 1

    monkeypatch.setattr(products, "_fastest_forms", forms)
    weights = [numbers(OUTPUTS, INPUTS, seed=seed) for seed in range(3)]
    products.serve_matrices(weights)
    assert (cache.read_text() if cache.exists() else None) == damage  # the machine was busy
    products.serve_matrices(weights)
    products.serve_matrices(weights)
    assert timed == [3, 3]
    (kept,) = json.loads(cache.read_text())[products._machine()].values()
    assert kept == names


def test_the_fastest_form_is_chosen_for_each_shape_and_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, busy, order = [0.0], [False], list[tuple[str, int]]()
    costs = {"linear": 3.0, "turned": 1.0, "packed": 2.0}

    def costing(name: str) -> products.Form:
        def compute(x: torch.Tensor, matrix: ServedMatrix) -> torch.Tensor:
            order.append((name, len(matrix.whole())))
            now[0] += costs[name] * (len(x) if name == "turned" else 1)
            # Another process takes the processor in the first passes.
            now[0] += 50.0 * (len(order) < 10 and name == "turned")
            now[0] += busy[0] * (len(order) % 13)
            return x

        return compute

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for name in FORMS:
        monkeypatch.setitem(FORMS, name, costing(name) if name in costs else refused)
    groups = {
        "wide": [numbers(OUTPUTS, INPUTS), numbers(OUTPUTS, INPUTS)],
        "flat": [numbers(2 * OUTPUTS, INPUTS), numbers(2 * OUTPUTS, INPUTS)],
    }
    usable = {"wide": [*costs], "flat": ["linear", "turned"]}
    chosen, quiet = products._fastest_forms(groups, usable)
    assert chosen["wide"] == ["turned", "turned", *all_rows("packed")[2:]]
    # The form for fewer rows stays where it is as fast.
    assert chosen["flat"] == ["turned", "turned", "turned", *all_rows("linear")[3:]]
    assert quiet
    busy[0] = True
    assert not products._fastest_forms(groups, usable)[1]
    # A pass reads the matrices as a forward does, one layer after another.
    assert [size for _, size in order[:4]] == [OUTPUTS, 2 * OUTPUTS] * 2


def refused(*_: object) -> torch.Tensor:
    raise RuntimeError("this processor has no such product")
