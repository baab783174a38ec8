"""Arithmetic, invalid expressions, and expressions that would take for ever."""

from __future__ import annotations

import ast
import contextlib
import math
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plugins import import_object

EXAMPLE = Path(__file__).parents[3] / "examples/tools/calculator.py"
calculate = import_object(f"{EXAMPLE}:calculator")
CalculationError = import_object(f"{EXAMPLE}:CalculationError")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        (" -(2 ** 10) // 3 % 7", str(-(2**10) // 3 % 7)),
        ("7 / 2", "3.5"),
        ("2 ** -1", "0.5"),
        ("sqrt(16) + gcd(12, 18, 8)", "6.0"),
        ("round(pi, 2)", "3.14"),
        ("max(1, 2.5) - min(3, -4)", "6.5"),
        ("10 ** 300 * 10 ** 300", "1" + "0" * 600),
        ("1e308 * 10", "inf"),
        ("(-1) ** 10000001", "-1"),
    ],
)
def test_arithmetic_is_done(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "x",
        "True",
        "'a' * 9",
        "[1]",
        "(1,)",
        "1 if 1 else 2",
        "1 < 2",
        "1 << 5",
        "2 ^ 3",
        "lambda: 1",
        "__import__('os')",
        "abs.__class__",
        "abs(-1, key=1)",
        "(1).real",
        "f'{1}'",
        "1j",
        "1; 2",
        "a := 1",
        "print(1)",
        "1 / 0",
        "0 ** -1",
        "sqrt(-1)",
        "(-8) ** (1 / 3)",
        "gcd(1.5, 2)",
        "abs()",
        "floor(inf)",
        "log(0)",
        "1\0",
        "9 ** 9 ** 9",
        "9 ** 9999999999",
        "2 ** 100000",
        "2.5 ** 99999",
        "exp(1000)",
        "10 ** 1200 * 10 ** 1200",
        "(2 ** 4000) * (2 ** 4000)",
        "2 ** -99999999999",
        "-" * 900 + "1",
        "(" * 400 + "1" + ")" * 400,
        "+".join("1" for _ in range(400)),
        "1" * 1001,
        "\ud800",
    ],
)
def test_anything_else_is_refused_at_once(expression: str) -> None:
    began = time.process_time()
    with pytest.raises(CalculationError):
        calculate(expression)
    assert time.process_time() - began < 1


_numbers = st.integers(-1000, 1000).map(str) | st.floats(-1000, 1000).map(repr)
_expressions = st.recursive(
    _numbers,
    lambda inner: st.builds(
        "({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(_expressions)
def test_it_agrees_with_python(expression: str) -> None:
    try:
        expected = eval(
            compile(ast.parse(expression, mode="eval"), "", "eval"), {"__builtins__": {}}
        )
    except ZeroDivisionError:
        with pytest.raises(CalculationError, match="zero"):
            calculate(expression)
        return
    found = calculate(expression)
    assert found == str(expected) or math.isnan(expected)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_no_text_makes_it_fail_in_another_way(text: str) -> None:
    with contextlib.suppress(CalculationError):
        assert float(calculate(text)) is not None
